package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	// A batch gets longer than PostgreSQL works on a statement, so that it is PostgreSQL who
	// gives up: then it is certain that nothing was stored, and no connection is lost.
	batchLimit = statementTimeout + time.Second

	// slotLimit is how long a row waits for a connection beside the batches.
	slotLimit = 3 * time.Second

	// submitLimit is how long a request waits to be stored: for a batch, for a connection
	// beside the batches and for its statement there, if it comes to that.
	submitLimit = slotLimit + batchLimit

	batchRows   = 512  // rows of one INSERT
	asideRows   = 1024 // rows that wait one by one beside the batches
	storeRounds = 3    // repetitions of INSERT and SELECT for one batch
)

const lockTimedOut = "55P03" // SQLSTATE lock_not_available

var (
	errBusy      = errors.New("too many requests of this kind are under way")
	errContended = errors.New("store tasks: keys were taken and given back in every round")
)

// An intake stores submissions by group commit: whatever arrives while one batch is
// written makes up the next.
type intake struct {
	log     *slog.Logger
	pools   *pools
	hints   hints
	metrics *metrics
	batch   *batcher[*waiter]

	aside   sync.WaitGroup
	waiting atomic.Int32  // rows beside the batches
	slots   chan struct{} // connections that they and batch requests may hold, so that reads are left some
	mu      sync.Mutex
	held    map[string][]*waiter // the keys beside the batches, and who came for them meanwhile

	away    atomic.Bool // PostgreSQL was away when last asked
	telling sync.Mutex  // told, at, and changes of away
	told    bool        // that it is away
	at      time.Time   // when that was told last
}

func newIntake(log *slog.Logger, p *pools, h hints, m *metrics) *intake {
	in := &intake{
		log:     log,
		pools:   p,
		hints:   h,
		metrics: m,
		slots:   make(chan struct{}, max(1, p.api.Config().MaxConns/2)),
		held:    make(map[string][]*waiter),
	}
	in.batch = newBatcher(batchRows, in.flush)
	return in
}

// run stores batches until ctx ends, then what is left, and returns nil.
func (in *intake) run(ctx context.Context) error {
	err := in.batch.run(ctx)
	in.aside.Wait()
	return err
}

// submit stores w, or finds the task that holds its key, and returns which. It returns when
// the outcome is committed, or after submitLimit with context.DeadlineExceeded: then the row may
// still be stored, and only asking again with the same key tells. That there is no context is
// on purpose: a client that hangs up must neither abort a task that is being accepted nor cost
// a connection, which pgx closes when a context ends under it (jackc/pgx#1894).
func (in *intake) submit(w *waiter) receipt {
	w.until, w.done = time.Now().Add(submitLimit), make(chan receipt, 1)
	limit := time.NewTimer(submitLimit)
	defer limit.Stop()
	select {
	case in.batch.queue <- w:
	case <-limit.C:
		return receipt{err: context.DeadlineExceeded}
	}
	select {
	case o := <-w.done:
		return o
	case <-limit.C:
		return receipt{err: context.DeadlineExceeded}
	}
}

// flush stores one batch. Rows are inserted in the order of their keys: two gateways with the
// same keys in opposite orders would deadlock.
func (in *intake) flush(ctx context.Context, ws []*waiter) {
	ctx, cancel := context.WithTimeout(ctx, batchLimit)
	defer cancel()
	ws = slices.DeleteFunc(ws, (*waiter).gone)
	if in.waiting.Load() > 0 {
		ws = slices.DeleteFunc(ws, in.behind)
	}
	slices.SortStableFunc(ws, compareKeys)
	in.store(ctx, in.pools.submit, ws)
}

