package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
)

// Leases may be judged only after unbroken access: an outage, or a stop of this
// process, would make every lease look expired.
func TestAccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAccess(discardLog(), 10*time.Second)
		step := func(d time.Duration, err error) {
			time.Sleep(d)
			a.note(err)
		}
		if a.unbroken(time.Second) {
			t.Error("trusted at start")
		}
		for range 10 {
			step(time.Second, nil)
		}
		if !a.unbroken(10*time.Second) || a.unbroken(11*time.Second) {
			t.Error("want exactly 10 s of access")
		}
		step(time.Second, io.ErrUnexpectedEOF)
		if a.unbroken(0) {
			t.Error("trusted while away")
		}
		step(time.Second, nil)
		step(time.Second, nil)
		if a.unbroken(2*time.Second) || !a.unbroken(time.Second) {
			t.Error("want access to count from the return")
		}
		time.Sleep(time.Minute) // stopped: nobody noted anything
		if a.unbroken(0) {
			t.Error("trusted after silence")
		}
		step(0, nil)
		if a.unbroken(time.Second) {
			t.Error("silence does not count as access")
		}
	})
}

// A PostgreSQL that serves some statements and refuses others, being full, does not fill the log;
// one that stays away is told of though it was back a moment before.
func TestAccessLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		a := newAccess(slog.New(slog.NewTextHandler(&log, nil)), 10*time.Second)
		for range 100 {
			time.Sleep(50 * time.Millisecond)
			a.note(io.ErrUnexpectedEOF)
			a.note(nil)
		}
		if n := strings.Count(log.String(), "\n"); n != 2 {
			t.Errorf("%d lines, want 2:\n%s", n, &log)
		}
		for range 20 {
			time.Sleep(time.Second)
			a.note(io.ErrUnexpectedEOF)
		}
		if n := strings.Count(log.String(), "postgres away"); n != 2 {
			t.Errorf("told %d times that PostgreSQL is away, want 2:\n%s", n, &log)
		}
		for range 20 {
			time.Sleep(time.Second)
			a.note(&pgconn.PgError{Code: lockTimedOut})
		}
		if n := strings.Count(log.String(), "gave way"); n != 2 {
			t.Errorf("told %d times of a lock, want 2:\n%s", n, &log)
		}
	})
}

// A worker that vanishes while it holds a task: the next one runs it, and the row tells.
func TestDeadWorkersTaskRunsAgain(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	s := startService(t, cfg, nil)
	// A worker of another process, of which nothing is heard any more.
	id := s.insert("once", "status='processing'", "attempt=1", "lease_until=now() + interval '1 second'", "locked_by='dead'", "started_at=now()")
	began := time.Now()
	row := s.await(id, statusCompleted)
	if took := time.Since(began); took < time.Second {
		t.Errorf("ran after %v, inside the lease", took)
	}
	wantTask(t, row, statusCompleted, 2, 0, 1, "")
	if !strings.Contains(string(row.Attempts), `"outcome": "lost"`) || !strings.Contains(string(row.Attempts), "worker lost during attempt 1") {
		t.Errorf("ledger = %s", row.Attempts)
	}
	s.atRest()
}

// With SWEEP_INTERVAL above LEASE/3 an idle worker judges leases all the same: it asks often
// enough not to take its own silence for a break.
func TestShortLeaseIsJudged(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.SweepInterval = time.Second // LEASE is 2 s
	s := startService(t, cfg, nil)
	id := s.insert("once", "status='processing'", "attempt=1", "lease_until=now()", "locked_by='dead'", "started_at=now()")
	wantTask(t, s.await(id, statusCompleted), statusCompleted, 2, 0, 1, "")
}

