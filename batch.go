package main

import (
	"context"
	"runtime"
	"time"
)

const (
	// smallBatch is the number of rows from which on a batch is written without its turn. The
	// fixed cost of a statement and its commit is that of some 15 rows (measured), and so
	// less than an eighth of it.
	smallBatch = 128

	// turnLimit is how long a batch waits for its turn: longer than a commit takes on any but the
	// slowest disks, and nothing to a handler. Who has the turn may be waiting for a lock.
	turnLimit = 20 * time.Millisecond
)

// A turn is had by one small batch at a time. A worker writes two kinds, claims and outcomes,
// which are small when both are written at once: each that waits for the other is larger
// then, and costs less a row. At 16 to 64 clients that is 7 to 16 % more tasks a second.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

// await waits until batch has the turn, for at most turnLimit, and meanwhile adds what comes from more,
// which may be nil. It returns the batch and whether it has the turn, and so must give it
// back; one that is no longer small has none, and neither has any where t is nil.
func await[T any](t turn, batch []T, more <-chan T) ([]T, bool) {
	if t == nil || len(batch) >= smallBatch {
		return batch, false
	}
	select {
	case t <- struct{}{}:
		return batch, true
	default:
	}
	late := time.NewTimer(turnLimit)
	defer late.Stop()
	for len(batch) < smallBatch {
		select {
		case t <- struct{}{}:
			return batch, true
		case item := <-more:
			batch = append(batch, item)
		case <-late.C:
			return batch, false
		}
	}
	return batch, false
}

func (t turn) give() { <-t }

// A batcher is an adaptive group commit: it hands flush whatever was added while
// the flush before was under way. There is no timer and no linger, so one
// caller alone pays for a batch of one, and batches grow by themselves with the load.
type batcher[T any] struct {
	queue chan T
	limit int
	flush func(ctx context.Context, items []T)
	turn  turn // that a small batch waits for while it grows; nil: none. With one, limit is at least smallBatch
}

// newBatcher returns a batcher whose batches hold at most limit items. flush is
// never called twice at once; it owns its items only until it returns, because
// the slice is used again.
func newBatcher[T any](limit int, flush func(context.Context, []T)) *batcher[T] {
	return &batcher[T]{queue: make(chan T, 4*limit), limit: limit, flush: flush}
}

// add queues an item. It blocks while four full batches wait, until ctx ends; an
// item that was added is flushed, also when ctx ends later.
func (b *batcher[T]) add(ctx context.Context, item T) error {
	select {
	case b.queue <- item:
		return nil
	default:
	}
	select {
	case b.queue <- item:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run flushes batches until ctx ends, then what is still queued, and returns nil.
// The context given to flush carries ctx's values but not its end: a batch that
// was begun is finished. Nothing may be added once run has returned.
func (b *batcher[T]) run(ctx context.Context) error {
	batch := make([]T, 0, b.limit)
	for {
		select {
		case item := <-b.queue:
			batch = append(batch, item)
		case <-ctx.Done():
			select {
			case item := <-b.queue:
				batch = append(batch, item)
			default:
				return nil
			}
		}
		// Callers that are ready to add get to do so first: batches grow by a tenth
		// under load and an idle system notices nothing.
		runtime.Gosched()
		var mine bool
		batch, mine = await(b.turn, batch, b.queue)
		for more := true; more && len(batch) < b.limit; {
			select {
			case item := <-b.queue:
				batch = append(batch, item)
			default:
				more = false
			}
		}
		b.flush(context.WithoutCancel(ctx), batch)
		if mine {
			b.turn.give()
		}
		clear(batch)
		batch = batch[:0]
	}
}
