package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

const (
	// directAfter is how long Redis must be away before workers take due tasks
	// straight from the table.
	directAfter = 3 * time.Second
	dropBatch   = 512
	// killGrace is what handlers get after SHUTDOWN_GRACE to end when told to, and
	// stopGrace what is left in all for handing their tasks back: two seconds with all that follows.
	killGrace = 1200 * time.Millisecond
	stopGrace = 1700 * time.Millisecond
)

// worker takes messages, claims their tasks, runs handlers in a fixed number of
// slots, and records what came of it. Its loops (read, beat, watch and the two
// batchers) are started by main; everything else happens inside them.
type worker struct {
	log      *slog.Logger
	cfg      config
	claims   *db.Queries // on the pool for claims
	leases   *db.Queries // on the pool that HTTP traffic cannot starve
	stream   *stream
	handlers *handlerTable
	access   *access
	metrics  *metrics
	retryIn  func(time.Duration)   // a retry of this process falls due
	changed  func(uuid.UUID)       // a task's change by this worker is committed
	refused  func(context.Context) // claims were refused because a queue is paused

	slots    chan struct{} // one token per free slot
	outcomes *batcher[outcome]
	locked   *batcher[outcome] // outcomes whose row somebody holds locked
	drops    *batcher[message]
	handling sync.WaitGroup // handler goroutines

	storing     context.Context // ends when outcomes that are not stored are given up
	stopStoring context.CancelFunc

	mu      sync.Mutex
	held    map[uuid.UUID]*attempt // claimed, outcome not stored
	entries map[message]struct{}   // delivered, not dropped
}

func newWorker(log *slog.Logger, cfg config, claims, leases *db.Queries, s *stream, h *handlerTable, a *access, m *metrics) *worker {
	w := &worker{
		log:      log,
		cfg:      cfg,
		claims:   claims,
		leases:   leases,
		stream:   s,
		handlers: h,
		access:   a,
		metrics:  m,
		retryIn:  func(time.Duration) {},
		changed:  func(uuid.UUID) {},
		refused:  func(context.Context) {},
		slots:    make(chan struct{}, cfg.WorkerConcurrency),
		held:     make(map[uuid.UUID]*attempt),
		entries:  make(map[message]struct{}),
	}
	w.storing, w.stopStoring = context.WithCancel(context.Background())
	w.release(cfg.WorkerConcurrency)
	m.workers.Set(float64(cfg.WorkerConcurrency))
	w.outcomes = newBatcher(outcomeBatch, w.store)
	w.locked = newBatcher(outcomeBatch, w.storeLocked)
	w.drops = newBatcher(dropBatch, w.flushDrops)
	return w
}

// read takes messages and starts their tasks until ctx ends. It reads no more
// than there are free slots, so that a message never waits behind a long task here
// while another process idles.
func (w *worker) read(ctx context.Context) error {
	for failures := 0; ; {
		free := w.acquire(ctx)
		if free == 0 {
			return nil
		}
		var messages []message
		var err error
		used := 0
		if w.stream.downFor() > directAfter {
			used = w.takeDue(free)
		}
		if used == 0 {
			messages, err = w.stream.next(ctx, free)
			used = len(messages)
		}
		w.release(free - used)
		if len(messages) > 0 {
			w.take(ctx, messages)
		}
		if err == nil {
			failures = 0
			continue
		}
		w.log.Debug("read stream", "err", err)
		if !sleep(ctx, reconnect.delay(failures)) {
			return nil
		}
		failures++
	}
}

// acquire waits for a free slot, takes all that are free and returns how many:
// 0 only when ctx has ended.
func (w *worker) acquire(ctx context.Context) int {
	if ctx.Err() != nil {
		return 0
	}
	select {
	case <-ctx.Done():
		return 0
	case <-w.slots:
	}
	for n := 1; ; n++ {
		select {
		case <-w.slots:
		default:
			return n
		}
	}
}

func (w *worker) release(n int) {
	for range n {
		w.slots <- struct{}{}
	}
}

