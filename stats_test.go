package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

type statsAnswer struct {
	Tasks map[string]int
	Queue *struct {
		Stream, Group                   string
		Length, Pending, Lag, Consumers int
	}
	Oldest    float64 `json:"oldest_pending_seconds"`
	Timestamp time.Time
}

// stats waits until /stats answers with 200, which may take several questions on a slow machine.
func (g *gateway) stats(t testing.TB, header ...string) (a answer) {
	t.Helper()
	eventually(t, "GET /stats = 200", func() bool {
		a = g.do(t, "GET", "/stats", "", header...)
		return a.status == 200
	}, func() any { return a })
	return a
}

func (a answer) figures(t testing.TB) (s statsAnswer) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), &s); err != nil {
		t.Fatalf("%s: %v", a.body, err)
	}
	return s
}

func TestStats(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) {
		c.StreamName, c.ConsumerGroup = "tasks", "workers"
		c.APIKeys = []string{"secret"}
	})
	var asked atomic.Value
	g.server.census.hints.depth = func(_ context.Context, queues []string) (streamDepth, error) {
		asked.Store(queues)
		return streamDepth{length: 5, pending: 2, consumers: 2}, nil
	}
	// One task of every kind, the waiting ones due in the future.
	g.exec(t, `INSERT INTO tasks (name, status, run_at, published_at, lease_until)
		SELECT 'a', status, now() + interval '1 hour', CASE WHEN n > 2 THEN now() END, CASE WHEN status = 'processing' THEN now() + interval '1 hour' END
		FROM (VALUES ('pending', 3), ('processing', 2), ('completed', 120), ('failed', 1)) v (status, times), generate_series(1, times) n`)
	if a := g.do(t, "GET", "/stats", ""); a.status != 401 {
		t.Errorf("GET /stats without a key = %d %s, want 401", a.status, a.body)
	}
	key := []string{"Authorization", "Bearer secret"}
	golden(t, "stats.txt", transcript(g.stats(t, key...)))
	golden(t, "stats_query.txt", transcript(g.do(t, "GET", "/stats?z=1&wait=3&z=2", "", key...)))
	if diff := cmp.Diff([]string{"critical", "default"}, asked.Load()); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
}

// Handlers without a queue put tasks into the default one, also if QUEUES does not name it.
func TestStatsDefaultQueue(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.Queues = []queueWeight{{"critical", 1}} })
	var asked atomic.Value
	g.server.census.hints.depth = func(_ context.Context, queues []string) (streamDepth, error) {
		asked.Store(queues)
		return streamDepth{}, nil
	}
	g.stats(t)
	if diff := cmp.Diff([]string{"critical", "default"}, asked.Load()); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
}

// In place of a count that fails /stats shows the one before, with its time, and /metrics nothing. One
// without any before is answered with 503.
func TestStatsAfterFailures(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	c := g.server.census
	g.exec(t, "INSERT INTO tasks (name, status) VALUES ('a', 'pending'), ('a', 'completed')")
	countEnded := c.ended.count
	c.ended.count = func(context.Context) (db.CountEndedTasksRow, error) { return db.CountEndedTasksRow{}, errNoRoom }
	eventually(t, "all but the count of ended tasks", func() bool {
		_, at, _ := c.open.get(t.Context())
		return !at.IsZero()
	})
	if a := g.do(t, "GET", "/stats", ""); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("GET /stats before the first count = %d %v %s, want 503", a.status, a.header, a.body)
	}
	expire(c.ended, countEnded)
	before := g.stats(t).figures(t)
	if before.Tasks["pending"] != 1 || before.Tasks["completed"] != 1 {
		t.Fatalf("stats = %+v", before)
	}
	g.exec(t, "DELETE FROM tasks")
	for _, fail := range []func(){
		func() {
			expire(c.ended, func(context.Context) (db.CountEndedTasksRow, error) { return db.CountEndedTasksRow{}, errNoRoom })
		},
		func() {
			expire(c.open, func(context.Context) (db.CountOpenTasksRow, error) { return db.CountOpenTasksRow{}, errNoRoom })
		},
		func() { expire(c.oldest, func(context.Context) (time.Duration, error) { return 0, errNoRoom }) },
	} {
		fail()
		after := g.stats(t).figures(t)
		if after.Tasks["completed"] != 1 || after.Timestamp.Before(before.Timestamp) || time.Since(after.Timestamp) <= 0 {
			t.Errorf("stats = %+v after %+v", after, before)
		}
	}
	samples, _ := scrape(t, g.URL)
	for sample := range samples {
		if strings.HasPrefix(sample, "nexusflow_tasks{") || strings.HasPrefix(sample, "nexusflow_oldest") || strings.HasPrefix(sample, "nexusflow_expired") {
			t.Errorf("%s is shown after its count failed", sample)
		}
	}
}

// expire lets the next who asks for f begin a count, by the function given.
func expire[T any](f *figure[T], count func(context.Context) (T, error)) {
	f.wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count, f.keepUntil = count, time.Time{}
}

