package main

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	maxPlaces = 1000 // requests that wait at once: long polls and streams together

	pollInterval = 200 * time.Millisecond
	pollDistance = 10 * time.Millisecond // between two polls, however many hints come
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

func newTaskState(status string, retryCount int32, updated time.Time) taskState {
	return taskState{status, retryCount, updated.UnixMicro()}
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
	p.seen = newTaskState(t.Status, t.RetryCount, t.UpdatedAt)
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
	notePoll(l.note, l.pool, err)
	if err != nil {
		return err
	}
	states := make(map[uuid.UUID]taskState, len(rows))
	for _, r := range rows {
		states[r.TaskID] = newTaskState(r.Status, r.RetryCount, r.UpdatedAt)
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

// notePoll reports the outcome of a poll to note, except for a time limit, which may be a
// lock's doing, and drops connections that are from before whatever broke this one.
func notePoll(note func(error), pool *pgxpool.Pool, err error) {
	if broken(err) {
		pool.Reset()
	}
	if !timedOut(err) {
		note(err)
	}
}