// store writes ws, sorted by key, in one statement and gives everyone an outcome. Rows must
// not decide about others: a batch with unstorable data is halved until only the bad
// row fails, and when one waits for a lock they go on beside the batches. It
// returns the error that all who were left got, if they got one.
func (in *intake) store(ctx context.Context, pool *pgxpool.Pool, ws []*waiter) error {
	if len(ws) == 0 {
		return nil
	}
	left, err := in.insert(ctx, pool, ws)
	switch {
	case len(left) == 0:
		in.note(nil)
		return nil
	case pool == in.pools.submit && sqlState(err) == lockTimedOut:
		for len(left) > 0 {
			n := 1
			for n < len(left) && left[n].sub.Key != "" && left[n].sub.Key == left[0].sub.Key {
				n++
			}
			in.setAside(slices.Clone(left[:n]))
			left = left[n:]
		}
		return nil
	case badData(err) && len(left) > 1:
		half := len(left) / 2
		return errors.Join(in.store(ctx, pool, left[:half]), in.store(ctx, pool, left[half:]))
	case badData(err):
		in.metrics.invalid.Add(float64(len(left)))
		in.log.Warn("submission not storable", "name", left[0].sub.Name, "err", err)
		refuse(left, errUnstorable)
		return nil
	}
	if pool == in.pools.submit || !timedOut(err) {
		in.note(err)
	}
	refuse(left, err)
	return err
}

// insert runs T1 for ws in at most storeRounds rounds and gives an outcome to those it
// stored or found. It returns the others, with the error that is theirs.
//
// INSERT and SELECT are two statements on purpose: the snapshot of one alone predates a
// concurrent winner, whose key it then neither inserts nor sees.
func (in *intake) insert(ctx context.Context, pool *pgxpool.Pool, ws []*waiter) (left []*waiter, err error) {
	q := db.New(pool)
	in.metrics.submitRows.Observe(float64(len(ws)))
	for range storeRounds {
		var stored []db.InsertTasksRow
		if stored, err = q.InsertTasks(ctx, insertParams(ws, in.hints.up())); err == nil {
			ws = in.created(ws, stored)
			if len(ws) == 0 {
				return nil, nil
			}
			var found []db.TasksByKeyRow
			if found, err = q.TasksByKey(ctx, waiterKeys(ws)); err == nil {
				ws = in.found(ws, found)
				if len(ws) == 0 {
					return nil, nil
				}
				err = errContended
				continue
			}
		}
		switch {
		case ctx.Err() != nil:
			return ws, err
		case broken(err):
			// All idle connections are from before whatever broke this one.
			pool.Reset()
		case !repeatable(err):
			return ws, err
		}
		if ws, err = in.lookFor(ctx, q, ws, err); len(ws) == 0 || err != nil && !repeatable(err) && !broken(err) {
			return ws, err
		}
	}
	return ws, err
}

// lookFor gives an outcome to those of ws whose rows are there although the reply that
// said so was lost, and returns the others with the error err that cost the reply.
func (in *intake) lookFor(ctx context.Context, q *db.Queries, ws []*waiter, err error) ([]*waiter, error) {
	rows, lookErr := q.TasksByID(ctx, waiterIDs(ws))
	if lookErr != nil {
		return ws, lookErr
	}
	stored := make([]db.InsertTasksRow, len(rows))
	for i, r := range rows {
		stored[i] = db.InsertTasksRow(r)
	}
	return in.created(ws, stored), err
}

// repeatable reports whether a statement may succeed if it is simply sent again. 23505 is the
// primary key: an earlier INSERT of the same batch, whose reply was lost, was still at work.
func repeatable(err error) bool {
	switch sqlState(err) {
	case "0A000", "23505", "40001", "40P01":
		return true
	}
	return false
}

// broken reports whether the connection ended under a statement, as all do when PostgreSQL
// restarts, so that nobody knows whether it took effect and a new connection may work.
func broken(err error) bool {
	if err == nil || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return false
	}
	if _, connecting := errors.AsType[*pgconn.ConnectError](err); connecting {
		return false
	}
	switch sqlState(err) {
	case "57P01", "57P02", "57P03", "08006", "25P03":
		return true
	case "":
		return storeAway(err)
	}
	return false
}