// A task that has spent its budget of lost workers fails and says so.
func TestPoisonTaskFails(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	id := s.insert("poison", "status='processing'", "attempt=4", "lost_count=3", "lease_until=now()", "locked_by='dead'", "started_at=now()")
	wantTask(t, s.await(id, statusFailed), statusFailed, 4, 0, 3, "worker lost during attempt 4")
	cancelled := s.insert("poison", "status='processing'", "attempt=1", "cancel_requested=true", "lease_until=now()", "locked_by='dead'", "started_at=now()")
	wantTask(t, s.await(cancelled, statusCancelled), statusCancelled, 1, 0, 0, "worker lost during attempt 1")
}

// Fault test 31: entries that a ghost took and never acknowledged are run by others.
func TestGhostConsumer(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.DatabaseURL, cfg.RedisURL = newDatabase(t), newRedisURL(t)
	ghost := testStream(t, func(c *config) { *c = cfg; c.ConsumerName = "ghost" })
	p, err := openPools(t.Context(), cfg.DatabaseURL, cfg.Lease)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	var ids []uuid.UUID
	for range 20 {
		var id uuid.UUID
		if err := p.api.QueryRow(t.Context(), "INSERT INTO tasks (name, published_at) VALUES ('x', now() + interval '1 hour') RETURNING task_id").Scan(&id); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
		ghost.mustPublish(t, []entry{{id, defaultQueue}})
	}
	if n := len(ghost.mustNext(t, 20)); n != 20 {
		t.Fatalf("ghost took %d entries, want 20", n)
	}
	s := startService(t, cfg, nil)
	for _, id := range ids {
		wantTask(t, s.await(id, statusCompleted), statusCompleted, 1, 0, 0, "")
	}
	s.atRest()
}

// A live lease is never overridden, however long its entry has been idle.
func TestReclaimerLeavesLiveLeases(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.DatabaseURL = newDatabase(t)
	s := testStream(t, func(c *config) { *c = cfg; c.RedisURL = newRedisURL(t) })
	p, err := openPools(t.Context(), cfg.DatabaseURL, cfg.Lease)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	queries := db.New(p.lease)
	access := newAccess(testLog(t), time.Hour)
	access.since = time.Now().Add(-time.Hour)
	r := &reclaimer{log: testLog(t), cfg: cfg, stream: s, queries: queries, access: access, metrics: newMetrics(),
		inFlight: func(message) bool { return false }, wake: func() {}}
	r.cfg.PELIdleThreshold = time.Millisecond
	insert := func(columns string) entry {
		var id uuid.UUID
		if err := p.api.QueryRow(t.Context(), "INSERT INTO tasks (name, status, attempt, lease_until, published_at) VALUES "+columns+" RETURNING task_id").Scan(&id); err != nil {
			t.Fatal(err)
		}
		return entry{id, defaultQueue}
	}
	live := insert("('x', 'processing', 1, now() + interval '1 hour', now())")
	dead := insert("('x', 'processing', 1, now() - interval '1 second', now())")
	waiting := insert("('x', 'pending', 0, NULL, now())")
	ended := insert("('x', 'completed', 1, NULL, now())")
	s.mustPublish(t, []entry{live, dead, waiting, ended, {uuid.New(), defaultQueue}})
	s.mustNext(t, 5)
	eventually(t, "entries settled", func() bool {
		if err := r.scan(t.Context(), defaultQueue); err != nil {
			t.Fatal(err)
		}
		length, pending := s.counts(t, defaultQueue)
		return length == 0 && pending == 0
	})
	for _, want := range []struct {
		entry  entry
		status string
		lost   int32
		marked bool
	}{{live, statusProcessing, 0, true}, {dead, statusPending, 1, false}, {waiting, statusPending, 0, false}, {ended, statusCompleted, 0, true}} {
		row, err := queries.GetTask(t.Context(), want.entry.id)
		if err != nil {
			t.Fatal(err)
		}
		if row.Status != want.status || row.LostCount != want.lost || (row.PublishedAt != nil) != want.marked {
			t.Errorf("task is %s, published %v; want %+v", describe(row), row.PublishedAt, want)
		}
	}
	if reclaimed, lost := testutil.ToFloat64(r.metrics.reclaimed), testutil.ToFloat64(r.metrics.lost); reclaimed != 5 || lost != 1 {
		t.Errorf("counted: %v reclaimed, %v lost; want 5, 1", reclaimed, lost)
	}
}

