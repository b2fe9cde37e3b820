package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	figureAge = time.Second // how long a figure is kept at least

	recordLimit = 900 * time.Millisecond // a check of PostgreSQL, less than scrapeLimit
	endedLimit  = 30 * time.Second       // a count of the whole table; PostgreSQL gives up then

	// However often figures are asked for, counting the open tasks takes a tenth of one
	// connection's time, and counting the ended ones, or those of each queue, a fiftieth.
	openRest  = 10
	endedRest = 50
	queueRest = 50

	maxCounted = 1_000_000 // where each count of tasks that have not ended stops
)

var (
	errCounting = errors.New("count: not done yet")
	errNoRoom   = errors.New("count: too few connections are free")
)

// A figure is something counted on demand. All who ask while a count is under way share it. Its
// result is kept for rest times what counting took; a failure only for figureAge, unless
// PostgreSQL gave up because there is too much to count. A count that fails leaves the value as it was.
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
	at        time.Time // when the count of value began; zero before the first that succeeded
	err       error     // of the last count
	keepUntil time.Time
}

// get returns the value of the last count that succeeded and when that began, and why the last
// count failed if it did: the value is then an older one, or none if the time is zero. It waits for
// a count until ctx ends and then returns what was known before, or errCounting. Once ctx
// has ended it begins no count.
func (f *figure[T]) get(ctx context.Context) (T, time.Time, error) {
	f.mu.Lock()
	if f.running == nil && ctx.Err() == nil && !time.Now().Before(f.keepUntil) {
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
	if f.at.IsZero() && f.err == nil {
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
	if f.err = err; err == nil {
		f.value, f.at = value, began
	}
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

// taskFigures are the counts of tasks by status, and for how long the longest waiting one has
// been due. Beside an error stands what the count before said.
type taskFigures struct {
	oldest    time.Duration
	open      db.CountOpenTasksRow
	ended     db.CountEndedTasksRow
	oldestErr error
	openErr   error
	endedErr  error
	at        time.Time // when the oldest of the three counts began; zero if one is missing
}

// A census counts the tasks and entries of the installation for /stats and /metrics. Of each
// figure at most one count is under way, and so at most one connection busy.
type census struct {
	pools *pools
	hints hints
	names []string // of the queues that this process knows
	base  context.Context
	stop  context.CancelFunc

	record *figure[struct{}]      // whether PostgreSQL is there
	oldest *figure[time.Duration] // for how long the longest waiting due task has been due
	open   *figure[db.CountOpenTasksRow]
	ended  *figure[db.CountEndedTasksRow]
	queues *figure[[]db.QueueDepthsRow]
	depth  *figure[streamDepth]
}

func newCensus(log *slog.Logger, p *pools, h hints, queues []string, check func(context.Context) error) *census {
	c := &census{pools: p, hints: h, names: queues}
	c.base, c.stop = context.WithCancel(context.Background())
	c.record = &figure[struct{}]{log: log, name: "record", base: c.base, limit: recordLimit, count: func(ctx context.Context) (struct{}, error) {
		return struct{}{}, check(ctx)
	}}
	c.oldest = &figure[time.Duration]{log: log, name: "oldest", base: c.base, limit: readLimit, rest: openRest, count: c.countOldest}
	c.open = &figure[db.CountOpenTasksRow]{log: log, name: "open", base: c.base, limit: readLimit, rest: openRest, count: c.countOpen}
	c.ended = &figure[db.CountEndedTasksRow]{log: log, name: "ended", base: c.base, limit: endedLimit + time.Second, rest: endedRest, count: c.countEnded}
	c.queues = &figure[[]db.QueueDepthsRow]{log: log, name: "queues", base: c.base, limit: readLimit, rest: queueRest, count: c.countQueues}
	c.depth = &figure[streamDepth]{log: log, name: "depth", base: c.base, limit: commandLimit, count: func(ctx context.Context) (streamDepth, error) {
		return c.hints.depth(ctx, c.names)
	}}
	return c
}

// close ends the counts that are under way, and waits for them. Nothing may be asked afterwards.
func (c *census) close() {
	c.stop()
	c.record.wait()
	c.oldest.wait()
	c.open.wait()
	c.ended.wait()
	c.queues.wait()
	c.depth.wait()
}

// tasks returns the counts of tasks as far as they are known, with the error of each. While
// PostgreSQL is away nothing is: old figures would hide it.
func (c *census) tasks(ctx context.Context) (t taskFigures) {
	if _, _, err := c.record.get(ctx); err != nil {
		return taskFigures{oldestErr: err, openErr: err, endedErr: err}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var at [3]time.Time
	if t.oldest, at[0], t.oldestErr = c.oldest.get(ctx); t.oldestErr != nil {
		cancel() // the other counts would fail too, and are costlier: what is known of them must do
	}
	if t.open, at[1], t.openErr = c.open.get(ctx); t.openErr != nil {
		cancel()
	}
	t.ended, at[2], t.endedErr = c.ended.get(ctx)
	t.at = slices.MinFunc(at[:], time.Time.Compare)
	return t
}

func (c *census) countOldest(ctx context.Context) (oldest time.Duration, err error) {
	err = ask(ctx, c.pools.api, func(q *db.Queries) error {
		ms, err := q.BacklogAge(ctx)
		oldest = max(0, time.Duration(ms)*time.Millisecond)
		return err
	})
	return oldest, err
}

func (c *census) countOpen(ctx context.Context) (open db.CountOpenTasksRow, err error) {
	err = ask(ctx, c.pools.api, func(q *db.Queries) error {
		open, err = q.CountOpenTasks(ctx, maxCounted)
		return err
	})
	return open, err
}

// countEnded reads the whole table, which may take longer than any other statement. It does
// not begin with the last free connection of the pool: requests would find none for
// as long as it takes. That a few more are taken while it runs is bearable, for what takes
// them gives them back sooner.
func (c *census) countEnded(ctx context.Context) (ended db.CountEndedTasksRow, err error) {
	pool := c.pools.api.Stat()
	if free := pool.MaxConns() - pool.AcquiredConns() - pool.ConstructingConns(); free < min(2, pool.MaxConns()) {
		return ended, errNoRoom
	}
	err = ask(ctx, c.pools.api, func(q *db.Queries) error {
		if err := q.AllowTime(ctx, endedLimit.Milliseconds()); err != nil {
			return err
		}
		ended, err = q.CountEndedTasks(ctx)
		return err
	})
	return ended, err
}

// countQueues counts what waits and runs in each queue; there are as many rows as queues.
func (c *census) countQueues(ctx context.Context) (rows []db.QueueDepthsRow, err error) {
	err = ask(ctx, c.pools.work, func(q *db.Queries) error {
		rows, err = q.QueueDepths(ctx, db.QueueDepthsParams{Most: maxCounted, Queues: c.names})
		return err
	})
	return rows, err
}

// ask runs statements in a transaction. A connection that broke, as all do when PostgreSQL
// restarts, is replaced once.
func ask(ctx context.Context, pool *pgxpool.Pool, statements func(*db.Queries) error) error {
	inTx := func(tx pgx.Tx) error { return statements(db.New(tx)) }
	err := pgx.BeginFunc(ctx, pool, inTx)
	if broken(err) && ctx.Err() == nil {
		pool.Reset()
		err = pgx.BeginFunc(ctx, pool, inTx)
	}
	return err
}

// statsLimit is how long /stats and /queues take at most: a moment more than a count by index does.
const statsLimit = readLimit + time.Second

// stats answers GET /stats. Without Redis the queue is null; without PostgreSQL there is
// nothing to tell. In place of a count that fails or takes too long stands the one before; only
// if there was none yet is that a 503.
func (s *server) stats(w http.ResponseWriter, r *http.Request) {
	if err := noQuery(r.URL); err != nil {
		s.fail(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), statsLimit)
	defer cancel()
	t := s.census.tasks(ctx)
	if t.at.IsZero() {
		s.fail(w, r, cmp.Or(t.oldestErr, t.openErr, t.endedErr))
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
	b = strconv.AppendFloat(append(b, `,"oldest_pending_seconds":`...), t.oldest.Seconds(), 'f', -1, 64)
	b = appendTime(append(b, `,"timestamp":`...), &t.at)
	writeBody(w, http.StatusOK, "application/json", append(b, '}'))
}
