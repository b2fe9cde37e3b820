package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	feedRows   = 500     // tasks that one look takes from each place, and that one read asks for
	feedEvents = 4096    // events that are kept for streams that come back
	feedBytes  = 8 << 20 // and what they may hold
	feedHints  = 4096    // changes of this process that wait for the next look

	// feedLinger is how long the feed goes on when nobody follows it, for clients
	// that come back.
	feedLinger = 30 * time.Second

	// feedBreak is the silence after which it is not known what happened meanwhile.
	feedBreak = 5 * time.Second

	// feedMemory is for how long the state of a task that is out of sight is
	// remembered: as long as LiveTasks calls a change recent.
	feedMemory = 10 * time.Second
)

// A change is one event of the feed.
type change struct {
	name   string
	status string
	data   []byte // the task as lists show it
}

// A feed follows the changes of all tasks for the streams of this process: one loop, and
// none while nobody follows. No index holds the order of changes, because it would cost every task
// three entries; instead the feed looks every pollInterval where changes come from (LiveTasks), and
// reads again by id what it saw there before and sees no more. So it shows the latest state at each look, and may
// miss a task that it never saw before its end: one that a worker of another process ran within
// one interval, and that neither stood among the first feedRows of its queue nor was submitted
// within the last minute among the latest feedRows.
type feed struct {
	pool   *pgxpool.Pool
	note   func(error) // is told of each read's error or nil
	life   string      // tells this feed from those of other processes, in event ids
	poke   chan struct{}
	active atomic.Bool

	// Only run uses these.
	known  map[uuid.UUID]*sighting
	looks  int
	lookAt time.Time // the last successful look

	mu        sync.Mutex
	followers int
	left      time.Time     // when the last follower went
	ready     bool          // what changes from now on is seen
	grown     chan struct{} // is closed when there is more to read, or the feed is ready
	events    []change      // the latest, oldest first
	size      int           // of their data
	last      uint64        // number of the newest event; numbers have no gaps but where something may be missing
	hinted    map[uuid.UUID]struct{}
}

// A sighting is what the feed knows of a task.
type sighting struct {
	state taskState
	at    time.Time // when this state was first seen
	look  int       // the last look that saw the task
	read  int       // the last look after which it was read by its id
	gone  bool      // it was read after it had gone out of sight, and does not run
}

func newFeed(pool *pgxpool.Pool, note func(error)) *feed {
	return &feed{
		pool:   pool,
		note:   note,
		life:   rand.Text()[:8],
		poke:   make(chan struct{}, 1),
		grown:  make(chan struct{}),
		hinted: make(map[uuid.UUID]struct{}),
	}
}

// follow keeps the feed going until unfollow.
func (f *feed) follow() {
	f.mu.Lock()
	f.followers++
	f.mu.Unlock()
	select {
	case f.poke <- struct{}{}:
	default:
	}
}

func (f *feed) unfollow() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.followers--
	f.left = time.Now()
}

// hint tells that this process has changed a task. It costs one atomic read while nobody follows.
func (f *feed) hint(id uuid.UUID) {
	if !f.active.Load() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.hinted) < feedHints {
		f.hinted[id] = struct{}{}
	}
}

