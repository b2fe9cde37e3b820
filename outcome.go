package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

const outcomeBatch = 512

// verdict is what PostgreSQL made of an outcome.
type verdict struct {
	status     string
	retryCount int32
}

// store records a batch of outcomes, one statement for each kind, and then drops
// their entries. It does not return before PostgreSQL answered, however long it is away:
// results are kept here and are the first thing written when it is back. Only the
// end of a shutdown makes it give up; the leases then run out.
func (w *worker) store(_ context.Context, batch []outcome) {
	var kinds [outcomeNone + 1][]outcome
	for _, o := range batch {
		kinds[o.kind] = append(kinds[o.kind], o)
	}
	for kind, outcomes := range kinds {
		if len(outcomes) > 0 {
			w.storeKind(outcomeKind(kind), outcomes)
		}
	}
}

// storeKind repeats one fenced statement until it was answered. Repeating is safe:
// after a lost reply the fence refuses the second, and the row tells whose it is.
func (w *worker) storeKind(kind outcomeKind, outcomes []outcome) {
	if kind == outcomeNone {
		w.metrics.refused.Add(float64(len(outcomes)))
		for _, o := range outcomes {
			w.finish(o.attempt)
		}
		return
	}
	for failures := 0; ; failures++ {
		verdicts, err := w.write(kind, outcomes)
		w.access.note(errUnless(err, badData))
		switch {
		case err == nil:
			w.conclude(outcomes, verdicts)
			return
		case (badData(err) || crowdedOut(err)) && len(outcomes) > 1: // one of them; its neighbours must not suffer
			for _, o := range outcomes {
				w.storeKind(kind, []outcome{o})
			}
			return
		case crowdedOut(err):
			w.storeLater(outcomes[0])
			return
		case badData(err):
			w.storeUnstorable(outcomes[0], err)
			return
		}
		if !sleep(w.storing, reconnect.delay(failures)) {
			return
		}
	}
}

// storeLater puts an outcome aside whose row somebody else holds locked, a user's open
// transaction perhaps. It stays held, so its lease goes on.
func (w *worker) storeLater(o outcome) {
	time.AfterFunc(reconnect.max, func() {
		if w.locked.add(w.storing, o) != nil {
			w.log.Debug("outcome given up", "task_id", o.attempt.task.ID)
		}
	})
}

// storeLocked tries outcomes again that were put aside, one by one: each may wait
// for its lock, and none shares a statement.
func (w *worker) storeLocked(_ context.Context, outcomes []outcome) {
	for _, o := range outcomes {
		w.storeKind(o.kind, []outcome{o})
	}
}

// errUnless returns err, or nil when is says that it is of another kind.
func errUnless(err error, is func(error) bool) error {
	if err == nil || is(err) {
		return nil
	}
	return err
}

// storeUnstorable records, instead of an outcome that PostgreSQL can never take, a
// permanent failure that says so. Without it the task would be run for ever.
func (w *worker) storeUnstorable(o outcome, err error) {
	if o.replaced {
		w.log.Error("outcome cannot be stored; the lease will run out", "task_id", o.attempt.task.ID, "err", err)
		w.finish(o.attempt)
		return
	}
	o.kind, o.permanent, o.result, o.replaced = outcomeFail, true, "", true
	o.message = fmt.Sprintf("outcome not storable: SQLSTATE %s", sqlState(err))
	w.storeKind(outcomeFail, []outcome{o})
}

// write is one statement for outcomes of one kind; what its answer lacks was not
// this worker's any more.
func (w *worker) write(kind outcomeKind, outcomes []outcome) (map[uuid.UUID]verdict, error) {
	ctx, cancel := context.WithTimeout(w.storing, storeLimit)
	defer cancel()
	n := len(outcomes)
	w.metrics.outcomeRows.Observe(float64(n))
	ids, attempts := make([]uuid.UUID, n), make([]int32, n)
	texts, permanents, delays := make([]string, n), make([]bool, n), make([]int64, n)
	for i, o := range outcomes {
		ids[i], attempts[i] = o.attempt.task.ID, o.attempt.task.Attempt
		texts[i], permanents[i], delays[i] = o.message, o.permanent, o.delay.Milliseconds()
		if kind == outcomeComplete {
			texts[i] = o.result
		}
	}
	verdicts := make(map[uuid.UUID]verdict, n)
	switch kind {
	case outcomeComplete:
		rows, err := w.leases.CompleteTasks(ctx, db.CompleteTasksParams{TaskIDs: ids, Attempts: attempts, Results: texts})
		for _, r := range rows {
			verdicts[r.TaskID] = verdict{r.Status, r.RetryCount}
		}
		return verdicts, err
	case outcomeFail:
		rows, err := w.leases.FailTasks(ctx, db.FailTasksParams{TaskIDs: ids, Attempts: attempts, Errors: texts, Permanents: permanents, DelaysMS: delays})
		for _, r := range rows {
			verdicts[r.TaskID] = verdict{r.Status, r.RetryCount}
		}
		return verdicts, err
	case outcomeRelease:
		rows, err := w.leases.ReleaseTasks(ctx, db.ReleaseTasksParams{TaskIDs: ids, Attempts: attempts, Reasons: texts})
		for _, r := range rows {
			verdicts[r.TaskID] = verdict{r.Status, r.RetryCount}
		}
		return verdicts, err
	}
	return nil, errors.ErrUnsupported
}

