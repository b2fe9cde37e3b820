package main

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	maxWait = 30 // seconds; below the 60 after which proxies commonly give up

	// writeTimeout is how long the client of an ordinary answer may take to read it.
	writeTimeout = 30 * time.Second
)

// await returns the task of p once done says so, or as it is when limit has passed or the
// process drains. It reads the row at first, at changes and at the end, and so notices
// that PostgreSQL is away at the first and at the end only.
func (s *server) await(ctx context.Context, p *place, limit time.Duration, done func(*db.Task) bool) (db.Task, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for first, over := true, false; ; first = false {
		t, err := s.readTask(ctx, p.id)
		if err != nil && first || errors.Is(err, pgx.ErrNoRows) || err == nil && done(&t) || over || ctx.Err() != nil {
			return t, err
		}
		if err == nil {
			s.lobby.saw(p, &t)
		}
		select {
		case <-p.changed:
		case <-timer.C:
			over = true
		case <-s.lobby.closed:
			over = true
		case <-ctx.Done():
			return t, context.Cause(ctx)
		}
	}
}

// currentTask reads a task, after a wait if one is asked for and there is a place; ended
// reports whether such a wait came to its end with the task as it was. For a request that
// knows a state of the task the wait is over when that has changed.
func (s *server) currentTask(w http.ResponseWriter, r *http.Request, id uuid.UUID, wait waitRequest) (t db.Task, ended bool, err error) {
	known := r.Header.Values("If-None-Match")
	done := func(t *db.Task) bool {
		return terminal(t.Status) || len(known) > 0 && !matches(known, etag(t))
	}
	var p *place
	if wait.limit > 0 {
		p = s.lobby.join(id, len(known) == 0)
	}
	if p == nil {
		if wait.limit == 0 {
			wait.apply(w)
		}
		t, err = s.readTask(r.Context(), id)
		return t, false, err
	}
	defer s.lobby.leave(p)
	outlast(w, wait.limit)
	wait.apply(w)
	t, err = s.await(r.Context(), p, wait.limit, done)
	return t, err == nil && !done(&t), err
}

// awaitAccepted waits as the client of a submit prefers and returns the task as it is then.
// It returns nil when there was no wait, or when the row cannot be read: that the
// task is stored stays true, so it is never an error.
func (s *server) awaitAccepted(w http.ResponseWriter, r *http.Request, id uuid.UUID) *db.Task {
	wait := preferredWait(r.Header)
	if wait.limit == 0 {
		wait.apply(w)
		return nil
	}
	p := s.lobby.join(id, true)
	if p == nil {
		return nil
	}
	defer s.lobby.leave(p)
	outlast(w, wait.limit)
	wait.apply(w)
	t, err := s.await(r.Context(), p, wait.limit, func(t *db.Task) bool { return terminal(t.Status) })
	if err != nil {
		return nil
	}
	return &t
}

// outlast moves the connection's deadlines behind a wait and the read at its end. The one
// for reading must go too: at ReadTimeout net/http takes the client for gone.
func outlast(w http.ResponseWriter, wait time.Duration) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Time{})
	_ = c.SetWriteDeadline(time.Now().Add(wait + readLimit + writeTimeout))
}

// A waitRequest is how long a client would have its answer held back at most.
type waitRequest struct {
	limit     time.Duration
	preferred bool // by a Prefer header, which is answered when it is obeyed
}

// apply tells the client that its preference is obeyed.
func (q waitRequest) apply(w http.ResponseWriter) {
	if q.preferred {
		w.Header().Set("Preference-Applied", "wait="+strconv.Itoa(int(q.limit/time.Second)))
	}
}

// requestedWait reads the query's wait, else the Prefer header. Nothing else may be in the query.
func requestedWait(r *http.Request) (waitRequest, error) {
	if r.URL.RawQuery == "" {
		return preferredWait(r.Header), nil
	}
	q := readQuery(r.URL.RawQuery)
	text, given := q.one("wait")
	limit, ok := parseWait(text)
	switch {
	case !given:
	case !ok && isDigits(strings.TrimPrefix(text, "-")):
		q.fail("greater_than_equal", "wait", "Input should be greater than or equal to 0")
	case !ok:
		q.fail("int_type", "wait", "Input should be a valid integer, in seconds")
	}
	if err := q.end(); err != nil {
		return waitRequest{}, err
	}
	if !given {
		return preferredWait(r.Header), nil
	}
	return waitRequest{limit: limit}, nil
}

// preferredWait reads the wait of a Prefer header (RFC 7240), the first if there are several.
// One that cannot be read is ignored, as the standard demands.
func preferredWait(h http.Header) waitRequest {
	for _, value := range h.Values("Prefer") {
		for preference := range splitUnquoted(value, ',') {
			for word := range splitUnquoted(preference, ';') { // what follows are parameters
				name, value, _ := strings.Cut(word, "=")
				if !strings.EqualFold(strings.TrimSpace(name), "wait") {
					break
				}
				value = strings.TrimSpace(value)
				if n := len(value); n > 1 && value[0] == '"' && value[n-1] == '"' {
					value = value[1 : n-1]
				}
				limit, ok := parseWait(value)
				return waitRequest{limit: limit, preferred: ok}
			}
		}
	}
	return waitRequest{}
}

// parseWait reads a number of seconds. More than maxWait is maxWait.
func parseWait(text string) (time.Duration, bool) {
	if !isDigits(text) {
		return 0, false
	}
	n, err := strconv.Atoi(text)
	if err != nil { // more than an int holds
		n = maxWait
	}
	return time.Duration(min(n, maxWait)) * time.Second, true
}

func isDigits(text string) bool {
	return text != "" && strings.Trim(text, "0123456789") == ""
}

// splitUnquoted yields the parts of a header's value between separators that are not in a
// quoted string.
func splitUnquoted(text string, separator byte) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		quoted, start := false, 0
		for i := 0; i < len(text); i++ {
			switch {
			case quoted && text[i] == '\\':
				i++
			case text[i] == '"':
				quoted = !quoted
			case !quoted && text[i] == separator:
				if !yield(text[start:i]) {
					return
				}
				start = i + 1
			}
		}
		yield(text[start:])
	}
}
