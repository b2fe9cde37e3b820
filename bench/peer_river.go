package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
)

const (
	riverWorkers = 100 // behind the gateway; more of them slow it down there
	// riverDrainWorkers and the two times are those of River's own benchmark, its best here.
	riverDrainWorkers  = 2000
	riverFetchCooldown = 2 * time.Millisecond
	riverFetchPoll     = 20 * time.Millisecond
	plainPoolSize      = 40
)

// riverTask is a task as River's arguments.
type riverTask struct {
	Name    string          `json:"name"`
	Payload json.RawMessage `json:"payload"`
}

func (riverTask) Kind() string { return "task" }

type riverWorker struct {
	river.WorkerDefaults[riverTask]
	bare bool
}

func (w *riverWorker) Work(ctx context.Context, _ *river.Job[riverTask]) error {
	if w.bare {
		return nil
	}
	return river.RecordOutput(ctx, json.RawMessage(taskResult))
}

// riverQueue is River with everything in its default queue.
type riverQueue struct {
	pool    *pgxpool.Pool
	client  *river.Client[pgx.Tx]
	started bool
}

func openPool(ctx context.Context, url string, size int32) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = size
	return pgxpool.NewWithConfig(ctx, cfg)
}

func openRiver(ctx context.Context, o serveOptions) (queue, error) { return newRiverQueue(ctx, o) }

// newRiverQueue brings River's schema up to date and starts its workers, if any.
func newRiverQueue(ctx context.Context, o serveOptions) (*riverQueue, error) {
	pool, err := openPool(ctx, o.database, plainPoolSize)
	if err != nil {
		return nil, err
	}
	if err := migrateRiver(ctx, pool); err != nil {
		return nil, err
	}
	cfg := &river.Config{Logger: riverLog(), FetchCooldown: riverFetchCooldown, FetchPollInterval: riverFetchPoll}
	if o.workers > 0 {
		cfg.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: o.workers}}
		cfg.Workers = river.NewWorkers()
		river.AddWorker(cfg.Workers, &riverWorker{bare: o.bare})
	}
	client, err := river.NewClient(riverpgxv5.New(pool), cfg)
	if err != nil {
		return nil, err
	}
	q := &riverQueue{pool: pool, client: client, started: o.workers > 0}
	if !q.started {
		return q, nil
	}
	return q, client.Start(context.WithoutCancel(ctx))
}

func riverLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

func migrateRiver(ctx context.Context, pool *pgxpool.Pool) error {
	m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: riverLog()})
	if err != nil {
		return err
	}
	_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

func (q *riverQueue) enqueue(ctx context.Context, name string, payload json.RawMessage) (string, error) {
	res, err := q.client.Insert(ctx, riverTask{name, payload}, nil)
	if err != nil {
		return "", err
	}
	return strconv.FormatInt(res.Job.ID, 10), nil
}

func (q *riverQueue) show(ctx context.Context, id string) (view, error) {
	n, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		return view{}, errUnknown
	}
	job, err := q.client.JobGet(ctx, n)
	if errors.Is(err, rivertype.ErrNotFound) {
		return view{}, errUnknown
	}
	if err != nil {
		return view{}, err
	}
	var t riverTask
	if err := json.Unmarshal(job.EncodedArgs, &t); err != nil {
		return view{}, err
	}
	v := view{ID: id, Name: t.Name, Status: string(job.State), Payload: t.Payload, Result: job.Output(), Retries: max(0, job.Attempt-1), MaxRetries: job.MaxAttempts - 1}
	if k := len(job.Errors); k > 0 {
		v.Error = job.Errors[k-1].Error
	}
	return v, nil
}

func (q *riverQueue) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if q.started {
		if err := q.client.StopAndCancel(ctx); err != nil {
			fmt.Fprintf(os.Stderr, "stop river: %v\n", err)
		}
	}
	q.pool.Close()
}

// loadRiver inserts n jobs by COPY, its fastest way.
func loadRiver(ctx context.Context, url string, n int) error {
	q, err := newRiverQueue(ctx, serveOptions{database: url})
	if err != nil {
		return err
	}
	defer q.close()
	const page = 5000
	for from := 0; from < n; from += page {
		jobs := make([]river.InsertManyParams, min(page, n-from))
		for i := range jobs {
			jobs[i].Args = riverTask{taskName, appendPayload(nil, from+i)}
		}
		if _, err := q.client.InsertManyFast(ctx, jobs); err != nil {
			return fmt.Errorf("insert jobs: %w", err)
		}
	}
	return nil
}
