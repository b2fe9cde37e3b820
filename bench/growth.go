package main

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// A grownTable is a database of NexusFlow with many ended tasks.
type grownTable struct {
	rows  int
	ready time.Time // when it was filled: tasks of measurements are younger
}

func (g grownTable) database() string { return fmt.Sprintf("grown_%d", g.rows) }

func (g grownTable) name(what string) string {
	return fmt.Sprintf("%s with %s ended rows", what, number(float64(g.rows)))
}

// endedRows fills a table with tasks that ended within the last 20 days, in the order of
// their keys, as a service that has run that long leaves them; none is old enough to be deleted.
const endedRows = `INSERT INTO tasks (task_id, name, status, payload, result, idempotency_key, attempt, created_at, updated_at, run_at, published_at, started_at, finished_at)
SELECT (lpad(to_hex((extract(epoch FROM r.at) * 1000)::bigint), 12, '0') || '7' || substr(md5(r.n::text), 1, 3) || 'a' || substr(md5(r.n::text), 4, 15))::uuid,
	'` + taskName + `', CASE WHEN r.n % 50 = 0 THEN 'failed' ELSE 'completed' END, r.payload, r.payload, CASE WHEN r.n % 4 = 0 THEN md5('key' || r.n) END, 1,
	r.at, r.at, r.at, r.at, r.at, r.at
FROM (
	SELECT n, now() - interval '20 days' + n * (interval '20 days' / $1::int) AS at,
		jsonb_build_object('seq', n, 'file', 'uploads/clip-' || n || '.mp4', 'codec', 'h264', 'user', 'u-4711', 'w', 1280, 'h', 720) AS payload
	FROM generate_series(1, $1::int) n
) r`

// growth measures posting and draining on tables of several sizes, which are filled once
// and brought back to their size after each measurement.
func (b *bench) growth(ctx context.Context) error {
	if b.grown == nil {
		for _, rows := range b.opts.rows {
			if err := b.grow(ctx, rows); err != nil {
				return err
			}
		}
	}
	for _, g := range rotated(b.grown, b.round) {
		var drain sample
		err := b.measure(ctx, g.name("submit"), "nexusflow", func(ctx context.Context) (s sample, err error) {
			s, drain, err = b.onGrown(ctx, g)
			s.cpu.other = max(s.cpu.other, drain.cpu.other)
			return s, err
		})
		if err != nil {
			return err
		}
		b.keep(g.name("drain"), "nexusflow", drain)
	}
	return nil
}

func (b *bench) grow(ctx context.Context, rows int) error {
	g := grownTable{rows: rows}
	if err := b.exec(ctx, "postgres", "CREATE DATABASE "+g.database()); err != nil {
		return err
	}
	p, err := b.startNexusflow(ctx, g.database(), "ROLES=gateway") // makes the schema
	if err != nil {
		return err
	}
	stopAll(p)
	conn, err := b.connect(ctx, g.database())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var fillfactor string
	const asMade = "SELECT COALESCE((SELECT option_value FROM pg_options_to_table(reloptions) WHERE option_name = 'fillfactor'), '100') FROM pg_class WHERE oid = 'tasks'::regclass"
	if err := conn.QueryRow(ctx, asMade).Scan(&fillfactor); err != nil {
		return fmt.Errorf("read fillfactor: %w", err)
	}
	// Traffic leaves few pages with room for a task beside the reserve for updates; one INSERT of
	// all rows under that reserve would leave it in every other page.
	if err := b.exec(ctx, g.database(), "ALTER TABLE tasks SET (fillfactor = 100)", strings.ReplaceAll(endedRows, "$1", fmt.Sprint(rows)),
		"ALTER TABLE tasks SET (fillfactor = "+fillfactor+")", "VACUUM ANALYZE tasks", "CHECKPOINT"); err != nil {
		return err
	}
	g.ready = time.Now()
	b.grown = append(b.grown, g)
	return nil
}

// onGrown posts to a gateway for a while and then lets a worker drain what was posted.
func (b *bench) onGrown(ctx context.Context, g grownTable) (submit, drain sample, err error) {
	s := nexusflowSubject()
	if err := b.flushRedis(ctx, s.redisDB); err != nil {
		return submit, drain, err
	}
	// What is left of the time before: rows of earlier measurements and their dead versions.
	clean := fmt.Sprintf("DELETE FROM tasks WHERE task_id >= '%012x70008000000000000000'", g.ready.UnixMilli())
	if err := b.exec(ctx, g.database(), clean, "VACUUM ANALYZE tasks", "CHECKPOINT"); err != nil {
		return submit, drain, err
	}
	begin := time.Now()
	gateway, err := b.startNexusflow(ctx, g.database(), "ROLES=gateway")
	if err != nil {
		return submit, drain, err
	}
	submit, err = b.post(ctx, gateway, load{addr: gateway.addr, conns: togetherConns, span: b.opts.span})
	stopAll(gateway)
	if err != nil {
		return submit, drain, err
	}

	var waiting int
	conn, err := b.connect(ctx, g.database())
	if err != nil {
		return submit, drain, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM tasks WHERE status = 'pending' AND published_at IS NOT NULL").Scan(&waiting); err != nil {
		return submit, drain, fmt.Errorf("count waiting tasks: %w", err)
	}
	m := b.newMeter()
	worker, err := b.startNexusflow(ctx, g.database(), "ROLES=worker", fmt.Sprintf("WORKER_CONCURRENCY=%d", nexusflowWorkers))
	if err != nil {
		return submit, drain, err
	}
	defer stopAll(worker)
	s.name = g.database()
	all, err := b.waitDone(ctx, s, worker, begin, waiting)
	if err != nil {
		return submit, drain, err
	}
	m.apps = []*process{worker}
	drain = sample{rate: float64(waiting) / all.last.Sub(all.first).Seconds(), tasks: waiting, cpu: m.stop()}
	return submit, drain, nil
}