// Fault tests 7, 36 and field cases 5 and 15: after a wipe everything queued runs, what
// was running runs on, and a backlog is not added twice.
func TestRedisWiped(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	server := startRedisServer(t)
	cfg.RedisURL = server.url
	var runs atomic.Int32
	goOn := make(chan struct{})
	s := startService(t, cfg, map[string]handlerFunc{
		"held": func(context.Context, task) (any, error) { runs.Add(1); <-goOn; return nil, nil },
		"x":    func(context.Context, task) (any, error) { runs.Add(1); return nil, nil },
	})
	var held []uuid.UUID
	for range cfg.WorkerConcurrency {
		held = append(held, s.insert("held"))
	}
	for _, id := range held {
		s.await(id, statusProcessing)
	}
	if _, err := s.pool.Exec(t.Context(), "INSERT INTO tasks (name) SELECT 'x' FROM generate_series(1, 200)"); err != nil {
		t.Fatal(err)
	}
	length := func() int64 {
		n, _ := s.stream.fast.XLen(t.Context(), cfg.StreamName).Result()
		return n
	}
	eventually(t, "200 queued", func() bool { return length() == 204 }, func() any { return length() })
	if err := s.stream.fast.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "200 queued again", func() bool { return length() >= 200 }, func() any { return length() })
	most := int64(0)
	for end := time.Now().Add(3 * cfg.RepublishAfter); time.Now().Before(end); {
		most = max(most, length())
		sleep(t.Context(), 50*time.Millisecond)
	}
	if most > 210 {
		t.Errorf("stream grew to %d entries for 200 tasks", most)
	}
	close(goOn)
	eventually(t, "all completed", func() bool {
		var n int
		s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE status = 'completed' AND attempt = 1").Scan(&n)
		return n == 204
	})
	if n := runs.Load(); n != 204 {
		t.Errorf("%d runs of 204 tasks", n)
	}
	s.atRest()
}

// With Redis away work goes on, and is not doubled when it is back.
func TestWorkGoesOnWithoutRedis(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	server := startRedisServer(t)
	cfg.RedisURL = server.url
	var runs atomic.Int32
	s := startService(t, cfg, map[string]handlerFunc{
		"x": func(context.Context, task) (any, error) { runs.Add(1); return nil, nil },
	})
	s.await(s.insert("x"), statusCompleted)
	server.stop()
	completed := func() (n int) {
		s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE status = 'completed'").Scan(&n)
		return n
	}
	for i := range 20 {
		s.insert("x", fmt.Sprintf("payload='{\"i\": %d}'", i))
	}
	eventually(t, "20 tasks done without Redis", func() bool { return completed() == 21 }, func() any { return completed() })
	if err := server.start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "redis noticed", s.stream.up)
	s.await(s.insert("x"), statusCompleted)
	if n := runs.Load(); n != 22 {
		t.Errorf("%d runs of 22 tasks", n)
	}
	s.atRest()
}

// Field case 49: a Redis that became a replica refuses writes; work goes on, and
// the stream is used again when it is a primary.
func TestRedisReadOnly(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	server := startRedisServer(t)
	cfg.RedisURL = server.url
	s := startService(t, cfg, nil)
	s.await(s.insert("x"), statusCompleted)
	admin := redis.NewClient(&redis.Options{Network: "unix", Addr: server.socket})
	defer admin.Close()
	if err := admin.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "read-only noticed", func() bool { return !s.stream.up() })
	s.await(s.insert("x"), statusCompleted)
	if err := admin.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "primary noticed", s.stream.up)
	s.await(s.insert("x"), statusCompleted)
	s.atRest()
}