// take claims the tasks of messages and starts them; each message holds a slot.
// Nothing is dropped before PostgreSQL answered: while it is away the messages wait
// here, and reading with them. When ctx ends first they are given back.
func (w *worker) take(ctx context.Context, messages []message) {
	w.enter(messages)
	if ctx.Err() != nil { // delivered while the shutdown began
		w.giveBack(messages)
		return
	}
	byTask := make(map[uuid.UUID]message, len(messages))
	ids := make([]uuid.UUID, 0, len(messages))
	for _, m := range messages {
		if _, copied := byTask[m.taskID]; m.taskID == uuid.Nil || copied {
			continue
		}
		byTask[m.taskID] = m
		ids = append(ids, m.taskID)
	}
	for failures := 0; len(ids) > 0; failures++ {
		asked := time.Now()
		rows, err := w.claimEach(ctx, ids)
		w.access.note(err)
		for _, r := range rows {
			w.start(r, byTask[r.TaskID], asked)
		}
		messages = unclaimed(messages, rows)
		if err == nil {
			break
		}
		ids = without(ids, rows)
		if !sleep(ctx, reconnect.delay(failures)) {
			w.giveBack(messages)
			return
		}
	}
	if !w.unpublishRefused(ctx, messages) {
		w.giveBack(messages)
		return
	}
	// Whatever no row came back for is taken, done, not due, unknown, a copy, or unpublished.
	w.countUnknown(messages)
	for _, m := range messages {
		w.drop(m)
	}
	w.release(len(messages))
}

// countUnknown counts those messages that name a task which is not in the table. Entries are
// added after the commit, so these tell of commits that were lost, as in a failover. It
// costs a statement, but only where claims were refused.
func (w *worker) countUnknown(messages []message) {
	var ids []uuid.UUID
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			ids = append(ids, m.taskID)
		}
	}
	if len(ids) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	rows, err := w.claims.TasksByID(ctx, ids)
	if err != nil {
		w.log.Debug("look for unclaimed tasks", "count", len(ids), "err", err)
		return
	}
	for _, id := range ids {
		if !slices.ContainsFunc(rows, func(r db.TasksByIDRow) bool { return r.TaskID == id }) {
			w.metrics.unknown.Inc()
		}
	}
}

// claimEach claims tasks in one statement, and in smaller ones when PostgreSQL refuses
// one of them for what it holds: it alone is then left out and told of. An error means
// that PostgreSQL is away; what was claimed before comes with it.
func (w *worker) claimEach(ctx context.Context, ids []uuid.UUID) ([]db.ClaimTasksRow, error) {
	rows, err := w.claim(ctx, ids)
	switch {
	case err == nil || storeAway(err) || errors.Is(err, context.Canceled):
		return rows, err
	case len(ids) == 1:
		w.log.Error("task cannot be claimed", "task_id", ids[0], "err", err)
		return nil, nil
	}
	half := len(ids) / 2
	rows, err = w.claimEach(ctx, ids[:half])
	if err != nil {
		return rows, err
	}
	more, err := w.claimEach(ctx, ids[half:])
	return append(rows, more...), err
}

// without returns ids less those of rows.
func without(ids []uuid.UUID, rows []db.ClaimTasksRow) []uuid.UUID {
	return slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool {
		return slices.ContainsFunc(rows, func(r db.ClaimTasksRow) bool { return r.TaskID == id })
	})
}

