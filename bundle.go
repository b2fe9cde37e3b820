package main

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"

	"nexusflow/db"
)

const (
	// bundleRounds is how often a bundle is tried within its limit. Noticing a deadlock takes
	// PostgreSQL a second, and costs one round.
	bundleRounds = 5

	// commitLimit is the least that is left of the limit when COMMIT is sent: time to learn
	// what came of it.
	commitLimit = time.Second
)

// A bundle is what became of the tasks of one batch request, which are stored all or none.
// They take no part in the group commit: the transaction is their own, so that nobody else
// feels its failure or a lock it waits for.
type bundle struct {
	receipts map[*waiter]receipt
	due      []entry         // for the stream, once it is committed
	moved    map[string]bool // displaced keys that tasks hold
}

// A commitError came of COMMIT: whether it took effect nobody knows.
type commitError struct{ error }

func (e commitError) Unwrap() error { return e.error }

// submitAll stores every one of ws, or finds the task that holds its key, and returns
// their receipts in the same order; or it stores nothing and returns an error. ctx has
// submitLimit. Only an answer to COMMIT that is lost together with the one to the
// question after it leaves open whether they are stored: then asking again with the same keys tells.
func (in *intake) submitAll(ctx context.Context, ws []*waiter) ([]receipt, error) {
	rows, holders, err := distinct(ws)
	if err != nil {
		return nil, err
	}
	free, err := takeSlot(in.slots)
	if err != nil {
		return nil, err
	}
	defer free()
	in.metrics.submitRows.Observe(float64(len(rows)))
	b, err := in.storeBundle(ctx, rows, displaced(ws))
	if !timedOut(err) {
		in.note(err)
	}
	if badData(err) && !repeatable(err) {
		in.log.Warn("batch not storable", "count", len(ws), "err", err)
		in.metrics.invalid.Inc()
		err = errUnstorable
	}
	if err != nil {
		return nil, err
	}
	receipts := make([]receipt, len(ws))
	var reused []fieldError
	for i, holder := range holders {
		o := b.receipts[holder]
		switch {
		case o.err != nil:
			reused = append(reused, keyReused(i, "This key was already used with a different request"))
		case b.moved[ws[i].sub.Displaced]:
			o.err = errKeyReused
			reused = append(reused, keyReused(i, "The batch's key was already used with an item without a key of its own in this place"))
		}
		if holder != ws[i] {
			o.status, o.replayed = cmp.Or(o.status, statusPending), true
		}
		receipts[i] = o
	}
	for i := range receipts {
		if reused == nil || receipts[i].err != nil { // else nothing was stored
			in.metrics.submitted(&receipts[i])
		}
	}
	if reused != nil {
		return nil, keysReused(reused)
	}
	// The rows are committed, and the stream is only a hint, as in created.
	if len(b.due) > 0 {
		in.hints.publish(b.due)
	}
	return receipts, nil
}

// distinct returns those of ws that need a row of their own, sorted by key so that two
// bundles, or a bundle and the group commit, do not deadlock, and for each of
// ws the one with its key. That two have the same key is an error if they differ.
func distinct(ws []*waiter) (rows, holders []*waiter, err error) {
	first := make(map[string]*waiter, len(ws))
	rows, holders = make([]*waiter, 0, len(ws)), slices.Clone(ws)
	var reused []fieldError
	for i, w := range ws {
		holder, again := first[w.sub.Key]
		switch {
		case !again || w.sub.Key == "":
			first[w.sub.Key] = w
			rows = append(rows, w)
		case holder.sub.Hash != w.sub.Hash:
			reused = append(reused, keyReused(i, "This key is that of an earlier item, which is different"))
		default:
			holders[i] = holder
		}
	}
	if reused != nil {
		return nil, nil, keysReused(reused)
	}
	slices.SortStableFunc(rows, compareKeys)
	return rows, holders, nil
}

// displaced returns the keys of places that none of ws has. A task that holds one is of this batch
// in another order, or with keys in other places: there an item without a key of its own was not
// where the batch's key would now find it again, but stored twice.
func displaced(ws []*waiter) []string {
	own := make(map[string]bool, len(ws))
	for _, w := range ws {
		own[w.sub.Key] = true
	}
	var keys []string
	for _, w := range ws {
		if k := w.sub.Displaced; k != "" && !own[k] {
			keys = append(keys, k)
		}
	}
	return keys
}

// keysReused is errKeyReused for a batch, with what is wrong with its items.
func keysReused(errs []fieldError) error {
	e := *errKeyReused
	e.detail = "Idempotency keys of this batch were already used with different requests, see errors. Nothing was created."
	e.errs = errs
	return &e
}

// keyReused says what is wrong with the key of item i of a batch.
func keyReused(i int, msg string) fieldError {
	return fieldError{"idempotency_key_reused", []any{"body", "tasks", i, "idempotency_key"}, msg}
}

