package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

const (
	publishBatch = 512
	sweepPage    = 512
	// A process publishes a long backlog at some 21,000 tasks a second, faster than most
	// handlers ask for them, and leaves PostgreSQL time for submissions.
	pageTime = 24 * time.Millisecond
	// sweepTime is how long one kind of backlog may keep all others waiting.
	sweepTime = time.Second
	// A row is marked as published a moment before its entry is added; only a row
	// older than the oldest undelivered entry by more than this has lost its own.
	republishMargin = 2 * time.Second
	// However many retries fall due one after another, sweeps keep this distance.
	sweepDistance = 20 * time.Millisecond
	storeLimit    = 6 * time.Second // one statement: a little more than its statement_timeout
)

// publisher puts committed tasks into the stream. It is a hint on the fast path:
// whatever it cannot add, the dispatcher adds later.
type publisher struct {
	log     *slog.Logger
	stream  *stream
	queries *db.Queries
	*batcher[entry]
}

func newPublisher(log *slog.Logger, s *stream, q *db.Queries) *publisher {
	p := &publisher{log: log, stream: s, queries: q}
	p.batcher = newBatcher(publishBatch, p.flush)
	return p
}

// publish hands over tasks whose rows are committed and marked as published. It
// never blocks: entries that find the queue full stay marked, and the dispatcher
// adds them after REPUBLISH_AFTER, as it does when the process dies here.
func (p *publisher) publish(entries []entry) {
	for _, e := range entries {
		select {
		case p.queue <- e:
		default:
			return
		}
	}
}

func (p *publisher) flush(ctx context.Context, entries []entry) {
	if p.stream.up() {
		failed, err := p.stream.publish(ctx, entries)
		if err == nil {
			return
		}
		entries = failed
	}
	if err := unpublish(ctx, p.queries, entries); err != nil {
		p.log.Debug("unpublish tasks", "count", len(entries), "err", err)
	}
}

// unpublish records that tasks have no entry (T9). Its failure costs time only:
// they are added again when REPUBLISH_AFTER has passed.
func unpublish(ctx context.Context, q *db.Queries, entries []entry) error {
	ctx, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	ids := make([]uuid.UUID, len(entries))
	for i, e := range entries {
		ids[i] = e.id
	}
	if _, err := q.UnpublishTasks(ctx, ids); err != nil {
		return fmt.Errorf("unpublish tasks: %w", err)
	}
	return nil
}

// dispatcher moves tasks that are due and have no entry into the stream: retries,
// rows written by SQL, and everything whose entry was lost.
type dispatcher struct {
	log     *slog.Logger
	cfg     config
	stream  *stream
	queries *db.Queries
	access  *access
	metrics *metrics
	poke    chan struct{}
}

func newDispatcher(log *slog.Logger, cfg config, s *stream, q *db.Queries, a *access, m *metrics) *dispatcher {
	return &dispatcher{log: log, cfg: cfg, stream: s, queries: q, access: a, metrics: m, poke: make(chan struct{}, 1)}
}

// wake makes the dispatcher sweep now. It never blocks.
func (d *dispatcher) wake() {
	select {
	case d.poke <- struct{}{}:
	default:
	}
}

// wakeAfter makes the dispatcher sweep when a retry of this process falls due, so
// that its delay is not rounded up to the next sweep.
func (d *dispatcher) wakeAfter(delay time.Duration) { time.AfterFunc(delay, d.wake) }

// run sweeps every SWEEP_INTERVAL and when woken, until ctx ends. While Redis is
// down it does nothing: the rows wait.
func (d *dispatcher) run(ctx context.Context) error {
	tick := time.NewTicker(d.cfg.SweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-d.poke:
		}
		if !d.stream.up() {
			continue
		}
		err := d.sweep(ctx)
		if ctx.Err() != nil {
			return nil
		}
		d.access.note(err)
		if !sleep(ctx, sweepDistance) {
			return nil
		}
	}
}

// sweep publishes due tasks (T8) until there are none left, or for sweepTime, and again at
// once if there may be more. Its error is
// PostgreSQL's; what Redis refused is unpublished again and waits for the next sweep.
func (d *dispatcher) sweep(ctx context.Context) error {
	_, err := d.pages(ctx, func(ctx context.Context) ([]entry, error) {
		rows, err := d.queries.SweepUnpublished(ctx, sweepPage)
		entries := make([]entry, len(rows))
		for i, r := range rows {
			entries[i] = entry{r.TaskID, r.Queue}
		}
		return entries, err
	})
	if err != nil {
		return err
	}
	ctxQueues, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	queues, err := d.queries.OverdueQueues(ctxQueues, d.cfg.RepublishAfter.Milliseconds())
	if err != nil {
		return fmt.Errorf("find overdue queues: %w", err)
	}
	for _, queue := range queues {
		if err := d.republish(ctx, queue); err != nil {
			return err
		}
	}
	return nil
}

// republish adds tasks of a queue again whose entry must be lost: it is older than
// REPUBLISH_AFTER, and older than every entry that still waits to be delivered.
// Without the second condition each backlog would be added again and again.
func (d *dispatcher) republish(ctx context.Context, queue string) error {
	age := d.cfg.RepublishAfter
	oldest, err := d.stream.undeliveredAge(ctx, queue)
	if err != nil {
		d.log.Debug("republish put off", "queue", queue, "err", err)
		return nil
	}
	if oldest > 0 {
		age = max(age, oldest+republishMargin)
	}
	n, err := d.pages(ctx, func(ctx context.Context) ([]entry, error) {
		rows, err := d.queries.SweepPublished(ctx, db.SweepPublishedParams{AgeMS: age.Milliseconds(), Queue: queue, MaxRows: sweepPage})
		entries := make([]entry, len(rows))
		for i, r := range rows {
			entries[i] = entry{r.TaskID, r.Queue}
		}
		return entries, err
	})
	if n > 0 {
		d.metrics.republished.Add(float64(n))
		d.log.Warn("lost entries published again", "queue", queue, "count", n, "age_ms", age.Milliseconds())
	}
	return err
}

// pages publishes page after page of what next marks as published, until a page is
// short or Redis refuses one, and returns how many tasks got an entry. After sweepTime it
// leaves the rest to another sweep.
func (d *dispatcher) pages(ctx context.Context, next func(context.Context) ([]entry, error)) (int, error) {
	published := 0
	for begin := time.Now(); time.Since(begin) < sweepTime; {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, storeLimit)
		entries, err := next(limited)
		cancel()
		if err != nil {
			return published, fmt.Errorf("sweep tasks: %w", err)
		}
		if len(entries) == 0 {
			return published, nil
		}
		// The rows are marked: from here to the end the page is published or
		// unmarked even when the program stops.
		failed, err := d.stream.publish(context.WithoutCancel(ctx), entries)
		published += len(entries) - len(failed)
		if err != nil {
			return published, unpublish(context.WithoutCancel(ctx), d.queries, failed)
		}
		if len(entries) < sweepPage {
			return published, nil
		}
		sleep(ctx, time.Until(began.Add(pageTime)))
	}
	d.wake()
	return published, nil
}
