package main

import (
	"context"
	"fmt"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

// beat renews the leases of held tasks every LEASE/3 until ctx ends, and sooner
// after a failure. It outlives the readers: a task that is being finished or waits to be
// stored must not be taken away.
func (w *worker) beat(ctx context.Context) error {
	interval := w.cfg.Lease / 3
	for wait := interval; sleep(ctx, wait); {
		wait = interval
		held := w.holding()
		if len(held) == 0 {
			continue // nothing was asked: whether PostgreSQL answers is not known
		}
		err := w.renew(ctx, held)
		if ctx.Err() != nil {
			return nil
		}
		w.access.note(err)
		if err != nil {
			wait = min(interval, w.cfg.Lease/20)
		}
	}
	return nil
}

// renew is one heartbeat (T3), the row first, then the entries. A lease that has passed
// is renewed as well, as long as nobody reaped it. What the answer lacks
// belongs to somebody else: its handler is told to stop. A row that somebody holds
// locked is left out, and so keeps nobody else's lease from being renewed.
func (w *worker) renew(ctx context.Context, held []*attempt) error {
	ids, attempts := make([]uuid.UUID, len(held)), make([]int32, len(held))
	for i, a := range held {
		ids[i], attempts[i] = a.task.ID, a.task.Attempt
	}
	limited, cancel := context.WithTimeout(ctx, min(w.cfg.Lease/6, storeLimit))
	defer cancel()
	asked := time.Now()
	args := db.BeatTasksParams{LeaseMS: w.cfg.Lease.Milliseconds(), TaskIDs: ids, Attempts: attempts}
	rows, err := w.leases.BeatTasks(limited, args)
	complete := true // what the rows lack is lost
	if crowdedOut(err) {
		complete = false
		asked = time.Now()
		var unlocked []db.BeatUnlockedTasksRow
		unlocked, err = w.leases.BeatUnlockedTasks(limited, db.BeatUnlockedTasksParams(args))
		for _, r := range unlocked {
			rows = append(rows, db.BeatTasksRow(r))
		}
	}
	if err != nil {
		return fmt.Errorf("renew leases: %w", err)
	}
	ours := make(map[uuid.UUID]bool, len(rows))
	cancelled := make(map[uuid.UUID]bool)
	for _, r := range rows {
		ours[r.TaskID] = true
		cancelled[r.TaskID] = r.CancelRequested
	}
	var kept []message
	for _, a := range held {
		switch {
		case ours[a.task.ID]:
			a.trust(asked)
			if cancelled[a.task.ID] {
				a.cancel(errCancelRequested)
			}
			if a.message.id != "" {
				kept = append(kept, a.message)
			}
		case complete && a.cancel(errLeaseLost):
			w.log.Warn("lease lost", "task_id", a.task.ID, "name", a.task.Name, "attempt", a.task.Attempt)
		}
	}
	if w.stream.up() {
		if err := w.stream.keep(ctx, kept); err != nil {
			w.log.Debug("keep entries", "err", err)
		}
	}
	return nil
}

// watch looks after held tasks between heartbeats until ctx ends: it stops the
// handlers of those whose lease could not be renewed in time, and of those that somebody
// asked to cancel, and gives up on those that do not stop.
func (w *worker) watch(ctx context.Context) error {
	trust := time.NewTicker(w.cfg.Lease / 20)
	defer trust.Stop()
	requests := time.NewTicker(min(w.cfg.SweepInterval, time.Second)) // a cancel is felt within two
	defer requests.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-trust.C:
			for _, a := range w.holding() {
				if a.trustEnded() && a.cancel(errTrustEnded) {
					w.log.Warn("handler stopped: its lease could not be renewed", "task_id", a.task.ID, "name", a.task.Name, "attempt", a.task.Attempt)
				}
			}
		case <-requests.C:
			for _, a := range w.holding() {
				if a.deaf() {
					go a.abandon() // which waits while outcomes cannot be stored
				}
			}
			w.cancelRequested(ctx)
		}
	}
}

// cancelRequested cancels the handlers of held tasks that somebody asked to cancel.
func (w *worker) cancelRequested(ctx context.Context) {
	held := make(map[uuid.UUID]*attempt)
	for _, a := range w.holding() {
		held[a.task.ID] = a
	}
	if len(held) == 0 {
		return
	}
	ids := make([]uuid.UUID, 0, len(held))
	for id := range held {
		ids = append(ids, id)
	}
	// Short, because watch must not miss the end of a lease while it waits here.
	ctx, cancel := context.WithTimeout(ctx, min(w.cfg.Lease/20, time.Second))
	defer cancel()
	requested, err := w.leases.CancelRequests(ctx, ids)
	if err != nil {
		return // the heartbeat asks too, and reports
	}
	for _, id := range requested {
		if held[id].cancel(errCancelRequested) {
			w.log.Info("task cancelled by request", "task_id", id)
		}
	}
}
