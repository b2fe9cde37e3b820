package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"nexusflow/db"
)

const (
	// abandonAfter is how long a handler may go on, from when watch sees that its context has ended,
	// before its outcome is recorded without it. A command needs five seconds of it.
	abandonAfter = 10 * time.Second
	stackLines   = 20
)

// An attempt is one run of one task by this process.
type attempt struct {
	w       *worker
	task    task
	handler *handler // nil when no handler has the task's name
	message message  // zero when the task was claimed without the stream
	began   time.Time
	ctx     context.Context
	end     context.CancelCauseFunc
	settled atomic.Bool  // its outcome is decided, by whoever came first
	trusted atomic.Int64 // when local trust in the lease ends: time since began
	ended   time.Time    // when watch, whose own this is, saw that ctx had ended
}

// trustMargin is kept between the end of local trust and the end of the lease.
func (w *worker) trustMargin() time.Duration { return w.cfg.Lease / 6 }

// trust notes that the lease was granted by a statement sent at asked: measured
// from before the sending, on this process' monotonic clock.
func (a *attempt) trust(asked time.Time) {
	a.trusted.Store(int64(asked.Add(a.w.cfg.Lease - a.w.trustMargin()).Sub(a.began)))
}

// trustEnded reports whether another worker may soon believe this one dead.
func (a *attempt) trustEnded() bool {
	return time.Since(a.began) >= time.Duration(a.trusted.Load())
}

// cancel ends the handler's context with a cause and reports whether that changed anything.
func (a *attempt) cancel(cause error) bool {
	if a.settled.Load() || a.ctx.Err() != nil {
		return false
	}
	a.end(cause)
	return true
}

// start runs a claimed task in a goroutine and a slot of its own.
func (w *worker) start(r db.ClaimTasksRow, m message, asked time.Time) {
	a := &attempt{
		w: w,
		task: task{
			ID:         r.TaskID,
			Name:       r.Name,
			Payload:    r.Payload,
			Queue:      r.Queue,
			Attempt:    r.Attempt,
			RetryCount: r.RetryCount,
			MaxRetries: r.MaxRetries,
		},
		message: m,
		began:   time.Now(),
	}
	if r.IdempotencyKey != nil {
		a.task.IdempotencyKey = *r.IdempotencyKey
	}
	if r.Traceparent != nil {
		a.task.Traceparent = *r.Traceparent
	}
	a.trust(asked)
	w.changed(r.TaskID)
	w.metrics.wait.Observe(r.ClaimedAt.Sub(r.RunAt).Seconds())
	timeout := w.cfg.TaskTimeout
	if h, ok := w.handlers.find(r.Name); ok {
		a.handler = h
		timeout = h.timeout
	}
	if r.TimeoutMS != nil {
		timeout = time.Duration(*r.TimeoutMS) * time.Millisecond
	}
	timeout = min(timeout, w.cfg.MaxTaskTimeout)

	limited, stop := context.WithTimeoutCause(context.Background(), timeout, &timeoutError{timeout})
	a.ctx, a.end = context.WithCancelCause(limited)
	w.mu.Lock()
	before := w.held[a.task.ID]
	w.held[a.task.ID] = a
	w.mu.Unlock()
	if before != nil { // the lease of an earlier attempt was lost, and its handler does not know yet
		before.cancel(errLeaseLost)
	}
	w.metrics.busy.Inc()
	w.handling.Go(func() {
		defer stop()
		defer w.metrics.busy.Dec()
		a.run()
	})
}

// run calls the handler and settles the outcome, unless that was done without it.
// The slot is free when the handler has returned, whatever became of the task.
func (a *attempt) run() {
	defer a.w.release(1)
	var result any
	err := error(errTrustEnded)
	// The answer to the claim may have come so late, or the process may have been stopped
	// so long, that somebody else has run the task since: then the handler must not begin.
	if !a.trustEnded() {
		if a.w.log.Enabled(a.ctx, slog.LevelDebug) {
			a.w.log.Debug("task started", "task_id", a.task.ID, "name", a.task.Name, "attempt", a.task.Attempt)
		}
		result, err = a.call()
	}
	if a.settled.CompareAndSwap(false, true) {
		a.settle(a.outcome(result, err))
	}
}

// deaf reports whether the handler has not returned for abandonAfter since its context ended.
// It is for watch alone: a timer for each attempt would cost a tenth of what a short task costs.
func (a *attempt) deaf() bool {
	if a.ctx.Err() == nil || a.settled.Load() {
		return false
	}
	if a.ended.IsZero() {
		a.ended = time.Now()
	}
	return time.Since(a.ended) >= abandonAfter
}

