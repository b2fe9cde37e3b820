package main

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	maxBulk      = 1000                  // tasks that one request changes at most, and unless it says
	bulkBatch    = 250                   // tasks that one statement changes, and so locks, at most
	bulkTime     = 2 * time.Second       // after which a request leaves the rest to the next one
	bulkTries    = 3                     // for tasks that somebody holds locked
	bulkPatience = 25 * time.Millisecond // between them
)

// cancelTask answers POST /tasks/{task_id}/cancel: 200 when the task is cancelled, 202
// when the worker that runs it was asked to stop, which it does within two seconds. A body is
// not read: net/http drops a short one and hangs up on a long one.
func (s *server) cancelTask(w http.ResponseWriter, r *http.Request) {
	t, done, err := s.change(r, (*db.Queries).CancelTask)
	if done {
		s.changed(t.TaskID)
		s.log.Info("cancel requested", "task_id", t.TaskID, "name", t.Name, "attempt", t.Attempt, "status", t.Status)
	}
	switch {
	case err != nil:
		s.fail(w, r, err)
	case t.Status == statusCancelled:
		writeOperated(w, http.StatusOK, &t)
	case t.Status == statusProcessing:
		writeOperated(w, http.StatusAccepted, &t)
	default:
		s.fail(w, r, conflict(&t, "task-not-cancellable", "Task cannot be cancelled"))
	}
}

// retryTask answers POST /tasks/{task_id}/retry: 202 when a failed or cancelled task is
// pending again. The hint comes after the commit; without it, the dispatcher finds the row.
func (s *server) retryTask(w http.ResponseWriter, r *http.Request) {
	t, done, err := s.change(r, (*db.Queries).RetryTask)
	switch {
	case err != nil:
		s.fail(w, r, err)
	case done:
		s.changed(t.TaskID)
		s.log.Info("task retried by request", "task_id", t.TaskID, "name", t.Name, "attempt", t.Attempt)
		if s.hints.up() {
			s.hints.publish([]entry{{t.TaskID, t.Queue}})
		}
		writeOperated(w, http.StatusAccepted, &t)
	default:
		s.fail(w, r, conflict(&t, "task-not-retryable", "Task cannot be retried"))
	}
}

// change runs a guarded statement for the task that the path names and returns the task as it
// is then, and whether the statement changed it. After a reply that was lost it is sent
// again, and a task that is on its way then counts as changed: by the first statement, or by
// another caller who wanted the same. A client that hangs up ends nothing.
func (s *server) change(r *http.Request, statement func(*db.Queries, context.Context, uuid.UUID) (db.Task, error)) (t db.Task, done bool, err error) {
	given := r.PathValue("task_id")
	id, ok := taskID(given)
	if !ok {
		return t, false, taskNotFound(given)
	}
	if err := noQuery(r.URL); err != nil {
		return t, false, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), readLimit)
	defer cancel()
	q := db.New(s.pools.api)
	t, err = statement(q, ctx, id)
	lost := broken(err) && ctx.Err() == nil
	if lost {
		s.pools.api.Reset()
		t, err = statement(q, ctx, id)
	}
	done = err == nil
	if errors.Is(err, pgx.ErrNoRows) {
		if t, err = q.GetTask(ctx, id); errors.Is(err, pgx.ErrNoRows) {
			return t, false, taskNotFound(given)
		}
		done = lost && err == nil && !terminal(t.Status)
	}
	if !timedOut(err) {
		s.noteRead(err) // it may have been one
	}
	return t, done, err
}

// conflict returns the error for a task whose state forbids what was asked.
func conflict(t *db.Task, name, title string) *httpError {
	return &httpError{status: http.StatusConflict, name: name, title: title, detail: "The task is " + t.Status + "."}
}

// writeOperated answers with the task as GET shows it.
func writeOperated(w http.ResponseWriter, code int, t *db.Task) {
	h := w.Header()
	h.Set("Location", "/tasks/"+t.TaskID.String())
	if code == http.StatusAccepted {
		h.Set("Retry-After", retryAfterSeconds(t))
	}
	writeBody(w, code, "application/json", appendTask(nil, t))
}

// A bulk is one request to cancel or retry many tasks, and how far it has come.
type bulk struct {
	filter
	limit    int
	from     position
	finished bool // no task is left behind from

	changed   int // cancelled or retried
	requested int // processing, and asked to stop
	skipped   int // matched, but locked by somebody all the time
}

// A bulkStatement changes those of the given tasks that are in one of the states, and returns
// all that it could have changed, each with its state or, if somebody holds it locked, with "".
type bulkStatement func(q *db.Queries, ctx context.Context, ids []uuid.UUID, statuses []string) ([]db.CancelTasksRow, error)

func cancelStatement(q *db.Queries, ctx context.Context, ids []uuid.UUID, statuses []string) ([]db.CancelTasksRow, error) {
	return q.CancelTasks(ctx, db.CancelTasksParams{TaskIDs: ids, Statuses: statuses})
}