// How long tasks wait is told also while they cannot be counted.
func TestOldestWithoutCounts(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.exec(t, "INSERT INTO tasks (name, run_at) VALUES ('a', now() - interval '1 hour')")
	g.server.census.open.count = func(context.Context) (db.CountOpenTasksRow, error) { return db.CountOpenTasksRow{}, errNoRoom }
	eventually(t, "the age without the counts", func() bool {
		samples, _ := scrape(t, g.URL)
		_, counted := samples[`nexusflow_tasks{status="pending"}`]
		return samples["nexusflow_oldest_pending_seconds"] >= 3600 && !counted
	})
}

// Each count of tasks that have not ended stops at its limit.
func TestCountOpenTasksStops(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	for range 3 {
		r.task(t, "published_at = NULL", "run_at = now() - interval '1 s'")
		r.task(t)
		r.task(t, "status = 'processing', lease_until = now() - interval '1 s'")
	}
	for most, want := range map[int32]db.CountOpenTasksRow{
		2: {Pending: 2, Processing: 2, Overdue: 2, Expired: 2},
		5: {Pending: 5, Processing: 3, Overdue: 3, Expired: 3},
		9: {Pending: 6, Processing: 3, Overdue: 3, Expired: 3},
	} {
		if got, err := r.CountOpenTasks(t.Context(), most); got != want || err != nil {
			t.Errorf("CountOpenTasks(%d) = %+v, %v, want %+v", most, got, err, want)
		}
	}
}

// The count of ended tasks, which may take long, leaves the last connection to requests.
func TestCountEndedLeavesRoom(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ conns, busy int32 }{{8, 7}, {2, 1}, {1, 0}} {
		g := startGateway(t, fmt.Sprint(newDatabase(t), "&pool_max_conns=", test.conns), nil)
		c := g.server.census
		var held []*pgxpool.Conn
		for range test.busy {
			conn, err := g.pools.api.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, conn)
		}
		if _, err := c.countEnded(t.Context()); test.busy > 0 && err != errNoRoom {
			t.Errorf("%d of %d connections busy: %v, want %v", test.busy, test.conns, err, errNoRoom)
		}
		for _, conn := range held {
			conn.Release()
		}
		eventually(t, "a count with the connections free", func() bool {
			_, err := c.countEnded(t.Context())
			return err == nil
		})
	}
}

// The age of the oldest task counts those that are due, and the audit figures those that
// should not be.
func TestStatsAges(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.exec(t, `INSERT INTO tasks (name, status, run_at, published_at, lease_until) VALUES
		('a', 'pending', now() - interval '100 s', NULL, NULL), ('a', 'pending', now() + interval '1 hour', NULL, NULL),
		('a', 'pending', now() - interval '50 s', now(), NULL),
		('a', 'processing', now(), now(), now() - interval '1 s'), ('a', 'processing', now(), now(), now() + interval '1 hour')`)
	s := g.stats(t).figures(t)
	if s.Oldest < 100 || s.Oldest > 130 || s.Tasks["pending"] != 3 || s.Tasks["processing"] != 2 || s.Queue != nil {
		t.Errorf("stats = %+v", s)
	}
	if age := time.Since(s.Timestamp); age < 0 || age > 15*time.Second {
		t.Errorf("counted %v ago", age)
	}
	wantSamples(t, g.URL, map[string]float64{"nexusflow_unpublished_tasks": 1, "nexusflow_expired_leases": 1, `nexusflow_tasks{status="pending"}`: 3})
}

// The figures of the streams sum over all queues that the process knows, and vanish with Redis.
func TestStatsQueues(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	server := startRedisServer(t)
	cfg.RedisURL = server.url
	cfg.Queues = []queueWeight{{"default", 1}, {"low", 1}}
	release := make(chan struct{})
	s := startService(t, cfg, map[string]handlerFunc{
		"held": func(context.Context, task) (any, error) { <-release; return nil, nil },
	})
	t.Cleanup(func() { close(release) })
	for range 3 {
		s.insert("held")
		s.insert("held", "queue='low'")
	}
	get := func() (statsAnswer, int) {
		resp, err := http.Get(s.url + "/stats")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var a statsAnswer
		if err := json.NewDecoder(resp.Body).Decode(&a); err != nil {
			t.Fatal(err)
		}
		return a, resp.StatusCode
	}
	// Four slots take four of the six; the other two wait in the streams.
	var last statsAnswer
	eventually(t, "stats of two streams", func() bool {
		last, _ = get()
		q := last.Queue
		return q != nil && q.Stream == cfg.StreamName && q.Group == cfg.ConsumerGroup && q.Length == 6 && q.Pending == 4 && q.Lag == 2 && q.Consumers == 1 &&
			last.Tasks["processing"] == 4 && last.Tasks["pending"] == 2
	}, func() any { return last })
	server.stop()
	eventually(t, "queue null without Redis", func() bool {
		a, status := get()
		return status == 200 && a.Queue == nil && a.Tasks["processing"] == 4
	})
}

