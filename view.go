package main

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"nexusflow/db"
)

const retryAfterCap = 30 * time.Second // a client is never told to stay away longer

// etag names a state of a task. Every transition that shows moves updated_at.
func etag(t *db.Task) string {
	b := make([]byte, 0, 48)
	b = append(b, '"')
	b = append(b, t.Status...)
	b = append(b, '-')
	b = strconv.AppendInt(b, int64(t.RetryCount), 10)
	b = append(b, '-')
	b = strconv.AppendInt(b, t.UpdatedAt.UnixMicro(), 16)
	return string(append(b, '"'))
}

// matches reports whether an If-None-Match header names tag. The comparison is the weak
// one, as RFC 9110 section 13.1.2 asks for: proxies that compress mark tags as weak.
func matches(values []string, tag string) bool {
	for _, value := range values {
		for given := range strings.SplitSeq(value, ",") {
			given = strings.TrimSpace(given)
			if given == "*" || strings.TrimPrefix(given, "W/") == tag {
				return true
			}
		}
	}
	return false
}

// retryAfterSeconds tells when asking for a task again may be worth it: at once, or when
// one that waits is due.
func retryAfterSeconds(t *db.Task) string {
	wait := time.Second
	if t.Status == statusPending {
		wait = min(max(time.Until(t.RunAt), wait), retryAfterCap)
	}
	return strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10)
}

// appendTask appends the representation of a task: the original's members in its order,
// then ours.
func appendTask(b []byte, t *db.Task) []byte {
	b = appendHead(b, t)
	b = appendJSON(append(b, `,"payload":`...), t.Payload)
	b = appendJSON(append(b, `,"result":`...), t.Result)
	return append(appendState(b, t), '}')
}

// appendSummary is appendTask without payload and result.
func appendSummary(b []byte, t *db.Task) []byte {
	return append(appendState(appendHead(b, t), t), '}')
}

// appendHead appends the members of a task that come before its payload.
func appendHead(b []byte, t *db.Task) []byte {
	b = append(b, `{"task_id":"`...)
	b = append(b, t.TaskID.String()...)
	b = appendString(append(b, `","name":`...), t.Name)
	return appendString(append(b, `,"status":`...), t.Status)
}

// appendState appends the members of a task that come after its result.
func appendState(b []byte, t *db.Task) []byte {
	b = strconv.AppendInt(append(b, `,"retry_count":`...), int64(t.RetryCount), 10)
	b = strconv.AppendInt(append(b, `,"max_retries":`...), int64(t.MaxRetries), 10)
	b = appendText(append(b, `,"error_message":`...), t.ErrorMessage)
	b = appendTime(append(b, `,"created_at":`...), &t.CreatedAt)
	b = appendTime(append(b, `,"updated_at":`...), &t.UpdatedAt)
	b = appendText(append(b, `,"idempotency_key":`...), t.IdempotencyKey)
	b = appendString(append(b, `,"queue":`...), t.Queue)
	b = appendTime(append(b, `,"run_at":`...), &t.RunAt)
	b = appendTime(append(b, `,"next_retry_at":`...), nextRetry(t))
	b = appendTime(append(b, `,"started_at":`...), t.StartedAt)
	b = appendTime(append(b, `,"finished_at":`...), t.FinishedAt)
	b = append(b, `,"timeout_ms":`...)
	if t.TimeoutMS != nil {
		b = strconv.AppendInt(b, *t.TimeoutMS, 10)
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendBool(append(b, `,"cancel_requested":`...), t.CancelRequested)
	b = strconv.AppendInt(append(b, `,"attempt":`...), int64(t.Attempt), 10)
	b = strconv.AppendInt(append(b, `,"lost_count":`...), int64(t.LostCount), 10)
	return appendAttempts(append(b, `,"attempts":`...), t.Attempts)
}

// nextRetry returns when a task that waits after a failure runs again. A task given back by a
// worker that stopped or died has a retry_count as well, but is due since that moment.
// The answer must not depend on the time of day, or the ETag would lie.
func nextRetry(t *db.Task) *time.Time {
	if t.Status == statusPending && t.RetryCount > 0 && t.RunAt.After(t.UpdatedAt) {
		return &t.RunAt
	}
	return nil
}

// appendAttempts appends the ledger, its members in the documented order: jsonb
// orders them by length.
func appendAttempts(b []byte, ledger json.RawMessage) []byte {
	if string(ledger) == "[]" {
		return append(b, ledger...)
	}
	var attempts []struct {
		Attempt    json.RawMessage `json:"attempt"`
		Worker     json.RawMessage `json:"worker"`
		StartedAt  json.RawMessage `json:"started_at"`
		FinishedAt json.RawMessage `json:"finished_at"`
		Outcome    json.RawMessage `json:"outcome"`
		Error      json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(ledger, &attempts); err != nil {
		return appendJSON(b, ledger) // a row that somebody wrote by hand
	}
	b = append(b, '[')
	for i, a := range attempts {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendJSON(append(b, `{"attempt":`...), a.Attempt)
		b = appendJSON(append(b, `,"worker":`...), a.Worker)
		b = appendJSON(append(b, `,"started_at":`...), a.StartedAt)
		b = appendJSON(append(b, `,"finished_at":`...), a.FinishedAt)
		b = appendJSON(append(b, `,"outcome":`...), a.Outcome)
		b = appendJSON(append(b, `,"error":`...), a.Error)
		b = append(b, '}')
	}
	return append(b, ']')
}
