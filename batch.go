package main

import (
	"context"
	"runtime"
)

// A batcher is an adaptive group commit: it hands flush whatever was added while
// the flush before was under way. There is no timer and no linger, so one
// caller alone pays for a batch of one, and batches grow by themselves with the load.
type batcher[T any] struct {
	queue chan T
	limit int
	flush func(ctx context.Context, items []T)
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
		for more := true; more && len(batch) < b.limit; {
			select {
			case item := <-b.queue:
				batch = append(batch, item)
			default:
				more = false
			}
		}
		b.flush(context.WithoutCancel(ctx), batch)
		clear(batch)
		batch = batch[:0]
	}
}
