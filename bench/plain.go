package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// echo stores nothing: it is what net/http and JSON alone allow.
type echo struct{}

func openEcho(context.Context, serveOptions) (queue, error) { return echo{}, nil }

func (echo) enqueue(context.Context, string, json.RawMessage) (string, error) {
	return "126cd0d0-0bc1-4a40-a4fb-dc0e7e3d7194", nil
}

func (echo) show(context.Context, string) (view, error) { return view{}, errUnknown }

func (echo) close() {}

// plainSchema is the smallest table for such a service.
const plainSchema = `CREATE TABLE IF NOT EXISTS tasks (
	task_id         uuid        PRIMARY KEY,
	name            text        NOT NULL,
	status          text        NOT NULL DEFAULT 'pending',
	payload         jsonb       NOT NULL DEFAULT '{}',
	result          jsonb,
	retry_count     int         NOT NULL DEFAULT 0,
	max_retries     int         NOT NULL DEFAULT 3,
	error_message   text,
	idempotency_key text,
	created_at      timestamptz NOT NULL DEFAULT now(),
	updated_at      timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS tasks_idempotency_key ON tasks (idempotency_key) WHERE idempotency_key IS NOT NULL`

// plainInsert is the statement that each request costs at least when requests are not grouped.
const plainInsert = "INSERT INTO tasks (task_id, name, payload) VALUES ($1, $2, $3)"

const (
	plainStream  = "tasks"
	plainGroup   = "workers"
	plainWorkers = 100
)

// plain is the service written the obvious way: one statement and one command at a time.
// Without a Redis client it only inserts.
type plain struct {
	pool    *pgxpool.Pool
	redis   *redis.Client
	stop    context.CancelFunc
	workers sync.WaitGroup
}

func openInsert(ctx context.Context, o serveOptions) (queue, error) {
	pool, err := openPool(ctx, o.database, plainPoolSize)
	if err != nil {
		return nil, err
	}
	if _, err := pool.Exec(ctx, plainSchema); err != nil {
		return nil, err
	}
	return &plain{pool: pool, stop: func() {}}, nil
}

func openObvious(ctx context.Context, o serveOptions) (queue, error) {
	pool, err := openPool(ctx, o.database, plainPoolSize)
	if err != nil {
		return nil, err
	}
	if _, err := pool.Exec(ctx, plainSchema); err != nil {
		return nil, err
	}
	p := &plain{pool: pool, redis: redis.NewClient(&redis.Options{Addr: o.redis, DB: o.redisDB, PoolSize: o.workers + 50})}
	if err := p.redis.XGroupCreateMkStream(ctx, plainStream, plainGroup, "0").Err(); err != nil {
		return nil, err
	}
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
	messages := make(chan redis.XMessage)
	p.workers.Go(func() { p.read(ctx, int64(o.workers), messages) })
	for range o.workers {
		p.workers.Go(func() {
			for m := range messages {
				if err := p.work(ctx, m); err != nil && ctx.Err() == nil {
					fmt.Fprintf(os.Stderr, "work: %v\n", err)
				}
			}
		})
	}
	return p, nil
}

func (p *plain) enqueue(ctx context.Context, name string, payload json.RawMessage) (string, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return "", err
	}
	if _, err := p.pool.Exec(ctx, plainInsert, id, name, payload); err != nil {
		return "", err
	}
	if p.redis == nil {
		return id.String(), nil
	}
	return id.String(), p.redis.XAdd(ctx, plainEntry(id)).Err()
}

func plainEntry(id uuid.UUID) *redis.XAddArgs {
	return &redis.XAddArgs{Stream: plainStream, Values: []string{"task_id", id.String()}}
}

func (p *plain) show(ctx context.Context, id string) (view, error) {
	v := view{ID: id}
	var message *string
	err := p.pool.QueryRow(ctx, "SELECT name, status, payload, result, retry_count, max_retries, error_message FROM tasks WHERE task_id = $1", id).
		Scan(&v.Name, &v.Status, &v.Payload, &v.Result, &v.Retries, &v.MaxRetries, &message)
	if errors.Is(err, pgx.ErrNoRows) {
		return v, errUnknown
	}
	if message != nil {
		v.Error = *message
	}
	return v, err
}

// read hands entries to the workers until ctx ends.
func (p *plain) read(ctx context.Context, count int64, messages chan<- redis.XMessage) {
	defer close(messages)
	for ctx.Err() == nil {
		streams, err := p.redis.XReadGroup(ctx, &redis.XReadGroupArgs{Group: plainGroup, Consumer: "bench", Streams: []string{plainStream, ">"}, Count: count, Block: 500 * time.Millisecond}).Result()
		if errors.Is(err, redis.Nil) {
			continue
		}
		if err != nil {
			if ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "read stream: %v\n", err)
			}
			return
		}
		for _, m := range streams[0].Messages {
			messages <- m
		}
	}
}

func (p *plain) work(ctx context.Context, m redis.XMessage) error {
	id := m.Values["task_id"]
	if _, err := p.pool.Exec(ctx, "UPDATE tasks SET status = 'processing', updated_at = now() WHERE task_id = $1", id); err != nil {
		return err
	}
	if _, err := p.pool.Exec(ctx, "UPDATE tasks SET status = 'completed', result = $2, updated_at = now() WHERE task_id = $1", id, taskResult); err != nil {
		return err
	}
	return p.redis.XAck(ctx, plainStream, plainGroup, m.ID).Err()
}

func (p *plain) close() {
	p.stop()
	p.workers.Wait()
	p.pool.Close()
	if p.redis != nil {
		p.redis.Close()
	}
}
