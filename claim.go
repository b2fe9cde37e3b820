package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

// take claims the tasks of messages and starts them; each message holds a slot.
// Nothing is dropped before PostgreSQL answered: while it is away the messages wait
// here, and reading with them. When ctx ends first they are given back.
func (w *worker) take(ctx context.Context, messages []message) {
	w.enter(messages)
	if ctx.Err() != nil { // delivered while the shutdown began
		w.giveBack(messages)
		return
	}
	byTask := make(map[uuid.UUID]message, len(messages))
	ids := make([]uuid.UUID, 0, len(messages))
	for _, m := range messages {
		if _, copied := byTask[m.taskID]; m.taskID == uuid.Nil || copied {
			continue
		}
		byTask[m.taskID] = m
		ids = append(ids, m.taskID)
	}
	for failures := 0; len(ids) > 0; failures++ {
		asked := time.Now()
		rows, err := w.claimEach(ctx, ids)
		w.access.note(err)
		for _, r := range rows {
			w.start(r, byTask[r.TaskID], asked)
		}
		messages = unclaimed(messages, rows)
		if err == nil {
			break
		}
		ids = without(ids, rows)
		if !sleep(ctx, reconnect.delay(failures)) {
			w.giveBack(messages)
			return
		}
	}
	if !w.unpublishRefused(ctx, messages) {
		w.giveBack(messages)
		return
	}
	// Whatever no row came back for is taken, done, not due, unknown, a copy, or unpublished.
	w.countUnknown(messages)
	for _, m := range messages {
		w.drop(m)
	}
	w.release(len(messages))
}

// countUnknown counts those messages that name a task which is not in the table. Entries are
// added after the commit, so these tell of commits that were lost, as in a failover. It
// costs a statement, but only where claims were refused.
func (w *worker) countUnknown(messages []message) {
	var ids []uuid.UUID
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			ids = append(ids, m.taskID)
		}
	}
	if len(ids) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	rows, err := w.claims.TasksByID(ctx, ids)
	if err != nil {
		w.log.Debug("look for unclaimed tasks", "count", len(ids), "err", err)
		return
	}
	for _, id := range ids {
		if !slices.ContainsFunc(rows, func(r db.TasksByIDRow) bool { return r.TaskID == id }) {
			w.metrics.unknown.Inc()
		}
	}
}

// claimEach claims tasks in one statement, and in smaller ones when PostgreSQL refuses
// one of them for what it holds: it alone is then left out and told of. An error means
// that PostgreSQL is away; what was claimed before comes with it.
func (w *worker) claimEach(ctx context.Context, ids []uuid.UUID) ([]db.ClaimTasksRow, error) {
	rows, err := w.claim(ctx, ids)
	switch {
	case err == nil || storeAway(err) || errors.Is(err, context.Canceled):
		return rows, err
	case len(ids) == 1:
		w.log.Error("task cannot be claimed", "task_id", ids[0], "err", err)
		return nil, nil
	}
	half := len(ids) / 2
	rows, err = w.claimEach(ctx, ids[:half])
	if err != nil {
		return rows, err
	}
	more, err := w.claimEach(ctx, ids[half:])
	return append(rows, more...), err
}

// without returns ids less those of rows.
func without(ids []uuid.UUID, rows []db.ClaimTasksRow) []uuid.UUID {
	return slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool {
		return slices.ContainsFunc(rows, func(r db.ClaimTasksRow) bool { return r.TaskID == id })
	})
}

// claim is one claim statement (T2). It has a deadline of its own and outlives
// ctx: a claim that commits unseen costs its tasks a lease.
func (w *worker) claim(ctx context.Context, ids []uuid.UUID) ([]db.ClaimTasksRow, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
	defer cancel()
	w.metrics.claimRows.Observe(float64(len(ids)))
	if _, mine := await(w.turn, ids, nil); mine {
		defer w.turn.give()
	}
	args := db.ClaimTasksParams{LeaseMS: w.cfg.Lease.Milliseconds(), Worker: w.cfg.ConsumerName, TaskIDs: ids}
	rows, err := w.claims.ClaimTasks(ctx, args)
	if crowdedOut(err) { // somebody holds one of the rows, which must not hold up the others
		var unlocked []db.ClaimUnlockedTasksRow
		unlocked, err = w.claims.ClaimUnlockedTasks(ctx, db.ClaimUnlockedTasksParams(args))
		for _, r := range unlocked {
			rows = append(rows, db.ClaimTasksRow(r))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	return rows, nil
}

// unclaimed returns the messages that started no task: of several copies, all but
// the first.
func unclaimed(messages []message, rows []db.ClaimTasksRow) []message {
	claimed := make(map[uuid.UUID]bool, len(rows))
	for _, r := range rows {
		claimed[r.TaskID] = true
	}
	var rest []message
	for _, m := range messages {
		if claimed[m.taskID] {
			claimed[m.taskID] = false
			continue
		}
		rest = append(rest, m)
	}
	return rest
}

// takeDue claims up to free due tasks without the stream and starts them: while
// Redis is away work goes on. It returns how many slots it filled. Entries of
// these tasks that turn up later are refused by the claim and dropped.
func (w *worker) takeDue(free int) int {
	queues := make([]string, len(w.cfg.Queues))
	for i, q := range w.cfg.Queues {
		queues[i] = q.name
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeLimit)
	defer cancel()
	asked := time.Now()
	rows, err := w.claims.ClaimDueTasks(ctx, db.ClaimDueTasksParams{
		LeaseMS: w.cfg.Lease.Milliseconds(),
		Worker:  w.cfg.ConsumerName,
		Queues:  queues,
		MaxRows: int32(free),
	})
	w.access.note(err)
	for _, r := range rows {
		w.start(db.ClaimTasksRow(r), message{}, asked)
	}
	return len(rows)
}

// giveBack returns messages that were delivered but not claimed, at shutdown: their
// tasks get a fresh entry for somebody else (T9), then these are dropped. When
// PostgreSQL does not answer they stay pending, for the reclaimer.
func (w *worker) giveBack(messages []message) {
	ctx, cancel := context.WithTimeout(context.Background(), killGrace)
	defer cancel()
	var entries []entry
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			entries = append(entries, entry{m.taskID, m.queue})
		}
	}
	err := unpublish(ctx, w.leases, entries)
	for _, m := range messages {
		if err == nil {
			w.drop(m)
		} else {
			w.forget(m)
		}
	}
	w.release(len(messages))
}