// claim is one claim statement (T2). It has a deadline of its own and outlives
// ctx: a claim that commits unseen costs its tasks a lease.
func (w *worker) claim(ctx context.Context, ids []uuid.UUID) ([]db.ClaimTasksRow, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
	defer cancel()
	w.metrics.claimRows.Observe(float64(len(ids)))
	args := db.ClaimTasksParams{LeaseMS: w.cfg.Lease.Milliseconds(), Worker: w.cfg.ConsumerName, TaskIDs: ids}
	rows, err := w.claims.ClaimTasks(ctx, args)
	if crowdedOut(err) { // somebody holds one of the rows, which must not hold up the others
		var unlocked []db.ClaimUnlockedTasksRow
		unlocked, err = w.claims.ClaimUnlockedTasks(ctx, db.ClaimUnlockedTasksParams(args))
		for _, r := range unlocked {
			rows = append(rows, db.ClaimTasksRow(r))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("claim: %w", err)
	}
	return rows, nil
}

// unclaimed returns the messages that started no task: of several copies, all but
// the first.
func unclaimed(messages []message, rows []db.ClaimTasksRow) []message {
	claimed := make(map[uuid.UUID]bool, len(rows))
	for _, r := range rows {
		claimed[r.TaskID] = true
	}
	var rest []message
	for _, m := range messages {
		if claimed[m.taskID] {
			claimed[m.taskID] = false
			continue
		}
		rest = append(rest, m)
	}
	return rest
}

// takeDue claims up to free due tasks without the stream and starts them: while
// Redis is away work goes on. It returns how many slots it filled. Entries of
// these tasks that turn up later are refused by the claim and dropped.
func (w *worker) takeDue(free int) int {
	queues := make([]string, len(w.cfg.Queues))
	for i, q := range w.cfg.Queues {
		queues[i] = q.name
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeLimit)
	defer cancel()
	asked := time.Now()
	rows, err := w.claims.ClaimDueTasks(ctx, db.ClaimDueTasksParams{
		LeaseMS: w.cfg.Lease.Milliseconds(),
		Worker:  w.cfg.ConsumerName,
		Queues:  queues,
		MaxRows: int32(free),
	})
	w.access.note(err)
	for _, r := range rows {
		w.start(db.ClaimTasksRow(r), message{}, asked)
	}
	return len(rows)
}

// giveBack returns messages that were delivered but not claimed, at shutdown: their
// tasks get a fresh entry for somebody else (T9), then these are dropped. When
// PostgreSQL does not answer they stay pending, for the reclaimer.
func (w *worker) giveBack(messages []message) {
	ctx, cancel := context.WithTimeout(context.Background(), killGrace)
	defer cancel()
	var entries []entry
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			entries = append(entries, entry{m.taskID, m.queue})
		}
	}
	err := unpublish(ctx, w.leases, entries)
	for _, m := range messages {
		if err == nil {
			w.drop(m)
		} else {
			w.forget(m)
		}
	}
	w.release(len(messages))
}

// enter notes that this process works on messages; inFlight is what the reclaimer
// asks before it takes an idle one.
func (w *worker) enter(messages []message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range messages {
		w.entries[message{id: m.id, queue: m.queue}] = struct{}{}
	}
}

func (w *worker) forget(m message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.entries, message{id: m.id, queue: m.queue})
}

func (w *worker) inFlight(m message) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.entries[message{id: m.id, queue: m.queue}]
	return ok
}

// drop hands a message to the batcher that acknowledges; a task that was claimed
// without the stream has none. It never blocks: when Redis is slow, what finds the
// queue full is left to the reclaimer, so that no outcome waits for Redis.
func (w *worker) drop(m message) {
	if m.id == "" {
		return
	}
	select {
	case w.drops.queue <- m:
	default:
		w.forget(m)
	}
}

// flushDrops acknowledges and deletes entries. What Redis refuses stays pending and is
// dropped by the reclaimer, whose claim on it the row refuses.
func (w *worker) flushDrops(ctx context.Context, messages []message) {
	if err := w.stream.drop(ctx, messages); err != nil {
		w.log.Debug("drop entries", "count", len(messages), "err", err)
	}
	for _, m := range messages {
		w.forget(m)
	}
}

// drain is the second half of a shutdown, after read has returned. It lets handlers
// finish until deadline, tells the rest to end, and hands their tasks back. It
// returns when every outcome is stored, or stopGrace after deadline; what is not stored by
// then is found through its lease.
func (w *worker) drain(deadline time.Time) {
	defer w.stopStoring()
	idle := make(chan struct{})
	go func() {
		w.handling.Wait()
		close(idle)
	}()
	if !doneBefore(idle, deadline) {
		cut := w.each(func(a *attempt) bool { return a.cancel(errShutdown) })
		w.log.Warn("handlers cut short by shutdown", "count", cut)
		if !doneBefore(idle, deadline.Add(killGrace)) {
			left := w.each((*attempt).abandon)
			w.log.Error("handlers ignored the end of their context", "count", left)
		}
	}
	for time.Now().Before(deadline.Add(stopGrace)) && w.each(func(*attempt) bool { return true }) > 0 {
		time.Sleep(5 * time.Millisecond)
	}
	if left := w.each(func(*attempt) bool { return true }); left > 0 {
		w.log.Error("outcomes not stored before the end", "count", left)
	}
}

// holding returns the attempts whose outcome is not stored, in no order.
func (w *worker) holding() []*attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]*attempt, 0, len(w.held))
	for _, a := range w.held {
		all = append(all, a)
	}
	return all
}

// each calls f for every held attempt and returns how often it said true.
func (w *worker) each(f func(*attempt) bool) int {
	n := 0
	for _, a := range w.holding() {
		if f(a) {
			n++
		}
	}
	return n
}
