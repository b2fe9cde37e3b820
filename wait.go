package main

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	maxPlaces = 1000 // requests that wait at once: long polls and streams together
	maxWait   = 30   // seconds; below the 60 after which proxies commonly give up

	pollInterval = 200 * time.Millisecond
	pollDistance = 10 * time.Millisecond // between two polls, however many hints come

	// writeTimeout is how long the client of an ordinary answer may take to read it.
	writeTimeout = 30 * time.Second
)

// A place is one request that waits for a task.
type place struct {
	id      uuid.UUID
	toEnd   bool          // only the end of the task matters
	changed chan struct{} // holds a token once the task is not as it was seen
	seen    taskState     // what the request knows; guarded by the lobby's lock
}

// A taskState is what an ETag is made of. It is zero for a task that does not exist or
// was not read yet.
type taskState struct {
	status     string
	retryCount int32
	updated    int64 // in µs
}

// A lobby is where requests wait for tasks. They hold no database connection: one loop
// asks for all of them, every pollInterval and at once when a worker of this process
// has changed a task.
type lobby struct {
	pool     *pgxpool.Pool
	note     func(error) // is told of each poll's error or nil
	poke     chan struct{}
	closed   chan struct{} // is closed when nobody may wait any longer
	close    func()        // closes it
	taken    atomic.Int32  // places
	asks     atomic.Int32  // those of them that wait for a task
	beat     time.Duration // between signs of life on a stream
	patience time.Duration // how long the client of a stream may take to read

	mu     sync.Mutex
	byTask map[uuid.UUID][]*place
	hinted map[uuid.UUID]struct{} // tasks in byTask that this process has changed
}

func newLobby(pool *pgxpool.Pool, note func(error)) *lobby {
	closed := make(chan struct{})
	return &lobby{
		pool:     pool,
		note:     note,
		poke:     make(chan struct{}, 1),
		closed:   closed,
		close:    sync.OnceFunc(func() { close(closed) }),
		beat:     heartbeat,
		patience: streamPatience,
		byTask:   make(map[uuid.UUID][]*place),
		hinted:   make(map[uuid.UUID]struct{}),
	}
}

// take reserves one of the places, and reports whether there was one; free gives it back.
func (l *lobby) take() bool {
	select {
	case <-l.closed:
		return false
	default:
	}
	if l.taken.Add(1) > maxPlaces {
		l.taken.Add(-1)
		return false
	}
	return true
}

func (l *lobby) free() { l.taken.Add(-1) }

// join gives a request a place to wait for a task, which leave ends. It returns nil when
// there is none. The task is to be read afterwards, not before: then no change between
// the two goes unnoticed.
func (l *lobby) join(id uuid.UUID, toEnd bool) *place {
	if !l.take() {
		return nil
	}
	p := &place{id: id, toEnd: toEnd, changed: make(chan struct{}, 1)}
	l.asks.Add(1)
	l.mu.Lock()
	l.byTask[id] = append(l.byTask[id], p)
	l.mu.Unlock()
	l.wake()
	return p
}

func (l *lobby) leave(p *place) {
	l.mu.Lock()
	l.byTask[p.id] = slices.DeleteFunc(l.byTask[p.id], func(other *place) bool { return other == p })
	if len(l.byTask[p.id]) == 0 {
		delete(l.byTask, p.id)
	}
	l.mu.Unlock()
	l.asks.Add(-1)
	l.free()
}

// saw notes what the request at p has read.
func (l *lobby) saw(p *place, t *db.Task) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.seen = taskState{t.Status, t.RetryCount, t.UpdatedAt.UnixMicro()}
}

// hint tells that a task was changed by this process and the change is committed. It
// never blocks for long, and costs one atomic read while nobody waits.
func (l *lobby) hint(id uuid.UUID) {
	if l.asks.Load() == 0 {
		return
	}
	l.mu.Lock()
	_, awaited := l.byTask[id]
	if awaited {
		l.hinted[id] = struct{}{}
	}
	l.mu.Unlock()
	if awaited {
		l.wake()
	}
}

func (l *lobby) wake() {
	select {
	case l.poke <- struct{}{}:
	default:
	}
}

// run polls until ctx ends, and only while somebody waits for a task. While PostgreSQL is
// away the requests keep their places.
func (l *lobby) run(ctx context.Context) {
	var next time.Time // when all are to be asked for
	for failures := 0; ; {
		var tick <-chan time.Time
		if l.asks.Load() > 0 {
			tick = time.After(time.Until(next))
		}
		all := false
		select {
		case <-ctx.Done():
			return
		case <-l.poke:
		case <-tick:
			all = true
			next = time.Now().Add(pollInterval)
		}
		ids := l.asked(all)
		if len(ids) == 0 {
			continue
		}
		pause := pollDistance
		if err := l.poll(ctx, ids); err != nil {
			pause = reconnect.delay(failures)
			failures++
		} else {
			failures = 0
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

// asked returns the tasks to ask for: all that are waited for, or those of them that
// were hinted at.
func (l *lobby) asked(all bool) []uuid.UUID {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer clear(l.hinted)
	if all {
		return slices.Collect(maps.Keys(l.byTask))
	}
	return slices.Collect(maps.Keys(l.hinted))
}

// poll asks for the state of tasks, and gives a token to each place that has seen another.
func (l *lobby) poll(ctx context.Context, ids []uuid.UUID) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	rows, err := db.New(l.pool).TaskStates(ctx, ids)
	noteRead(l.note, l.pool, err)
	if err != nil {
		return err
	}
	states := make(map[uuid.UUID]taskState, len(rows))
	for _, r := range rows {
		states[r.TaskID] = taskState{r.Status, r.RetryCount, r.UpdatedAt.UnixMicro()}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		now := states[id] // zero when the row was deleted
		for _, p := range l.byTask[id] {
			if p.seen == now || p.toEnd && now.status != "" && !terminal(now.status) {
				continue
			}
			select {
			case p.changed <- struct{}{}:
			default:
			}
		}
	}
	return nil
}

// noteRead reports the outcome of a read to note, except for a time limit, which may be a
// lock's doing, and drops connections that are from before whatever broke this one.
func noteRead(note func(error), pool *pgxpool.Pool, err error) {
	if broken(err) {
		pool.Reset()
	}
	if !timedOut(err) {
		note(err)
	}
}

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