// Without PostgreSQL there is nothing to tell, and with it again there is.
func TestStatsWithoutPostgres(t *testing.T) {
	t.Parallel()
	server := startPostgresServer(t)
	g := startGateway(t, server.createDatabase(t, "stats"), nil)
	g.stats(t)
	server.stop()
	eventually(t, "stats unavailable", func() bool { return g.do(t, "GET", "/stats", "").status == 503 })
	if a := g.do(t, "GET", "/stats", ""); a.header.Get("Content-Type") != "application/problem+json" || a.header.Get("Retry-After") == "" {
		t.Errorf("GET /stats = %d %v %s", a.status, a.header, a.body)
	}
	if err := server.start(); err != nil {
		t.Fatal(err)
	}
	g.stats(t)
}

// However many ask while somebody holds the table locked, one connection waits, scrapes are
// answered, and requests for other things find connections.
func TestStatsShareOneCount(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	g := startGateway(t, dsn, nil)
	lock := connect(t, dsn)
	execute(t, lock, "BEGIN; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			begin := time.Now()
			a, err := g.try(t.Context(), "GET", "/metrics", nil)
			if err != nil || a.status != 200 || strings.Contains(a.body, "nexusflow_tasks{") {
				t.Errorf("GET /metrics = %d %s, %v", a.status, a.body, err)
			}
			if took := time.Since(begin); took > 3*scrapeLimit {
				t.Errorf("a scrape took %v", took)
			}
		})
		wg.Go(func() {
			if a, err := g.try(t.Context(), "GET", "/stats", nil); err != nil || a.status != 200 && a.status != 503 {
				t.Errorf("GET /stats = %d %s, %v", a.status, a.body, err)
			}
		})
	}
	watch := connect(t, testPostgres(t).dsn("postgres"))
	waiting := func() (n int) {
		if err := watch.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND wait_event_type = 'Lock'", databaseOf(dsn)).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "a count waits", func() bool { return waiting() > 0 })
	for end := time.Now().Add(scrapeLimit); time.Now().Before(end); {
		if n := waiting(); n > 1 {
			t.Fatalf("%d connections wait for the lock, want 1", n)
		}
	}
	if a := g.do(t, "GET", "/readyz", ""); a.status != 200 {
		t.Errorf("GET /readyz meanwhile = %d %s", a.status, a.body)
	}
	execute(t, lock, "COMMIT")
	wg.Wait()
	g.stats(t)
}

func databaseOf(dsn string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(dsn, "postgres://nexusflow@/"), "?")
	return name
}

// A figure is kept for fifty times what counting took, at least for a second; a failure for a
// second, unless there is too much to count; and whoever cannot wait for a count gets the one before,
// as does, beside the error, who comes after one that failed.
func TestFigure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var took time.Duration
		var result error
		counts := 0
		f := &figure[int]{log: discardLog(), base: t.Context(), limit: 30 * time.Second, rest: 50, count: func(ctx context.Context) (int, error) {
			select {
			case <-time.After(took):
				counts++
				return counts, result
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}}
		impatient := func() context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			t.Cleanup(cancel)
			return ctx
		}
		want := func(value int, age time.Duration, err error) {
			t.Helper()
			got, at, gotErr := f.get(impatient())
			if got != value || !errors.Is(gotErr, err) || !at.IsZero() && time.Since(at) != age {
				t.Errorf("get = %d counted %v ago, %v; want %d, %v, %v", got, time.Since(at), gotErr, value, age, err)
			}
		}
		took = 2 * time.Second
		gone, hangUp := context.WithCancel(t.Context())
		hangUp()
		if _, _, err := f.get(gone); err != errCounting || f.running != nil {
			t.Errorf("who has gone: %v, and a count began: %v", err, f.running != nil)
		}
		want(0, 0, errCounting) // after the one second that we wait
		time.Sleep(time.Second)
		want(1, 2*time.Second, nil)
		time.Sleep(100*time.Second - time.Millisecond)
		want(1, 102*time.Second-time.Millisecond, nil)
		time.Sleep(2 * time.Millisecond)
		want(1, 103*time.Second+time.Millisecond, nil) // the next count goes on
		time.Sleep(time.Second)
		want(2, 2*time.Second, nil)

		time.Sleep(100 * time.Second)
		took, result = 0, errBusy
		want(2, 102*time.Second, errBusy)
		time.Sleep(time.Second - time.Millisecond)
		want(2, 103*time.Second-time.Millisecond, errBusy)
		time.Sleep(time.Millisecond)
		took, result = time.Millisecond, nil
		want(4, time.Millisecond, nil)
		time.Sleep(time.Second - time.Millisecond)
		want(4, time.Second, nil)
		time.Sleep(time.Millisecond)
		want(5, time.Millisecond, nil)

		time.Sleep(time.Second)
		took = time.Hour
		want(5, 2*time.Second+time.Millisecond, nil)
		time.Sleep(29 * time.Second)
		want(5, 31*time.Second+time.Millisecond, context.DeadlineExceeded)
		time.Sleep(time.Second)
		took, result = 500*time.Millisecond, &pgconn.PgError{Code: tookTooLong}
		want(5, 32*time.Second+501*time.Millisecond, result)
		time.Sleep(25*time.Second - time.Millisecond)
		want(5, 57*time.Second+500*time.Millisecond, result)
		f.wait()
	})
}
