package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	figureAge = time.Second // how long a figure is kept at least

	recordLimit = 900 * time.Millisecond // a check of PostgreSQL, less than scrapeLimit
	endedLimit  = 30 * time.Second       // a count of the whole table; PostgreSQL gives up then

	// However often figures are asked for, counting the open tasks takes a tenth of one
	// connection's time, and counting the ended ones a fiftieth.
	openRest  = 10
	endedRest = 50
)

var errCounting = errors.New("count: not done yet")

// A figure is something counted on demand. All who ask while a count is under way share it. Its
// result is kept for rest times what counting took; a failure only for figureAge, unless
// PostgreSQL gave up because there is too much to count.
type figure[T any] struct {
	log       *slog.Logger
	name      string
	base      context.Context // ends every count
	count     func(context.Context) (T, error)
	limit     time.Duration // the longest count
	rest      time.Duration // how many times what it took
	mu        sync.Mutex
	running   chan struct{} // closed when the count under way ends; nil if none is
	value     T
	at        time.Time // when the count of value began; zero before the first
	err       error
	keepUntil time.Time
}

// get returns the value and when counting it began. It waits for a count until ctx ends and
// then returns what was known before, or errCounting.
func (f *figure[T]) get(ctx context.Context) (T, time.Time, error) {
	f.mu.Lock()
	if f.running == nil && !time.Now().Before(f.keepUntil) {
		f.running = make(chan struct{})
		go f.run(f.running)
	}
	running := f.running
	f.mu.Unlock()
	if running != nil {
		select {
		case <-running:
		case <-ctx.Done():
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.at.IsZero() {
		return f.value, f.at, errCounting
	}
	return f.value, f.at, f.err
}

func (f *figure[T]) run(done chan struct{}) {
	defer close(done)
	ctx, cancel := context.WithTimeout(f.base, f.limit)
	defer cancel()
	began := time.Now()
	value, err := f.count(ctx)
	took := time.Since(began)
	keep := figureAge
	if err == nil || sqlState(err) == tookTooLong {
		keep = max(keep, f.rest*took)
	}
	if err != nil {
		f.log.Debug("count", "figure", f.name, "took_ms", took.Milliseconds(), "err", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = nil
	f.value, f.at, f.err = value, began, err
	f.keepUntil = began.Add(took + keep)
}

// wait returns when no count is under way.
func (f *figure[T]) wait() {
	f.mu.Lock()
	running := f.running
	f.mu.Unlock()
	if running != nil {
		<-running
	}
}

// openTasks are the counts of tasks that have not ended, and for how long the longest
// waiting one of them has been due.
type openTasks struct {
	db.CountOpenTasksRow
	oldest time.Duration
}

// taskFigures are the counts of tasks by status.
type taskFigures struct {
	open     openTasks
	err      error // of everything
	ended    db.CountEndedTasksRow
	endedErr error     // of ended
	at       time.Time // when the older one was counted
}

// A census counts the tasks and entries of the installation for /stats and /metrics. Of each
// figure at most one count is under way, and so at most one connection busy.
type census struct {
	pools    *pools
	base     context.Context
	stop     context.CancelFunc
	streamUp func() bool

	record *figure[struct{}] // whether PostgreSQL is there
	open   *figure[openTasks]
	ended  *figure[db.CountEndedTasksRow]
	depth  *figure[streamDepth]
}

func newCensus(log *slog.Logger, p *pools, h hints, queues []string, check func(context.Context) error) *census {
	c := &census{pools: p, streamUp: h.up}
	c.base, c.stop = context.WithCancel(context.Background())
	c.record = &figure[struct{}]{log: log, name: "record", base: c.base, limit: recordLimit, count: func(ctx context.Context) (struct{}, error) {
		return struct{}{}, check(ctx)
	}}
	c.open = &figure[openTasks]{log: log, name: "open", base: c.base, limit: readLimit, rest: openRest, count: c.countOpen}
	c.ended = &figure[db.CountEndedTasksRow]{log: log, name: "ended", base: c.base, limit: endedLimit + time.Second, rest: endedRest, count: c.countEnded}
	c.depth = &figure[streamDepth]{log: log, name: "depth", base: c.base, limit: commandLimit, count: func(ctx context.Context) (streamDepth, error) {
		return h.depth(ctx, queues)
	}}
	return c
}

// close ends the counts that are under way, and waits for them. Nothing may be asked afterwards.
func (c *census) close() {
	c.stop()
	c.record.wait()
	c.open.wait()
	c.ended.wait()
	c.depth.wait()
}

// tasks returns both counts of tasks as far as they are known, with the error of each.
// While PostgreSQL is away nothing is: old figures would hide it.
func (c *census) tasks(ctx context.Context) (t taskFigures) {
	if _, _, t.err = c.record.get(ctx); t.err != nil {
		return t
	}
	var at time.Time
	if t.open, t.at, t.err = c.open.get(ctx); t.err != nil {
		return t // the other count would fail too, and is costlier
	}
	if t.ended, at, t.endedErr = c.ended.get(ctx); at.Before(t.at) {
		t.at = at
	}
	return t
}

func (c *census) countOpen(ctx context.Context) (open openTasks, err error) {
	err = c.ask(ctx, func(q *db.Queries) error {
		if open.CountOpenTasksRow, err = q.CountOpenTasks(ctx); err != nil {
			return err
		}
		ms, err := q.BacklogAge(ctx)
		open.oldest = max(0, time.Duration(ms)*time.Millisecond)
		return err
	})
	return open, err
}

// countEnded reads the whole table, which may take longer than any other statement.
func (c *census) countEnded(ctx context.Context) (ended db.CountEndedTasksRow, err error) {
	err = c.ask(ctx, func(q *db.Queries) error {
		if err := q.AllowTime(ctx, endedLimit.Milliseconds()); err != nil {
			return err
		}
		ended, err = q.CountEndedTasks(ctx)
		return err
	})
	return ended, err
}

// ask runs statements in a transaction. A connection that broke, as all do when PostgreSQL
// restarts, is replaced once.
func (c *census) ask(ctx context.Context, statements func(*db.Queries) error) error {
	inTx := func(tx pgx.Tx) error { return statements(db.New(tx)) }
	err := pgx.BeginFunc(ctx, c.pools.api, inTx)
	if broken(err) && ctx.Err() == nil {
		c.pools.api.Reset()
		err = pgx.BeginFunc(ctx, c.pools.api, inTx)
	}
	return err
}

// statsLimit is how long /stats waits for a count: a moment more than that of the open tasks takes.
const statsLimit = readLimit + time.Second

// stats answers GET /stats. Without Redis the queue is null; without PostgreSQL there is
// nothing to tell. A count of the ended tasks that takes too long is answered with the one
// before; only if there was none yet is that a 503.
func (s *server) stats(w http.ResponseWriter, r *http.Request) {
	if err := noQuery(r.URL); err != nil {
		s.fail(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), statsLimit)
	defer cancel()
	t := s.census.tasks(ctx)
	if err := cmp.Or(t.err, t.endedErr); err != nil {
		s.fail(w, r, err)
		return
	}
	b := strconv.AppendInt([]byte(`{"tasks":{"pending":`), t.open.Pending, 10)
	b = strconv.AppendInt(append(b, `,"processing":`...), t.open.Processing, 10)
	b = strconv.AppendInt(append(b, `,"completed":`...), t.ended.Completed, 10)
	b = strconv.AppendInt(append(b, `,"failed":`...), t.ended.Failed, 10)
	b = strconv.AppendInt(append(b, `,"cancelled":`...), t.ended.Cancelled, 10)
	b = append(b, `},"queue":`...)
	if depth, _, err := s.census.depth.get(ctx); err == nil {
		b = appendString(append(b, `{"stream":`...), s.cfg.StreamName)
		b = appendString(append(b, `,"group":`...), s.cfg.ConsumerGroup)
		b = strconv.AppendInt(append(b, `,"length":`...), depth.length, 10)
		b = strconv.AppendInt(append(b, `,"pending":`...), depth.pending, 10)
		b = strconv.AppendInt(append(b, `,"lag":`...), depth.lag(), 10)
		b = strconv.AppendInt(append(b, `,"consumers":`...), int64(depth.consumers), 10)
		b = append(b, '}')
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendFloat(append(b, `,"oldest_pending_seconds":`...), t.open.oldest.Seconds(), 'f', -1, 64)
	b = appendTime(append(b, `,"timestamp":`...), &t.at)
	writeBody(w, http.StatusOK, "application/json", append(b, '}'))
}
