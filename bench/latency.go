package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
)

const (
	latencyRate = 200
	toHandler   = "POST to handler, 200 a second"
	visibleRate = 100
	toVisible   = "POST to visible result, 100 a second"
)

// commitAndAdd is the subject that does no more than one INSERT and one XADD.
const commitAndAdd = "INSERT + XADD"

// latency measures the time from the start of a POST to the start of the handler at a low
// fixed rate, beside that of one INSERT and one XADD at the same rate.
func (b *bench) latency(ctx context.Context) error {
	steps := []struct {
		subject string
		run     func(context.Context) (sample, error)
	}{{"nexusflow", b.handlerLatency}, {commitAndAdd, b.commitLatency}}
	for _, s := range rotated(steps, b.round) {
		if err := b.measure(ctx, toHandler, s.subject, s.run); err != nil {
			return err
		}
	}
	return nil
}

// handlerLatency learns when a handler started from the service's own log, which names each
// start at level debug. Writing it costs the service some 20 us a task.
func (b *bench) handlerLatency(ctx context.Context) (out sample, err error) {
	s := nexusflowSubject()
	if err := b.fresh(ctx, s); err != nil {
		return out, err
	}
	p, err := b.startNexusflow(ctx, s.name, "ROLES=gateway,worker", "WORKER_CONCURRENCY="+strconv.Itoa(s.workers), "LOG_LEVEL=debug")
	if err != nil {
		return out, err
	}
	defer stopAll(p)
	pool := newConnections(p.addr)
	defer pool.close()
	total, warm := int(b.opts.steady.Seconds()*latencyRate), latencyRate/2
	begins, ids := make([]time.Time, total+warm), make([]string, total+warm)
	post := func(seq int) error {
		c, err := pool.take(ctx)
		if err != nil {
			return err
		}
		begins[seq] = time.Now()
		body, err := c.post(seq, "")
		if err != nil {
			return err
		}
		pool.give(c)
		ids[seq], err = taskID(body)
		return err
	}
	begin := time.Now()
	if err := openLoop(ctx, latencyRate, warm, func(i int) error { return post(total + i) }); err != nil {
		return out, err
	}
	m := b.newMeter(p)
	if err := openLoop(ctx, latencyRate, total, post); err != nil {
		return out, fmt.Errorf("%w; %s", err, p.tail())
	}
	out = sample{tasks: total, cpu: m.stop()}
	if _, err := b.waitDone(ctx, s, p, begin, warm+total); err != nil {
		return out, err
	}
	started, err := loggedStarts(p.log)
	if err != nil {
		return out, err
	}
	times := make([]time.Duration, total)
	for seq, id := range ids[:total] {
		at, ok := started[id]
		if !ok {
			return out, fmt.Errorf("the log names no start of task %s", id)
		}
		times[seq] = at.Sub(begins[seq])
	}
	out.p50, out.p99 = quantile(times, 0.5), quantile(times, 0.99)
	out.rss, err = rss(p.pid())
	return out, err
}

// loggedStarts returns when each task's handler started, by the task's id.
func loggedStarts(path string) (map[string]time.Time, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read log: %w", err)
	}
	started := make(map[string]time.Time)
	for line := range bytes.Lines(data) {
		var l struct {
			Time   time.Time `json:"time"`
			Msg    string    `json:"msg"`
			TaskID string    `json:"task_id"`
		}
		if err := json.Unmarshal(line, &l); err != nil {
			return nil, fmt.Errorf("read log line %q: %w", line, err)
		}
		if l.Msg == "task started" {
			started[l.TaskID] = l.Time
		}
	}
	return started, nil
}