// conclude logs what was stored, lets go of the attempts and drops their entries.
// A crash before the drop leaves entries whose next claim is refused.
func (w *worker) conclude(outcomes []outcome, verdicts map[uuid.UUID]verdict) {
	var refused []outcome
	for _, o := range outcomes {
		v, ok := verdicts[o.attempt.task.ID]
		if !ok {
			refused = append(refused, o)
			continue
		}
		w.changed(o.attempt.task.ID)
		w.metrics.attempt(o.kind, v.status, o.took)
		w.logOutcome(o, v)
		if v.status == statusPending && o.kind == outcomeFail {
			w.retryIn(o.delay)
		}
	}
	if len(refused) > 0 {
		w.explainRefused(refused)
	}
	for _, o := range outcomes {
		w.finish(o.attempt)
	}
}

// finish lets go of an attempt whose outcome is stored or nobody's concern, and drops
// its entry.
func (w *worker) finish(a *attempt) {
	w.drop(a.message) // first: a shutdown ends when nothing is held
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held[a.task.ID] == a {
		delete(w.held, a.task.ID)
	}
}

// logOutcome writes the line of an attempt. The handler's own words are left to
// error_message and the debug level: they may hold what the payload holds. It builds nothing for a level that is off:
// at full rate that would be a tenth of a task's cost.
func (w *worker) logOutcome(o outcome, v verdict) {
	t, ctx := o.attempt.task, context.Background()
	level, message := slog.LevelInfo, "task handed back"
	switch {
	case v.status == statusCompleted:
		message = "task completed"
	case v.status == statusFailed:
		level, message = slog.LevelWarn, "task failed"
	case v.status == statusCancelled:
		message = "task cancelled"
	case o.kind == outcomeFail:
		level, message = slog.LevelWarn, "task will be retried"
	}
	if !w.log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("task_id", t.ID.String()), slog.String("name", t.Name), slog.Int64("attempt", int64(t.Attempt)),
		slog.Int64("took_ms", o.took.Milliseconds()),
	}
	if t.Traceparent != "" {
		attrs = append(attrs, slog.String("traceparent", t.Traceparent))
	}
	if o.kind != outcomeComplete {
		attrs = append(attrs, slog.String("cause", o.cause), slog.Int64("retry_count", int64(v.retryCount)))
		if w.log.Enabled(ctx, slog.LevelDebug) {
			attrs = append(attrs, slog.String("err", o.message))
		}
	}
	if v.status == statusPending && o.kind == outcomeFail {
		attrs = append(attrs, slog.Int64("delay_ms", o.delay.Milliseconds()))
	}
	w.log.LogAttrs(ctx, level, message, attrs...)
}

// explainRefused finds out why outcomes changed no row: stored already by a statement
// whose reply was lost, or no longer this worker's. It only logs and counts; either way
// there is nothing left to do.
func (w *worker) explainRefused(outcomes []outcome) {
	ctx, cancel := context.WithTimeout(w.storing, storeLimit)
	defer cancel()
	ids := make([]uuid.UUID, len(outcomes))
	for i, o := range outcomes {
		ids[i] = o.attempt.task.ID
	}
	rows, err := w.leases.AttemptOutcomes(ctx, ids)
	if err != nil {
		w.access.note(err)
	}
	own := make(map[uuid.UUID]string) // what the attempt left its task in
	for _, r := range rows {
		for _, o := range outcomes {
			if o.attempt.task.ID != r.TaskID || !carries(r, o) {
				continue
			}
			own[r.TaskID] = r.Status
			if r.Attempt != o.attempt.task.Attempt || r.Status == statusProcessing {
				own[r.TaskID] = statusPending // and somebody has taken it since
			}
		}
	}
	for _, o := range outcomes {
		t := o.attempt.task
		if status, ok := own[t.ID]; ok {
			w.metrics.attempt(o.kind, status, o.took)
			w.log.Info("outcome was stored before", "task_id", t.ID, "attempt", t.Attempt)
		} else {
			w.metrics.refused.Inc()
			w.log.Warn("outcome refused: the task is no longer this worker's", "task_id", t.ID, "name", t.Name, "attempt", t.Attempt)
		}
	}
}

// carries reports whether a row shows the outcome of the very attempt: completed
// under its fence, or a line of its own in the ledger that does not call it lost.
func carries(r db.AttemptOutcomesRow, o outcome) bool {
	if o.kind == outcomeComplete {
		return r.Status == statusCompleted && r.Attempt == o.attempt.task.Attempt
	}
	var ledger []struct {
		Attempt int32  `json:"attempt"`
		Outcome string `json:"outcome"`
	}
	if json.Unmarshal(r.Attempts, &ledger) != nil {
		return false
	}
	for _, l := range ledger {
		if l.Attempt == o.attempt.task.Attempt && l.Outcome != "lost" {
			return true
		}
	}
	return false
}