// created gives those of ws that were inserted their outcome, hands the due ones to the
// stream, and returns the others.
func (in *intake) created(ws []*waiter, rows []db.InsertTasksRow) (left []*waiter) {
	stored := make(map[uuid.UUID]*db.InsertTasksRow, len(rows))
	for i := range rows {
		stored[rows[i].TaskID] = &rows[i]
	}
	due := make([]entry, 0, len(rows))
	for _, w := range ws {
		row := stored[w.id]
		if row == nil {
			left = append(left, w)
			continue
		}
		if row.Published {
			due = append(due, entry{w.id, w.queue})
		}
		o := receipt{id: w.id, name: w.sub.Name, created: row.CreatedAt}
		in.metrics.submitted(&o)
		w.done <- o
	}
	// The rows are committed: from here on the stream is only a hint. If the process
	// dies at this line the dispatcher finds them.
	if len(due) > 0 {
		in.hints.publish(due)
	}
	return left
}

// found gives those of ws whose key a task holds their outcome, and returns the others.
func (in *intake) found(ws []*waiter, rows []db.TasksByKeyRow) (left []*waiter) {
	holders := byKey(rows)
	for _, w := range ws {
		row := holders[w.sub.Key]
		if row == nil {
			left = append(left, w)
			continue
		}
		o := w.receipt(row)
		in.metrics.submitted(&o)
		w.done <- o
		if row.TaskID == w.id && w.sub.due() {
			in.hints.publish([]entry{{w.id, w.queue}})
		}
	}
	return left
}

// note writes one line when PostgreSQL goes away and one when it is back, however many
// requests notice. On a full disk reads succeed and inserts fail: such a change to and fro is
// told no more often than awayLogEvery.
func (in *intake) note(err error) {
	if err == nil && !in.away.Load() || errors.Is(err, errContended) {
		return
	}
	if err != nil && sqlState(err) == "" && !storeAway(err) {
		return // not PostgreSQL's doing: a caller who left, a row that cannot be read
	}
	in.telling.Lock()
	defer in.telling.Unlock()
	in.away.Store(err != nil)
	switch {
	case err != nil && !in.told && time.Since(in.at) > awayLogEvery:
		in.told, in.at = true, time.Now()
		in.log.Warn("postgres does not serve", "err", err)
	case err == nil && in.told:
		in.told = false
		in.log.Info("postgres is back")
	}
}

// timedOut reports whether err comes from a time limit of ours or the statement's. If the
// statement may have waited for somebody's lock, that says nothing about PostgreSQL.
func timedOut(err error) bool {
	state := sqlState(err)
	return errors.Is(err, context.DeadlineExceeded) || state == tookTooLong || state == lockTimedOut
}

func insertParams(ws []*waiter, publish bool) db.InsertTasksParams {
	n := len(ws)
	p := db.InsertTasksParams{
		Publish:         publish,
		TaskIDs:         waiterIDs(ws),
		Names:           make([]string, n),
		Queues:          make([]string, n),
		Payloads:        make([]string, n),
		IdempotencyKeys: waiterKeys(ws),
		RequestHashes:   make([][]byte, n),
		MaxRetries:      make([]int32, n),
		TimeoutsMS:      make([]int64, n),
		Traceparents:    make([]string, n),
		RunsAtUS:        make([]int64, n),
		DelaysMS:        make([]int64, n),
	}
	for i, w := range ws {
		p.Names[i] = w.sub.Name
		p.Queues[i] = w.queue
		p.Payloads[i] = w.sub.Payload
		p.MaxRetries[i] = w.maxRetries
		p.Traceparents[i] = w.traceparent
		if w.sub.Key != "" {
			p.RequestHashes[i] = w.sub.Hash[:]
		}
		if w.sub.TimeoutMS != nil {
			p.TimeoutsMS[i] = *w.sub.TimeoutMS
		}
		if w.sub.RunAt != nil {
			p.RunsAtUS[i] = max(0, w.sub.RunAt.UnixMicro())
		}
		if w.sub.DelayMS != nil {
			p.DelaysMS[i] = *w.sub.DelayMS
		}
	}
	return p
}