func (b *bench) commitLatency(ctx context.Context) (out sample, err error) {
	s := insertSubject()
	if err := b.fresh(ctx, s); err != nil {
		return out, err
	}
	pool, err := openPool(ctx, b.postgres.url(s.name), 8)
	if err != nil {
		return out, fmt.Errorf("connect to postgres: %w", err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, plainSchema); err != nil {
		return out, fmt.Errorf("create table: %w", err)
	}
	client := b.redisClient(s.redisDB)
	defer client.Close()
	total := int(b.opts.steady.Seconds() * latencyRate)
	times := make([]time.Duration, total)
	call := func(seq int) error {
		begin := time.Now()
		id, err := uuid.NewV7()
		if err != nil {
			return err
		}
		if _, err := pool.Exec(ctx, plainInsert, id, taskName, appendPayload(nil, seq)); err != nil {
			return fmt.Errorf("insert task: %w", err)
		}
		if err := client.XAdd(ctx, plainEntry(id)).Err(); err != nil {
			return fmt.Errorf("add entry: %w", err)
		}
		times[seq] = time.Since(begin)
		return nil
	}
	if err := openLoop(ctx, latencyRate, min(total, latencyRate/2), call); err != nil { // warms up; overwritten below
		return out, err
	}
	m := b.newMeter()
	if err := openLoop(ctx, latencyRate, total, call); err != nil {
		return out, err
	}
	return sample{p50: quantile(times, 0.5), p99: quantile(times, 0.99), tasks: total, cpu: m.stop()}, nil
}

// visible measures the time from the start of a POST until a client that polls sees the
// task completed.
func (b *bench) visible(ctx context.Context) error {
	for _, s := range rotated([]subject{nexusflowSubject(), asynqSubject(), riverSubject()}, b.round) {
		if err := b.measure(ctx, toVisible, s.name, func(ctx context.Context) (sample, error) { return b.visibleLatency(ctx, s) }); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) visibleLatency(ctx context.Context, s subject) (out sample, err error) {
	if err := b.fresh(ctx, s); err != nil {
		return out, err
	}
	p, err := b.start(ctx, s, s.workers, false)
	if err != nil {
		return out, err
	}
	defer stopAll(p)
	pool := newConnections(p.addr)
	defer pool.close()
	total := int(b.opts.steady.Seconds() * visibleRate)
	var mu sync.Mutex
	var times []time.Duration
	call := func(seq int) error {
		took, err := pollUntilDone(ctx, pool, seq)
		mu.Lock()
		defer mu.Unlock()
		times = append(times, took)
		return err
	}
	if err := openLoop(ctx, visibleRate, visibleRate/2, call); err != nil {
		return out, err
	}
	times = times[:0]
	m := b.newMeter(p)
	if err := openLoop(ctx, visibleRate, total, call); err != nil {
		return out, fmt.Errorf("%w; %s", err, p.tail())
	}
	return sample{p50: quantile(times, 0.5), p99: quantile(times, 0.99), tasks: total, cpu: m.stop()}, nil
}

// pollUntilDone posts a task and asks for it until it is completed: every 2 ms at first,
// later after an eighth of the time waited so far.
func pollUntilDone(ctx context.Context, pool *connections, seq int) (time.Duration, error) {
	c, err := pool.take(ctx)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	body, err := c.post(seq, "")
	if err != nil {
		return 0, err
	}
	id, err := taskID(body)
	if err != nil {
		return 0, err
	}
	for {
		body, err := c.get(id)
		if err != nil {
			return 0, err
		}
		took := time.Since(begin)
		if bytes.Contains(body, []byte(`"status":"completed"`)) {
			pool.give(c)
			return took, nil
		}
		if took > time.Minute {
			return took, errors.New("task does not complete: " + string(body))
		}
		if err := pause(ctx, max(2*time.Millisecond, took/8)); err != nil {
			return took, err
		}
	}
}

// taskID finds the id in the answer to a POST.
func taskID(body []byte) (string, error) {
	_, rest, ok := bytes.Cut(body, []byte(`"task_id":"`))
	id, _, end := bytes.Cut(rest, []byte(`"`))
	if !ok || !end {
		return "", fmt.Errorf("no task_id in %q", body)
	}
	return string(id), nil
}