// storeBundle stores rows in at most bundleRounds rounds. If the bundle it returns is refused,
// nothing was stored.
func (in *intake) storeBundle(ctx context.Context, rows []*waiter, displaced []string) (b bundle, err error) {
	end, _ := ctx.Deadline()
	work, cancel := context.WithDeadline(ctx, end.Add(-commitLimit))
	defer cancel()
	for range bundleRounds {
		if b, err = in.tryBundle(work, rows, displaced); err == nil {
			return b, nil
		}
		if broken(err) {
			// All idle connections are from before whatever broke this one.
			in.pools.api.Reset()
		}
		_, unsure := errors.AsType[commitError](err)
		if unsure || sqlState(err) == "23505" { // the primary key: a COMMIT was late
			if b, found := in.recall(ctx, rows); found {
				return b, nil
			}
		}
		if work.Err() != nil || !unsure && !broken(err) && !repeatable(err) && !errors.Is(err, errContended) {
			return b, err
		}
	}
	return b, err
}

// tryBundle runs T1 for rows in one transaction. As long as COMMIT was not sent, whatever
// ends the connection, and be it the end of work, undoes it; COMMIT is given time beyond that.
func (in *intake) tryBundle(work context.Context, rows []*waiter, displaced []string) (bundle, error) {
	tx, err := in.pools.api.Begin(work)
	if err != nil {
		return bundle{}, err
	}
	defer tx.Rollback(work) // does nothing after a COMMIT
	q := db.New(tx)
	stored, err := q.InsertTasks(work, insertParams(rows, in.hints.up()))
	if err != nil {
		return bundle{}, err
	}
	b, err := newBundle(work, q, rows, stored)
	if err != nil || len(stored) == 0 {
		return b, err
	}
	if err := b.findMoved(work, q, displaced); err != nil || b.refused() {
		return b, err
	}
	end, _ := work.Deadline()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), max(time.Until(end), commitLimit)/2)
	defer cancel()
	if err := tx.Commit(ctx); err != nil {
		return bundle{}, commitError{err}
	}
	return b, nil
}

// recall returns the bundle of rows if they were stored by a COMMIT whose answer was lost.
func (in *intake) recall(ctx context.Context, rows []*waiter) (b bundle, found bool) {
	q := db.New(in.pools.api)
	there, err := q.TasksByID(ctx, waiterIDs(rows))
	if err != nil || len(there) == 0 {
		return b, false
	}
	stored := make([]db.InsertTasksRow, len(there))
	for i, r := range there {
		stored[i] = db.InsertTasksRow(r)
	}
	b, err = newBundle(ctx, q, rows, stored)
	return b, err == nil
}

// newBundle gives each of rows its receipt: those that were stored, and the others as the
// tasks that hold their keys, which it asks for. If one is not found its holder was
// deleted meanwhile: errContended.
func newBundle(ctx context.Context, q *db.Queries, rows []*waiter, stored []db.InsertTasksRow) (bundle, error) {
	b := bundle{receipts: make(map[*waiter]receipt, len(rows)), due: make([]entry, 0, len(stored))}
	created := make(map[uuid.UUID]*db.InsertTasksRow, len(stored))
	for i := range stored {
		created[stored[i].TaskID] = &stored[i]
	}
	var left []*waiter
	for _, w := range rows {
		row := created[w.id]
		if row == nil {
			left = append(left, w)
			continue
		}
		b.receipts[w] = receipt{id: w.id, name: w.sub.Name, created: row.CreatedAt}
		if row.Published {
			b.due = append(b.due, entry{w.id, w.queue})
		}
	}
	if len(left) == 0 {
		return b, nil
	}
	found, err := q.TasksByKey(ctx, waiterKeys(left))
	if err != nil {
		return b, err
	}
	holders := byKey(found)
	for _, w := range left {
		row := holders[w.sub.Key]
		if row == nil {
			return b, errContended
		}
		b.receipts[w] = w.receipt(row)
		if row.TaskID == w.id && w.sub.due() {
			b.due = append(b.due, entry{w.id, w.queue})
		}
	}
	return b, nil
}

// findMoved asks which of the displaced keys tasks hold. It comes after the INSERT, which has
// waited for a concurrent batch with the same keys.
func (b *bundle) findMoved(ctx context.Context, q *db.Queries, displaced []string) error {
	if len(displaced) == 0 {
		return nil
	}
	rows, err := q.TasksByKey(ctx, displaced)
	b.moved = make(map[string]bool, len(rows))
	for _, r := range rows {
		b.moved[*r.IdempotencyKey] = true
	}
	return err
}

// refused reports whether one of the keys is that of a different request.
func (b *bundle) refused() bool {
	if len(b.moved) > 0 {
		return true
	}
	for _, o := range b.receipts {
		if o.err != nil {
			return true
		}
	}
	return false
}