// abandon settles an attempt whose handler does not return though its context has
// ended, and reports whether it was the first to do so. The goroutine goes on and
// keeps its slot; its result will be thrown away.
func (a *attempt) abandon() bool {
	if !a.settled.CompareAndSwap(false, true) {
		return false
	}
	a.w.log.Error("handler ignores the end of its context", "task_id", a.task.ID, "name", a.task.Name, "attempt", a.task.Attempt,
		"cause", context.Cause(a.ctx))
	a.settle(a.outcome(nil, context.Cause(a.ctx)))
	return true
}

// settle hands the outcome to the batcher that stores it, waiting while that is far
// behind: the slot stays taken, and so memory is bounded while PostgreSQL is away.
func (a *attempt) settle(o outcome) {
	a.w.outcomes.add(context.Background(), o)
}

var errGoexit = errors.New("handler called runtime.Goexit")

// call runs the handler. A panic and runtime.Goexit end the attempt, not the process.
func (a *attempt) call() (result any, err error) {
	if a.handler == nil {
		return nil, permanent(fmt.Errorf("no handler for task name %q", a.task.Name))
	}
	if p := bytes.TrimSpace(a.task.Payload); len(p) == 0 || p[0] != '{' {
		return nil, permanent(errors.New("payload is not a JSON object"))
	}
	returned := false
	defer func() {
		if returned {
			return
		}
		p := recover()
		if p == nil { // the goroutine is on its way out: settle here, run will not go on
			if a.settled.CompareAndSwap(false, true) {
				a.settle(a.outcome(nil, errGoexit))
			}
			return
		}
		lines := strings.SplitN(string(debug.Stack()), "\n", stackLines+1)
		a.w.log.Error("handler panicked", "task_id", a.task.ID, "name", a.task.Name, "attempt", a.task.Attempt,
			"err", fmt.Sprint(p), "stack", lines[:min(stackLines, len(lines))])
		err = fmt.Errorf("panic: %v", p)
	}()
	result, err = a.handler.run(a.ctx, a.task)
	returned = true
	return result, err
}

type outcomeKind int

const (
	outcomeComplete outcomeKind = iota // T4
	outcomeFail                        // T5
	outcomeRelease                     // T6, or T11 when a cancel was requested
	outcomeNone                        // the attempt is no longer this worker's
)

// An outcome is what an attempt came to, before PostgreSQL agreed.
type outcome struct {
	attempt   *attempt
	kind      outcomeKind
	result    string // JSON; "" = none
	message   string // why it did not complete; storable
	cause     string // the same in words of ours, for the log
	permanent bool
	delay     time.Duration
	took      time.Duration
	replaced  bool // stands for an outcome that could not be stored
}

// outcome turns what the handler returned into what is recorded. An error after the
// context ended is taken as its consequence, unless the handler calls it permanent.
func (a *attempt) outcome(result any, err error) outcome {
	o := outcome{attempt: a, took: time.Since(a.began)}
	if err == nil {
		o.result, err = encodeResult(result)
		if err == nil {
			o.kind = outcomeComplete
			return o
		}
		err = permanent(err)
	}
	_, isPermanent := errors.AsType[*permanentError](err)
	ended := context.Cause(a.ctx)
	if ended != nil && !isPermanent {
		err = ended
	}
	o.message = cmp.Or(cleanText([]byte(err.Error())), "unknown error")
	switch {
	case isPermanent:
		o.cause = "permanent error"
	case ended != nil, errors.Is(err, errTrustEnded):
		o.cause = o.message // words of ours
	default:
		o.cause = "error"
	}
	switch {
	case errors.Is(err, errLeaseLost):
		o.kind = outcomeNone
	case errors.Is(err, errCancelRequested), errors.Is(err, errShutdown), errors.Is(err, errTrustEnded):
		o.kind = outcomeRelease
	default:
		o.kind = outcomeFail
		o.permanent = isPermanent
		o.delay = a.retryDelay(err)
	}
	return o
}

// retryDelay is how long the task waits for its next attempt.
func (a *attempt) retryDelay(err error) time.Duration {
	if e, ok := errors.AsType[*retryAfterError](err); ok {
		return min(max(e.delay, 0), maxRetryAfter)
	}
	b := a.w.cfg.Backoff
	if a.handler != nil {
		b = a.handler.backoff
	}
	return b.delay(int(a.task.RetryCount))
}

// encodeResult turns a handler's result into JSON that PostgreSQL can store and give
// back; the error says what it cannot.
func encodeResult(result any) (string, error) {
	var doc []byte
	switch r := result.(type) {
	case nil:
		return "", nil
	case json.RawMessage:
		doc = bytes.TrimSpace(r)
		if len(doc) == 0 {
			return "", nil
		}
	default:
		var buf bytes.Buffer
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(result); err != nil {
			return "", fmt.Errorf("result not storable: %w", err)
		}
		doc = bytes.TrimSpace(buf.Bytes())
	}
	if err := checkStorable(doc); err != nil {
		return "", fmt.Errorf("result not storable: %w", err)
	}
	return string(doc), nil
}