func retryStatement(q *db.Queries, ctx context.Context, ids []uuid.UUID, statuses []string) ([]db.CancelTasksRow, error) {
	retried, err := q.RetryTasks(ctx, db.RetryTasksParams{TaskIDs: ids, Statuses: statuses})
	rows := make([]db.CancelTasksRow, len(retried))
	for i, r := range retried {
		rows[i] = db.CancelTasksRow(r)
	}
	return rows, err
}

// readBulk reads the query of a request about many tasks, which must choose some of them:
// a forgotten filter must not cancel everything. Its error holds all that is wrong.
func readBulk(u *url.URL, allowed []string) (*bulk, error) {
	q := readQuery(u.RawQuery)
	b := &bulk{limit: maxBulk}
	var chosen bool
	b.filter, chosen = q.filter(allowed)
	if text, ok := q.one("limit"); ok {
		b.limit = q.integer("limit", text, 1, maxBulk)
	}
	b.from = start(q, &b.filter)
	q.end()
	if !chosen && len(q.errs) == 0 {
		q.fail("missing", "status", "At least one of status, name, created_after and created_before is required")
	}
	if len(q.errs) > 0 {
		return nil, q.errs
	}
	return b, nil
}

// cancelTasks answers POST /tasks/cancel.
func (s *server) cancelTasks(w http.ResponseWriter, r *http.Request) {
	b, ok := s.operate(w, r, []string{statusPending, statusProcessing}, cancelStatement)
	if !ok {
		return
	}
	s.log.Info("tasks cancelled by request", "count", b.changed, "requested", b.requested, "skipped", b.skipped)
	body := strconv.AppendInt([]byte(`{"cancelled":`), int64(b.changed), 10)
	body = strconv.AppendInt(append(body, `,"cancel_requested":`...), int64(b.requested), 10)
	b.write(w, body)
}

// retryTasks answers POST /tasks/retry. The dispatcher publishes what it made pending, at its own pace.
func (s *server) retryTasks(w http.ResponseWriter, r *http.Request) {
	b, ok := s.operate(w, r, []string{statusFailed, statusCancelled}, retryStatement)
	if !ok {
		return
	}
	s.log.Info("tasks retried by request", "count", b.changed, "skipped", b.skipped)
	b.write(w, strconv.AppendInt([]byte(`{"retried":`), int64(b.changed), 10))
}

// write answers with what body holds already, and where to go on.
func (b *bulk) write(w http.ResponseWriter, body []byte) {
	body = strconv.AppendInt(append(body, `,"skipped":`...), int64(b.skipped), 10)
	body = append(body, `,"next_cursor":`...)
	if b.finished {
		body = append(body, "null"...)
	} else {
		body = appendString(body, b.cursor(b.from))
	}
	writeBody(w, http.StatusOK, "application/json", append(body, '}'))
}

// operate reads the request and walks, in short statements that pass over locked rows and
// so hold up nobody, until enough tasks are changed, none are left, or bulkTime is over. It
// reports false when it has answered with an error. What was changed before one stays so, and the
// same request sent again finds the rest. A process does one such request at a time.
func (s *server) operate(w http.ResponseWriter, r *http.Request, statuses []string, do bulkStatement) (*bulk, bool) {
	b, err := readBulk(r.URL, statuses)
	if err != nil {
		s.fail(w, r, err)
		return nil, false
	}
	free, err := takeSlot(s.operating)
	if err != nil {
		s.fail(w, r, err)
		return nil, false
	}
	defer free()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), bulkTime+storeLimit)
	defer cancel()
	for begin := time.Now(); !b.finished && b.changed+b.requested < b.limit && time.Since(begin) < bulkTime; {
		if r.Context().Err() != nil {
			break // nobody waits for the answer
		}
		if err := s.advance(ctx, b, do); err != nil {
			if !timedOut(err) {
				s.intake.note(err)
			}
			s.fail(w, r, err)
			return nil, false
		}
	}
	return b, true
}

// advance lists the next tasks that match and changes them, again those that are locked: mostly by
// a heartbeat or an outcome, for a moment.
func (s *server) advance(ctx context.Context, b *bulk, do bulkStatement) error {
	most := min(bulkBatch, b.limit-b.changed-b.requested)
	rows, err := s.readPage(ctx, &b.filter, b.from, most)
	if err != nil {
		return err
	}
	ids := make([]uuid.UUID, len(rows))
	for i, r := range rows {
		ids[i] = r.TaskID
	}
	for try := 1; len(ids) > 0; try++ {
		matched, err := do(db.New(s.pools.work), ctx, ids, b.statuses)
		if err != nil {
			return err
		}
		ids = ids[:0]
		for _, m := range matched {
			switch m.Status {
			case "":
				ids = append(ids, m.TaskID)
			case statusProcessing:
				b.requested++
			default:
				b.changed++
			}
		}
		if len(ids) > 0 && (try == bulkTries || !sleep(ctx, bulkPatience)) {
			b.skipped += len(ids)
			break
		}
	}
	if b.finished = len(rows) < most; !b.finished {
		last := &rows[most-1]
		b.from = position{last.CreatedAt, last.TaskID}
	}
	return nil
}