// run looks for changes until ctx ends, while somebody follows.
func (f *feed) run(ctx context.Context) {
	for failures := 0; ; {
		if !f.wanted() {
			select {
			case <-ctx.Done():
				return
			case <-f.poke:
				continue
			}
		}
		pause := pollInterval
		err := f.look(ctx)
		notePoll(f.note, f.pool, err)
		if err != nil {
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

// wanted reports whether somebody follows or may come back; if not, the feed forgets.
func (f *feed) wanted() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	wanted := f.followers > 0 || f.ready && time.Since(f.left) < feedLinger
	f.active.Store(wanted)
	if !wanted {
		f.ready, f.known = false, nil
		f.events, f.size = nil, 0
		clear(f.hinted)
	}
	return wanted
}

// look publishes what has changed since the last look.
func (f *feed) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	now := time.Now()
	rows, err := db.New(f.pool).LiveTasks(ctx, db.LiveTasksParams{
		MaxRows: feedRows,
		FromID:  firstID(now.Add(-time.Minute)),
		ToID:    firstID(now.Add(time.Minute)), // clocks differ
	})
	if err != nil {
		return err
	}
	f.looks++
	if f.known == nil || now.Sub(f.lookAt) > feedBreak {
		f.begin(rows, now)
		return nil
	}
	ids := f.suspects(rows, now)
	for page := range slices.Chunk(ids, feedRows) {
		if err := f.read(ctx, page, now); err != nil {
			for _, id := range ids { // those that were hinted at would be forgotten
				f.hint(id)
			}
			return err
		}
	}
	f.lookAt = now
	for id, k := range f.known {
		if k.gone && now.Sub(k.at) > feedMemory {
			delete(f.known, id)
		}
	}
	return nil
}

// begin takes what is there for known. Whoever followed before may have missed something.
func (f *feed) begin(rows []db.LiveTasksRow, now time.Time) {
	f.lookAt = now
	f.known = make(map[uuid.UUID]*sighting, len(rows))
	for _, r := range rows {
		f.known[r.TaskID] = &sighting{state: newTaskState(r.Status, r.RetryCount, r.UpdatedAt), at: now, look: f.looks}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events, f.size = nil, 0
	f.last++
	f.ready = true
	f.tell()
}

// suspects returns the tasks that have changed or may have: those that look different
// or are new, those that are out of sight now, and those that were hinted at.
func (f *feed) suspects(rows []db.LiveTasksRow, now time.Time) []uuid.UUID {
	f.mu.Lock()
	hinted := f.hinted
	f.hinted = make(map[uuid.UUID]struct{})
	f.mu.Unlock()
	ids := make([]uuid.UUID, 0, len(hinted))
	for _, r := range rows {
		state := newTaskState(r.Status, r.RetryCount, r.UpdatedAt)
		k := f.known[r.TaskID]
		if k == nil {
			k = &sighting{state: state, at: now}
			if r.Recent {
				k.state = taskState{}
			}
			f.known[r.TaskID] = k
		}
		if k.state != state && k.look != f.looks {
			ids = append(ids, r.TaskID)
			delete(hinted, r.TaskID)
		}
		k.look, k.gone = f.looks, false
	}
	for id, k := range f.known {
		if k.look == f.looks || k.gone {
			continue
		}
		// Tasks may go on running out of sight, when there are more than one look takes. So
		// one is read when it has gone out of sight, and then once a second.
		if k.read > k.look && f.looks-k.read < int(time.Second/pollInterval) {
			continue
		}
		ids = append(ids, id)
		delete(hinted, id)
	}
	for id := range hinted {
		ids = append(ids, id)
	}
	return ids
}

// read reads tasks and publishes those that are not as they are known.
func (f *feed) read(ctx context.Context, ids []uuid.UUID, now time.Time) error {
	rows, err := db.New(f.pool).TaskSummaries(ctx, ids)
	if err != nil {
		return err
	}
	// In the order in which they changed, as far as that is known.
	slices.SortFunc(rows, func(a, b db.TaskSummariesRow) int { return a.UpdatedAt.Compare(b.UpdatedAt) })
	unread := make(map[uuid.UUID]bool, len(ids))
	for _, id := range ids {
		unread[id] = true
	}
	var changes []change
	for i := range rows {
		r := &rows[i]
		delete(unread, r.TaskID)
		state := newTaskState(r.Status, r.RetryCount, r.UpdatedAt)
		k := f.known[r.TaskID]
		if k == nil {
			k = new(sighting)
			f.known[r.TaskID] = k
		}
		if k.state != state {
			k.state, k.at = state, now
			t := listed(db.ListTasksRow(*r))
			changes = append(changes, change{r.Name, r.Status, appendSummary(nil, &t)})
		}
		k.read = f.looks
		k.gone = k.look != f.looks && r.Status != statusProcessing
	}
	for id := range unread { // deleted
		delete(f.known, id)
	}
	f.publish(changes)
	return nil
}

// publish adds events. When they are more than is kept it drops the oldest quarter: streams
// read slices of the rest, so each time it is copied.
func (f *feed) publish(changes []change) {
	if len(changes) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range changes {
		f.events = append(f.events, c)
		f.size += len(c.data)
		f.last++
	}
	if len(f.events) > feedEvents || f.size > feedBytes {
		drop := 0
		for len(f.events)-drop > feedEvents*3/4 || f.size > feedBytes*3/4 {
			f.size -= len(f.events[drop].data)
			drop++
		}
		f.events = slices.Clone(f.events[drop:])
	}
	f.tell()
}

// tell wakes the streams; f.mu is held.
func (f *feed) tell() {
	close(f.grown)
	f.grown = make(chan struct{})
}

// A page of the feed is what a stream reads next.
type feedPage struct {
	changes []change // none to be changed
	last    uint64   // number of the last of them
	gap     bool     // some before them are not kept any more, or were not seen
	ready   bool     // the feed sees changes
	grown   <-chan struct{}
}

// after returns what came after the event of that number, at most limit events.
func (f *feed) after(number uint64, limit int) feedPage {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := feedPage{last: number, ready: f.ready, grown: f.grown}
	if !f.ready {
		return p
	}
	before := f.last - uint64(len(f.events)) // the number before the first that is kept
	if number < before || number > f.last {
		p.gap = true
		number = before
	}
	from := int(number - before)
	to := min(len(f.events), from+limit)
	p.changes = f.events[from:to:to]
	p.last = before + uint64(to)
	return p
}

// newest returns the number of the newest event.
func (f *feed) newest() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// eventID names an event in a stream.
func (f *feed) eventID(number uint64) string {
	return f.life + "-" + strconv.FormatUint(number, 10)
}

// number returns the number of an event of this process' feed.
func (f *feed) number(eventID string) (uint64, bool) {
	life, text, _ := strings.Cut(eventID, "-")
	n, err := strconv.ParseUint(text, 10, 64)
	return n, err == nil && life == f.life
}

// firstID returns the smallest UUID of version 7 that is made at t.
func firstID(t time.Time) (id uuid.UUID) {
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(t.UnixMilli()))
	copy(id[:6], ms[2:])
	id[6], id[8] = 0x70, 0x80
	return id
}
