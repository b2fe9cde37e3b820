package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"nexusflow/db"
)

const pausePoll = time.Second // how often a worker asks at least which queues are paused

// A gate keeps a worker from reading the streams of paused queues. It only saves reading in
// vain: that no task of such a queue begins is the guard of the claim.
type gate struct {
	log     *slog.Logger
	stream  *stream
	queries *db.Queries
	access  *access
	wake    func() // the dispatcher has work
	every   time.Duration
	mu      sync.Mutex // held from question to answer, so that a late answer does not replace a newer one
}

// run asks which queues are paused, now and at each interval, until ctx ends. While PostgreSQL does
// not answer, what was known last holds: nothing can be claimed anyway.
func (g *gate) run(ctx context.Context) error {
	for {
		g.ask(ctx)
		if !sleep(ctx, g.every) {
			return nil
		}
	}
}

// ask tells the stream which queues are paused, and the dispatcher of a resumption.
func (g *gate) ask(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, storeLimit)
	defer cancel()
	paused, err := g.queries.PausedQueues(limited)
	if err != nil {
		if ctx.Err() == nil {
			g.access.note(err)
		}
		return // and a success is not noted: that reads work says nothing about writes
	}
	var before []string
	if p := g.stream.paused.Swap(&paused); p != nil {
		before = *p
	}
	if slices.Equal(paused, before) {
		return
	}
	g.log.Debug("paused queues changed", "queues", paused)
	if slices.ContainsFunc(before, func(queue string) bool { return !slices.Contains(paused, queue) }) {
		g.wake()
	}
}

// unpublishRefused sees to it that a task whose claim was refused because its queue is paused is not
// forgotten: its message is dropped like all that were refused, so its row must not
// say any more that it has an entry (T9). The sweep leaves the row alone until the
// resumption, and the stream is not read again before that, so that nothing goes round in
// circles. It waits until PostgreSQL has answered; false means that ctx ended first, and nothing may be dropped.
// A refusal is an answer: the row then waits for REPUBLISH_AFTER, which finds it.
func (w *worker) unpublishRefused(ctx context.Context, messages []message) bool {
	var ids []uuid.UUID
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			ids = append(ids, m.taskID)
		}
	}
	for failures := 0; len(ids) > 0; failures++ {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
		n, err := w.claims.UnpublishRefused(limited, ids)
		cancel()
		w.access.note(err)
		if n > 0 {
			w.refused(ctx)
		}
		if !storeAway(err) && !errors.Is(err, context.Canceled) {
			break
		}
		if !sleep(ctx, reconnect.delay(failures)) {
			return false
		}
	}
	return true
}
