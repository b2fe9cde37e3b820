package main

import (
	"context"
	"slices"
	"time"
)

// setAside stores ws, which share a key or are one without, beside the batches: a
// transaction of somebody else holds the key, or the table. However many ask for the
// key meanwhile, they use one connection.
func (in *intake) setAside(ws []*waiter) {
	if int(in.waiting.Add(int32(len(ws)))) > asideRows {
		in.waiting.Add(-int32(len(ws)))
		refuse(ws, errBusy)
		return
	}
	key := ws[0].sub.Key
	if key != "" {
		in.mu.Lock()
		in.held[key] = nil
		in.mu.Unlock()
	}
	in.aside.Go(func() {
		err := in.storeAside(ws)
		for key != "" {
			next := in.queued(key)
			if len(next) == 0 {
				return
			}
			if err == nil {
				err = in.storeAside(next)
				continue
			}
			in.waiting.Add(-int32(len(next)))
			refuse(next, err)
		}
	})
}

// storeAside stores ws by themselves, with as much patience for locks as PostgreSQL has,
// and returns the error that they got if it would be everybody's.
func (in *intake) storeAside(ws []*waiter) error {
	defer in.waiting.Add(-int32(len(ws)))
	free, err := takeSlot(in.slots)
	if err != nil {
		refuse(ws, err)
		return err
	}
	defer free()
	ctx, cancel := context.WithTimeout(context.Background(), batchLimit)
	defer cancel()
	return in.store(ctx, in.pools.api, slices.DeleteFunc(ws, (*waiter).gone))
}

// behind queues w if its key is held, and reports whether it did.
func (in *intake) behind(w *waiter) bool {
	if w.sub.Key == "" {
		return false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	ws, held := in.held[w.sub.Key]
	if !held {
		return false
	}
	if in.waiting.Add(1) > asideRows {
		in.waiting.Add(-1)
		refuse([]*waiter{w}, errBusy)
		return true
	}
	in.held[w.sub.Key] = append(ws, w)
	return true
}

// queued returns those that queued for key meanwhile. If there are none, the key is no
// longer held.
func (in *intake) queued(key string) []*waiter {
	in.mu.Lock()
	defer in.mu.Unlock()
	ws := in.held[key]
	if len(ws) == 0 {
		delete(in.held, key)
	} else {
		in.held[key] = nil
	}
	return ws
}

func refuse(ws []*waiter, err error) {
	for _, w := range ws {
		w.done <- receipt{err: err}
	}
}

// takeSlot waits for a place in slots, for slotLimit at most, and returns what frees it.
func takeSlot(slots chan struct{}) (free func(), err error) {
	limit := time.NewTimer(slotLimit)
	defer limit.Stop()
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-limit.C:
		return nil, errBusy
	}
}
