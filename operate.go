package main

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	maxBulk      = 1000                  // tasks that one request changes at most, and unless it says
	bulkBatch    = 250                   // tasks that one statement changes, and so locks, at most
	bulkPage     = 2000                  // rows that one statement looks at
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
		s.intake.note(err)
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
	selection
	limit    int
	after    uuid.UUID // the walk goes on behind this key
	finished bool      // no task is left behind it

	changed   int // cancelled or retried
	requested int // processing, and asked to stop
	skipped   int // matched, but locked by somebody all the time
}

// A step changes tasks of one page behind a key, at most max of them.
type step func(ctx context.Context, b *bulk, max int) (stepResult, error)

// A stepResult says what one step did: how many tasks it changed or asked to stop, how
// many matched, how many rows it saw, and the last match and the last row.
type stepResult struct {
	changed, requested, matched, seen int32
	lastMatch, lastID                 uuid.UUID
}

// cancelTasks answers POST /tasks/cancel.
func (s *server) cancelTasks(w http.ResponseWriter, r *http.Request) {
	b, ok := s.operate(w, r, []string{statusPending, statusProcessing}, s.cancelStep)
	if !ok {
		return
	}
	s.log.Info("tasks cancelled by request", "count", b.changed, "requested", b.requested, "skipped", b.skipped)
	body := strconv.AppendInt([]byte(`{"cancelled":`), int64(b.changed), 10)
	body = strconv.AppendInt(append(body, `,"cancel_requested":`...), int64(b.requested), 10)
	b.write(w, r, body)
}

// retryTasks answers POST /tasks/retry. The dispatcher publishes what it made pending, at its own pace.
func (s *server) retryTasks(w http.ResponseWriter, r *http.Request) {
	b, ok := s.operate(w, r, []string{statusFailed, statusCancelled}, s.retryStep)
	if !ok {
		return
	}
	s.log.Info("tasks retried by request", "count", b.changed, "skipped", b.skipped)
	b.write(w, r, strconv.AppendInt([]byte(`{"retried":`), int64(b.changed), 10))
}

// write answers with what body holds already, and where to go on.
func (b *bulk) write(w http.ResponseWriter, r *http.Request, body []byte) {
	body = strconv.AppendInt(append(body, `,"skipped":`...), int64(b.skipped), 10)
	body = append(body, `,"next_cursor":`...)
	if b.finished {
		body = append(body, "null"...)
	} else {
		body = appendString(body, b.cursor(r.URL.Path, b.after))
	}
	writeBody(w, http.StatusOK, "application/json", append(body, '}'))
}

// operate reads the request and walks, in short statements that pass over locked rows and
// so hold up nobody, until enough tasks are changed, none are left, or bulkTime is over. It
// reports false when it has answered with an error. What was changed before one stays so, and the
// same request sent again finds the rest. A process does one such request at a time.
func (s *server) operate(w http.ResponseWriter, r *http.Request, statuses []string, do step) (*bulk, bool) {
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
		if err := b.advance(ctx, do); err != nil {
			if !timedOut(err) {
				s.intake.note(err)
			}
			s.fail(w, r, err)
			return nil, false
		}
	}
	return b, true
}

// advance does one page, again while some of its matches are locked: mostly by a heartbeat or an
// outcome, for a moment.
func (b *bulk) advance(ctx context.Context, do step) error {
	for try := 1; ; try++ {
		most := min(bulkBatch, b.limit-b.changed-b.requested)
		p, err := do(ctx, b, most)
		if err != nil {
			return err
		}
		b.changed += int(p.changed)
		b.requested += int(p.requested)
		locked := int(p.matched - p.changed - p.requested)
		if locked > 0 && try < bulkTries && sleep(ctx, bulkPatience) && b.changed+b.requested < b.limit {
			continue
		}
		b.skipped += locked
		if int(p.matched) == most {
			b.after = p.lastMatch
		} else {
			b.after = p.lastID
			b.finished = p.seen < bulkPage
		}
		return nil
	}
}

func (s *server) cancelStep(ctx context.Context, b *bulk, most int) (stepResult, error) {
	p, err := db.New(s.pools.work).CancelTasks(ctx, db.CancelTasksParams{
		AfterID: b.after, PageRows: bulkPage, Statuses: b.statuses, Name: b.name,
		CreatedAfter: b.createdAfter, CreatedBefore: b.createdBefore, MaxRows: int32(most),
	})
	return stepResult{p.Cancelled, p.Requested, p.Matched, p.Seen, p.LastMatch, p.LastID}, err
}

func (s *server) retryStep(ctx context.Context, b *bulk, most int) (stepResult, error) {
	p, err := db.New(s.pools.work).RetryTasks(ctx, db.RetryTasksParams{
		AfterID: b.after, PageRows: bulkPage, Statuses: b.statuses, Name: b.name,
		CreatedAfter: b.createdAfter, CreatedBefore: b.createdBefore, MaxRows: int32(most),
	})
	return stepResult{p.Retried, 0, p.Matched, p.Seen, p.LastMatch, p.LastID}, err
}
