package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

const (
	asynqWorkers = 100
	// asynqCheck is how often idle workers look; the default of 1 s would make asynq look
	// slow where it only waits, less than 10 ms costs it throughput.
	asynqCheck = 10 * time.Millisecond
	// asynqKeep is how long a task can be read after it completed; by default not at all.
	asynqKeep = time.Hour
)

// asynqQueue is asynq with everything in its default queue.
type asynqQueue struct {
	client    *asynq.Client
	inspector *asynq.Inspector
	server    *asynq.Server // nil when it only takes tasks in
}

func asynqRedis(addr string, database int) asynq.RedisClientOpt {
	return asynq.RedisClientOpt{Addr: addr, DB: database, PoolSize: 150}
}

func openAsynq(_ context.Context, o serveOptions) (queue, error) {
	opt := asynqRedis(o.redis, o.redisDB)
	q := &asynqQueue{client: asynq.NewClient(opt), inspector: asynq.NewInspector(opt)}
	if o.workers == 0 {
		return q, nil
	}
	q.server = asynq.NewServer(opt, asynq.Config{Concurrency: o.workers, TaskCheckInterval: asynqCheck, LogLevel: asynq.ErrorLevel})
	return q, q.server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		if o.bare {
			return nil
		}
		_, err := t.ResultWriter().Write([]byte(taskResult))
		return err
	}))
}

func (q *asynqQueue) enqueue(ctx context.Context, name string, payload json.RawMessage) (string, error) {
	info, err := q.client.EnqueueContext(ctx, asynq.NewTask(name, payload), asynq.Retention(asynqKeep))
	if err != nil {
		return "", err
	}
	return info.ID, nil
}

func (q *asynqQueue) show(_ context.Context, id string) (view, error) {
	t, err := q.inspector.GetTaskInfo("default", id)
	if errors.Is(err, asynq.ErrTaskNotFound) || errors.Is(err, asynq.ErrQueueNotFound) {
		return view{}, errUnknown
	}
	if err != nil {
		return view{}, err
	}
	return view{ID: t.ID, Name: t.Type, Status: t.State.String(), Payload: t.Payload, Result: t.Result, Retries: t.Retried, MaxRetries: t.MaxRetry, Error: t.LastErr}, nil
}

func (q *asynqQueue) close() {
	if q.server != nil {
		q.server.Shutdown()
	}
	q.client.Close()
	q.inspector.Close()
}

// loadAsynq enqueues n tasks, one by one: asynq has no other way.
func loadAsynq(ctx context.Context, addr string, database, n int) error {
	client := asynq.NewClient(asynqRedis(addr, database))
	defer client.Close()
	_, err := closedLoop(ctx, producers, 0, n, func(_, seq int) error {
		_, err := client.EnqueueContext(ctx, asynq.NewTask(taskName, appendPayload(nil, seq)))
		return err
	})
	return err
}

// asynqDone follows the counter of processed tasks that asynq keeps in Redis, from before
// the first until n more are done. The times are exact to the 2 ms between two looks.
func asynqDone(ctx context.Context, r *redis.Client, n int) (finished, error) {
	var f finished
	for {
		done, err := r.Get(ctx, "asynq:{default}:processed").Int()
		if err != nil && !errors.Is(err, redis.Nil) {
			return f, fmt.Errorf("read counter of asynq: %w", err)
		}
		now := time.Now()
		if done > 0 && f.count == 0 {
			f.first = now
		}
		f.count = done
		if done >= n {
			f.last = now
			return f, nil
		}
		select {
		case <-ctx.Done():
			return f, fmt.Errorf("wait for asynq: %d of %d tasks: %w", done, n, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}
