package main

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
)

// The states of a task, as stored and as shown. A task that waits for its next
// attempt is pending with retry_count > 0 and run_at in the future.
const (
	statusPending    = "pending"
	statusProcessing = "processing"
	statusCompleted  = "completed"
	statusFailed     = "failed"
	statusCancelled  = "cancelled"
)

var statuses = []string{statusPending, statusProcessing, statusCompleted, statusFailed, statusCancelled}

const (
	maxNameLen     = 128     // code points in a task name
	maxKeyLen      = 255     // characters in an idempotency key
	maxBodyBytes   = 1 << 20 // a submit request, and a payload in a batch
	maxBatchBytes  = 8 << 20 // a batch of them
	maxBatchTasks  = 500     // items in a batch
	maxBatchKeyLen = 240     // characters in the idempotency key of a batch, before [499] is added
	maxResultBytes = 1 << 20 // a handler's result as JSON
	maxErrorBytes  = 4 << 10 // error_message; the tail of longer text is kept
	maxRetryLimit  = 100     // the largest max_retries a submitter may ask for
	maxDelay       = 365 * 24 * time.Hour
	defaultQueue   = "default"
)

// A task is one attempt as its handler sees it: a copy, which the handler may keep.
type task struct {
	ID             uuid.UUID
	Name           string
	Payload        json.RawMessage // a JSON object, as PostgreSQL stores it
	Queue          string
	Attempt        int32 // from 1; lost and interrupted runs count too
	RetryCount     int32 // retries begun before this attempt's outcome
	MaxRetries     int32
	IdempotencyKey string // empty when the submitter gave none
	Traceparent    string // W3C trace context of the submitter, or empty
}

// The reasons for which a handler's context ends, found with context.Cause. A
// time-out is a *timeoutError.
var (
	errCancelRequested = errors.New("cancelled by request")
	errLeaseLost       = errors.New("lease lost: the task is no longer this worker's")
	errTrustEnded      = errors.New("lease could not be renewed in time")
	errShutdown        = errors.New("worker shut down")
)

// timeoutError is the cause of a context whose attempt ran too long.
type timeoutError struct{ after time.Duration }

func (e *timeoutError) Error() string { return "timed out after " + e.after.String() }

// permanentError and retryAfterError carry a handler's wish about what follows.
type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

type retryAfterError struct {
	err   error
	delay time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// permanent marks err so that the task fails at once, its retries unused.
func permanent(err error) error { return &permanentError{err} }

// retryAfter marks err so that the next attempt waits for d (at most 24 hours)
// instead of the back-off. It uses a retry like any error.
func retryAfter(err error, d time.Duration) error { return &retryAfterError{err, d} }

// An entry names a task and the queue whose stream it belongs in.
type entry struct {
	id    uuid.UUID
	queue string
}
