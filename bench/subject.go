package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// A subject is a service that is measured. Each has a PostgreSQL and a Redis database of its own.
type subject struct {
	name    string
	redisDB int
	workers int // tasks run at once where it runs any
	// waiting asks whether tasks wait or run; since counts those that were posted and
	// completed after $1, with when the first began and the last ended. Empty for
	// asynq, which counts in Redis, and for what runs nothing.
	waiting, since string
}

// nexusflowWorkers follows the README's advice for short functions; for a drain twice as many let a
// batch be claimed while the one before runs.
const (
	nexusflowWorkers      = 512
	nexusflowDrainWorkers = 1024
)

func nexusflowSubject() subject {
	return subject{
		name: "nexusflow", redisDB: 0, workers: nexusflowWorkers,
		waiting: `SELECT EXISTS (SELECT FROM tasks WHERE status = 'pending' AND published_at IS NULL)
			OR EXISTS (SELECT FROM tasks WHERE status = 'pending' AND published_at IS NOT NULL)
			OR EXISTS (SELECT FROM tasks WHERE status = 'processing')`,
		// The key of a task begins with its time: this reads no older ones, however many there are.
		since: `SELECT count(*), min(started_at), max(finished_at) FROM tasks WHERE status = 'completed' AND finished_at >= $1
			AND task_id >= (lpad(to_hex(floor(extract(epoch FROM $1::timestamptz) * 1000)::bigint), 12, '0') || '70008000000000000000')::uuid`,
	}
}

func asynqSubject() subject { return subject{name: "asynq", redisDB: 1, workers: asynqWorkers} }

func riverSubject() subject {
	return subject{
		name: "river", workers: riverWorkers,
		waiting: `SELECT EXISTS (SELECT FROM river_job WHERE state = 'available') OR EXISTS (SELECT FROM river_job WHERE state = 'running')
			OR EXISTS (SELECT FROM river_job WHERE state = 'retryable') OR EXISTS (SELECT FROM river_job WHERE state = 'scheduled')`,
		since: `SELECT count(*), min(attempted_at), max(finalized_at) FROM river_job WHERE state = 'completed' AND finalized_at >= $1`,
	}
}

func obviousSubject() subject {
	return subject{
		name: "obvious", redisDB: 2, workers: plainWorkers,
		waiting: `SELECT EXISTS (SELECT FROM tasks WHERE status <> 'completed')`,
		since:   `SELECT count(*), min(created_at), max(updated_at) FROM tasks WHERE status = 'completed' AND updated_at >= $1`,
	}
}

func echoSubject() subject { return subject{name: "echo", redisDB: 3} }

func insertSubject() subject { return subject{name: "insert", redisDB: 4} }

// fresh gives a subject empty databases.
func (b *bench) fresh(ctx context.Context, s subject) error {
	if err := b.flushRedis(ctx, s.redisDB); err != nil {
		return err
	}
	return b.exec(ctx, "postgres", "DROP DATABASE IF EXISTS "+s.name+" WITH (FORCE)", "CREATE DATABASE "+s.name, "CHECKPOINT")
}

// start starts a subject on the databases as they are; without workers it only takes tasks in.
// bare says that handlers of a peer keep no result.
func (b *bench) start(ctx context.Context, s subject, workers int, bare bool) (*process, error) {
	if s.name == "nexusflow" {
		roles := "gateway,worker"
		if workers == 0 {
			roles = "gateway"
		}
		return b.startNexusflow(ctx, s.name, "ROLES="+roles, "WORKER_CONCURRENCY="+strconv.Itoa(cmp.Or(workers, 16)))
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	args := []string{"serve", "-queue", s.name, "-addr", addr, "-database", b.postgres.url(s.name), "-redis", b.redis.addr,
		"-redis-db", strconv.Itoa(s.redisDB), "-workers", strconv.Itoa(workers)}
	if bare {
		args = append(args, "-bare")
	}
	return b.launch(ctx, s.name, addr, exec.Command(b.self, args...))
}

// startNexusflow starts the program under test on a database, with further settings.
func (b *bench) startNexusflow(ctx context.Context, database string, settings ...string) (*process, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(b.nexusflow)
	cmd.Dir = b.dir
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"),
		"HTTP_ADDR=" + addr,
		"DATABASE_URL=" + b.postgres.url(database),
		"REDIS_URL=redis://" + b.redis.addr + "/0",
		"HANDLERS_FILE=" + b.handlersFile(),
		"DATA_DIR=" + b.dir,
		"LOG_LEVEL=warn",
	}, settings...)
	if b.opts.profiles == "" {
		return b.launch(ctx, "nexusflow", addr, cmd)
	}
	cmd.Env = append(cmd.Env, "BENCH_PROFILES="+b.opts.profiles)
	p, err := b.launch(ctx, "nexusflow", addr, cmd)
	if err == nil {
		p.beforeStop = b.finishProfile
	}
	return p, err
}

func (b *bench) launch(ctx context.Context, name, addr string, cmd *exec.Cmd) (*process, error) {
	b.services++
	p, err := startProcess(b.dir, fmt.Sprintf("%03d-%s", b.services, name), cmd)
	if err != nil {
		return nil, err
	}
	p.addr = addr
	if err := p.answers(ctx, "/readyz", 200); err != nil {
		stopAll(p)
		return nil, err
	}
	return p, nil
}

// finished is what became of a number of tasks.
type finished struct {
	count       int
	first, last time.Time // begin of the first, end of the last
}

// waitDone returns when p has completed n tasks after start and has none left. Fewer
// completions than that are an error, as is waiting for more than 5 minutes.
func (b *bench) waitDone(ctx context.Context, s subject, p *process, start time.Time, n int) (f finished, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if s.since == "" {
		client := b.redisClient(s.redisDB)
		defer client.Close()
		return asynqDone(ctx, client, n)
	}
	conn, err := b.connect(ctx, s.name)
	if err != nil {
		return f, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = p.waitUntil(ctx, 5*time.Minute, rarely, func(ctx context.Context) error {
		var left bool
		if err := conn.QueryRow(ctx, s.waiting).Scan(&left); err != nil {
			return err
		}
		if left {
			return errUnfinished
		}
		return nil
	})
	if err != nil {
		return f, err
	}
	var first, last *time.Time
	if err := conn.QueryRow(ctx, s.since, start).Scan(&f.count, &first, &last); err != nil {
		return f, fmt.Errorf("count completed tasks: %w", err)
	}
	if f.count != n {
		return f, fmt.Errorf("%d of %d tasks completed; %s", f.count, n, strings.TrimSpace(p.tail()))
	}
	if first != nil {
		f.first, f.last = *first, *last
	}
	return f, nil
}
