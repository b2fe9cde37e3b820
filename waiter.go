package main

import (
	"cmp"
	"time"

	"github.com/google/uuid"

	"nexusflow/db"
)

// A waiter is one submission on its way into the table, and the request that waits for it:
// the items of a batch, which wait together, have neither until nor done.
type waiter struct {
	until       time.Time // the request's limit; a client that hangs up does not end it
	id          uuid.UUID // made here, so that after a lost reply the row can be looked for
	sub         submission
	queue       string
	maxRetries  int32
	traceparent string
	done        chan receipt // holds the one receipt, so that nobody waits for a request that gave up
}

// gone reports whether the request has been answered already.
func (w *waiter) gone() bool { return !time.Now().Before(w.until) }

// A receipt says what became of a submission: a task, new or found by its key, or an error.
type receipt struct {
	id       uuid.UUID
	name     string
	status   string // empty if the task is new
	created  time.Time
	replayed bool
	err      error
}

// receipt returns what row, which holds w's key, is to w: its own task, whose INSERT lost its
// reply and had not ended when we looked for the row; another request's, which is
// an error; or that of the same request, sent before.
func (w *waiter) receipt(row *db.TasksByKeyRow) receipt {
	switch {
	case row.TaskID == w.id:
		return receipt{id: w.id, name: w.sub.Name, created: row.CreatedAt}
	case row.RequestHash != nil && string(row.RequestHash) != string(w.sub.Hash[:]):
		return receipt{err: errKeyReused}
	}
	return receipt{id: row.TaskID, name: row.Name, status: row.Status, created: row.CreatedAt, replayed: true}
}

// byKey returns rows by their keys.
func byKey(rows []db.TasksByKeyRow) map[string]*db.TasksByKeyRow {
	holders := make(map[string]*db.TasksByKeyRow, len(rows))
	for i := range rows {
		if rows[i].IdempotencyKey != nil {
			holders[*rows[i].IdempotencyKey] = &rows[i]
		}
	}
	return holders
}

func compareKeys(a, b *waiter) int { return cmp.Compare(a.sub.Key, b.sub.Key) }

func waiterIDs(ws []*waiter) []uuid.UUID {
	ids := make([]uuid.UUID, len(ws))
	for i, w := range ws {
		ids[i] = w.id
	}
	return ids
}

func waiterKeys(ws []*waiter) []string {
	keys := make([]string, len(ws))
	for i, w := range ws {
		keys[i] = w.sub.Key
	}
	return keys
}
