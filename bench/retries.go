package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	dueRetries  = "moving due retries"
	duringMoves = "submit while retries are moved"
)

// dueRows are tasks that were posted, failed once and are due again, in a queue that nobody reads here.
// As with all that were posted their keys begin with the time.
const dueRows = `INSERT INTO tasks (task_id, name, queue, payload, retry_count, attempt, error_message, created_at, updated_at, run_at)
SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - 60000 + n / 100), 12, '0') || '7' || substr(md5(n::text), 1, 3) || 'a' || substr(md5(n::text), 4, 15))::uuid, '` + taskName + `', 'parked', jsonb_build_object('seq', n, 'file', 'uploads/clip-' || n || '.mp4', 'codec', 'h264', 'user', 'u-4711', 'w', 1280, 'h', 720),
	1, 1, 'worker lost during attempt 1', now() - interval '1 minute', now() - interval '30 seconds', now() - interval '1 second' + n * interval '1 microsecond'
FROM generate_series(1, $1::int) n`

// retries measures how fast a dispatcher moves due retries to the stream while a gateway
// takes in tasks. Neither kind is run: the worker reads a third queue, so that its
// processor time is the dispatcher's.
func (b *bench) retries(ctx context.Context) error {
	var submits sample
	err := b.measure(ctx, dueRetries, "nexusflow", func(ctx context.Context) (s sample, err error) {
		s, submits, err = b.moveRetries(ctx)
		return s, err
	})
	if err != nil {
		return err
	}
	b.keep(duringMoves, "nexusflow", submits)
	return nil
}

// moveRetries returns the rate of moves, and as the completed of submits the rate of posts
// during the moves, beside the rate of those before.
func (b *bench) moveRetries(ctx context.Context) (moves, submits sample, err error) {
	s := nexusflowSubject()
	if err := b.fresh(ctx, s); err != nil {
		return moves, submits, err
	}
	gateway, err := b.startNexusflow(ctx, s.name, "ROLES=gateway")
	if err != nil {
		return moves, submits, err
	}
	defer stopAll(gateway)
	if err := b.exec(ctx, s.name, strings.ReplaceAll(dueRows, "$1", fmt.Sprint(b.opts.retries)), "VACUUM ANALYZE tasks", "CHECKPOINT"); err != nil {
		return moves, submits, err
	}
	conn, err := b.connect(ctx, s.name)
	if err != nil {
		return moves, submits, err
	}
	defer conn.Close(context.WithoutCancel(ctx))

	posting, stop := context.WithCancel(ctx)
	defer stop()
	posted := make(chan error, 1)
	m := b.newMeter(gateway)
	go func() {
		_, err := load{addr: gateway.addr, conns: togetherConns, span: 4 * time.Minute}.run(posting)
		posted <- err
	}()
	worker, alone, err := b.afterAlone(ctx, s.name)
	if err == nil {
		defer stopAll(worker)
		err = worker.waitUntil(ctx, 3*time.Minute, rarely, func(ctx context.Context) error {
			var left bool
			if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM tasks WHERE status = 'pending' AND published_at IS NULL)").Scan(&left); err != nil {
				return err
			}
			if left {
				return errUnfinished
			}
			return nil
		})
	}
	stop()
	if loadErr := <-posted; err == nil && loadErr != nil && posting.Err() == nil {
		err = loadErr
	}
	if err != nil {
		return moves, submits, err
	}
	m.apps = append(m.apps, worker)
	moves.cpu = m.stop()

	during, before, took, err := moved(ctx, conn, alone, b.opts.span)
	if err != nil {
		return moves, submits, err
	}
	moves.tasks = b.opts.retries
	moves.rate = float64(b.opts.retries) / took.Seconds()
	submits = sample{rate: float64(before) / b.opts.span.Seconds(), completed: float64(during) / took.Seconds(), tasks: during, cpu: cpu{other: moves.cpu.other}}
	return moves, submits, nil
}

// moved returns for how long retries were moved, how many tasks were posted during that
// time, and how many before within a span that ended at alone.
func moved(ctx context.Context, conn *pgx.Conn, alone time.Time, span time.Duration) (during, before int, took time.Duration, err error) {
	const windows = `WITH moved AS (
		SELECT min(published_at) AS first, max(published_at) AS last FROM tasks WHERE queue = 'parked'
	)
	SELECT last - first,
		(SELECT count(*) FROM tasks WHERE queue = 'default' AND created_at BETWEEN first AND last),
		(SELECT count(*) FROM tasks WHERE queue = 'default' AND created_at BETWEEN $1::timestamptz - $2::interval AND $1)
	FROM moved`
	if err := conn.QueryRow(ctx, windows, alone, span).Scan(&took, &during, &before); err != nil {
		return 0, 0, 0, fmt.Errorf("read moved tasks: %w", err)
	}
	return during, before, took, nil
}

// afterAlone lets the load warm up and run alone for a while and then starts the worker,
// whose dispatcher begins to move. It returns when the load ceased to be alone.
func (b *bench) afterAlone(ctx context.Context, database string) (*process, time.Time, error) {
	if err := pause(ctx, b.opts.span+time.Second); err != nil {
		return nil, time.Time{}, err
	}
	alone := time.Now()
	p, err := b.startNexusflow(ctx, database, "ROLES=worker", "QUEUES=unread:1")
	return p, alone, err
}
