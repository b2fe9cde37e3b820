package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

const (
	expirePage   = 500
	forgetAfter  = time.Hour        // a killed process' consumer name is kept this long
	forgetEvery  = time.Minute      // how often such names are looked for
	awayLogEvery = 10 * time.Second // how often it is told at most that PostgreSQL went away
	beatsToTrust = 2                // heartbeat intervals of unbroken access before leases are judged
)

// access keeps account of whether PostgreSQL answers the parts of a worker, since
// when without a break, and logs each change once, though no more often than awayLogEvery:
// one that is full serves some statements and refuses others. After an outage every lease
// looks expired though its worker lives: nobody may judge leases before the workers had
// time to renew them.
type access struct {
	log *slog.Logger
	gap time.Duration // silence longer than this counts as a break: the process was stopped

	mu    sync.Mutex
	away  bool
	told  bool      // that it is away
	at    time.Time // when that was told last
	since time.Time // begin of the unbroken access
	last  time.Time // last good answer

	refused string    // the last refusal that was logged
	crowded time.Time // when it was told last that a statement lost out to others
}

func newAccess(log *slog.Logger, heartbeat time.Duration) *access {
	now := time.Now()
	return &access{log: log, gap: heartbeat, since: now, last: now}
}

// note records how a statement went. One that lost out to other statements says that
// PostgreSQL is there, but also that leases may not have been renewed; one that was
// refused for another reason is an answer.
func (a *access) note(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	switch {
	case crowdedOut(err):
		a.since = now
		if now.Sub(a.crowded) > awayLogEvery {
			a.crowded = now
			a.log.Warn("a statement gave way to another transaction and is repeated; should that go on, pg_blocking_pids names who holds the lock", "err", err)
		}
		return
	case err != nil && !storeAway(err) && !errors.Is(err, context.Canceled):
		if text := err.Error(); text != a.refused {
			a.refused = text
			a.log.Error("postgres refuses a statement", "err", err)
		}
		a.last = now
		return
	case err != nil:
		a.away = true
		if !a.told && now.Sub(a.at) > awayLogEvery {
			a.told, a.at = true, now
			a.log.Warn("postgres away; results are kept until it is back", "err", err)
		}
	case a.away:
		a.away = false
		a.since = now
		if a.told {
			a.told = false
			a.log.Info("postgres back", "down_ms", now.Sub(a.last).Milliseconds())
		}
	case now.Sub(a.last) > a.gap:
		a.since = now
	}
	if err == nil {
		a.last = now
	}
}

// crowdedOut reports whether a statement failed because of others: on a lock it waited
// for too long, or in a deadlock.
func crowdedOut(err error) bool {
	switch sqlState(err) {
	case "40001", "40P01", lockTimedOut:
		return true
	}
	return false
}

// unbroken reports whether PostgreSQL has answered for at least d without a break.
func (a *access) unbroken(d time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	return !a.away && now.Sub(a.last) <= a.gap && now.Sub(a.since) >= d
}

// reclaimer makes work runnable again whose worker died: reap finds rows by their
// lease, scan finds entries by their idle time. Either suffices for safety; a
// lease is never overridden while it lasts.
type reclaimer struct {
	log      *slog.Logger
	cfg      config
	stream   *stream
	queries  *db.Queries
	access   *access
	metrics  *metrics
	inFlight func(message) bool // this process works on the entry
	wake     func()             // the dispatcher has work
}

// armed reports whether leases may be judged.
func (r *reclaimer) armed() bool {
	return r.access.unbroken(beatsToTrust * r.cfg.Lease / 3)
}

// runReaper expires leases every SWEEP_INTERVAL until ctx ends, and twice in a heartbeat interval
// if that is sooner: in an idle worker nobody else may ask, and its silence would count as a break.
func (r *reclaimer) runReaper(ctx context.Context) error {
	for sleep(ctx, min(r.cfg.SweepInterval, r.cfg.Lease/6)) {
		err := r.reap(ctx)
		if ctx.Err() == nil {
			r.access.note(err)
		}
	}
	return nil
}

