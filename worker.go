package main

import (
	"context"
	"log/slog"
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
	turn     turn          // of claims and outcomes
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
		turn:     newTurn(),
		held:     make(map[uuid.UUID]*attempt),
		entries:  make(map[message]struct{}),
	}
	w.storing, w.stopStoring = context.WithCancel(context.Background())
	w.release(cfg.WorkerConcurrency)
	m.workers.Set(float64(cfg.WorkerConcurrency))
	w.outcomes = newBatcher(outcomeBatch, w.store)
	w.outcomes.turn = w.turn
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