// reap takes tasks from workers that let their lease pass (T7), page by page. While
// leases may not be judged it only asks whether PostgreSQL answers.
func (r *reclaimer) reap(ctx context.Context) error {
	for {
		rows := int32(expirePage)
		if !r.armed() {
			rows = 0
		}
		limited, cancel := context.WithTimeout(ctx, storeLimit)
		lost, err := r.queries.ExpireTasks(limited, db.ExpireTasksParams{MaxLost: int32(r.cfg.MaxLost), MaxRows: rows})
		cancel()
		if err != nil {
			return fmt.Errorf("expire leases: %w", err)
		}
		for _, t := range lost {
			r.noteLost(t.TaskID, t.Name, t.Status, t.Attempt, t.LostCount)
		}
		if len(lost) > 0 {
			r.wake()
		}
		if len(lost) < expirePage {
			return nil
		}
	}
}

// noteLost counts and logs an attempt whose worker is taken for dead.
func (r *reclaimer) noteLost(id uuid.UUID, name, status string, attempt, lostCount int32) {
	r.metrics.lost.Inc()
	r.log.Warn("worker lost", "task_id", id, "name", name, "attempt", attempt, "lost_count", lostCount, "status", status)
}

// runScanner looks through the pending lists every PEL_SCAN_INTERVAL_S until ctx
// ends, and now and then for the names of dead consumers.
func (r *reclaimer) runScanner(ctx context.Context) error {
	var forgotten time.Time
	for sleep(ctx, r.cfg.PELScanInterval) {
		if !r.stream.up() {
			continue
		}
		forget := time.Since(forgotten) >= forgetEvery
		if forget {
			forgotten = time.Now()
		}
		for _, q := range r.cfg.Queues {
			if err := r.scan(ctx, q.name); err != nil && ctx.Err() == nil {
				r.log.Warn("reclaim put off", "queue", q.name, "err", err)
				break
			}
			if !forget {
				continue
			}
			if n, err := r.stream.forgetConsumers(ctx, q.name, forgetAfter); err != nil {
				r.log.Debug("forget consumers", "queue", q.name, "err", err)
			} else if n > 0 {
				r.log.Info("dead consumers forgotten", "queue", q.name, "count", n)
			}
		}
	}
	return nil
}

// scan settles the entries of a queue that somebody took and then neither dropped
// nor kept: those of dead processes, and those whose delivery was lost on the way to
// this one. It pages to the end, because live entries may fill the first page.
func (r *reclaimer) scan(ctx context.Context, queue string) error {
	for start := "-"; start != ""; {
		idle, next, err := r.stream.idleEntries(ctx, queue, r.cfg.PELIdleThreshold, start)
		if err != nil {
			return err
		}
		start = next
		var ids []string
		for _, e := range idle {
			// The filter is repeated here because not every server applies it to XCLAIM.
			if e.idle >= r.cfg.PELIdleThreshold && !r.inFlight(message{id: e.id, queue: queue}) {
				ids = append(ids, e.id)
				r.log.Info("reclaimed", "msg_id", e.id, "worker", e.consumer, "idle_ms", e.idle.Milliseconds(), "deliveries", e.deliveries)
			}
		}
		if len(ids) == 0 {
			continue
		}
		messages, err := r.stream.take(ctx, queue, ids, r.cfg.PELIdleThreshold)
		if err != nil {
			return err
		}
		r.metrics.reclaimed.Add(float64(len(messages)))
		if err := r.settle(ctx, messages); err != nil {
			return err
		}
	}
	return nil
}

// settle decides in PostgreSQL what becomes of reclaimed entries and drops them. A
// task whose lease lasts is left alone: its row is watched by the reaper, and a
// pending one gets a fresh entry from the dispatcher. A crash before the drop leaves
// the entries under this consumer's name, where the next scan finds them.
func (r *reclaimer) settle(ctx context.Context, messages []message) error {
	ctx, cancel := context.WithTimeout(ctx, 2*storeLimit)
	defer cancel()
	var ids []uuid.UUID
	for _, m := range messages {
		if m.taskID != uuid.Nil {
			ids = append(ids, m.taskID)
		}
	}
	if len(ids) > 0 {
		if r.armed() {
			lost, err := r.queries.ExpireTasksByID(ctx, db.ExpireTasksByIDParams{MaxLost: int32(r.cfg.MaxLost), TaskIDs: ids})
			if err != nil {
				return fmt.Errorf("expire leases: %w", err)
			}
			for _, t := range lost {
				r.noteLost(t.TaskID, t.Name, t.Status, t.Attempt, t.LostCount)
			}
		}
		if _, err := r.queries.UnpublishTasks(ctx, ids); err != nil {
			return fmt.Errorf("unpublish tasks: %w", err)
		}
		r.wake()
	}
	return r.stream.drop(ctx, messages)
}
