package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"

	"nexusflow/db"
)

// Every statement by which a task could begin or be published leaves a paused queue alone, and serves
// the others; after the resumption it serves this one too.
func TestPausedQueueStatements(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	const old = "published_at = now() - interval '1 hour'"
	for name, test := range map[string]struct {
		set  string
		then int // what there is to do after the resumption
		do   func(ids []uuid.UUID) (int, error)
	}{
		"ClaimTasks": {old, 1, func(ids []uuid.UUID) (int, error) {
			rows, err := r.ClaimTasks(t.Context(), db.ClaimTasksParams{LeaseMS: 1000, Worker: "me", TaskIDs: ids})
			return len(rows), err
		}},
		"ClaimUnlockedTasks": {old, 1, func(ids []uuid.UUID) (int, error) {
			rows, err := r.ClaimUnlockedTasks(t.Context(), db.ClaimUnlockedTasksParams{LeaseMS: 1000, Worker: "me", TaskIDs: ids})
			return len(rows), err
		}},
		"ClaimDueTasks published": {old, 1, func([]uuid.UUID) (int, error) {
			rows, err := r.ClaimDueTasks(t.Context(), db.ClaimDueTasksParams{LeaseMS: 1000, Worker: "me", Queues: []string{"stopped", "going"}, MaxRows: 10})
			return len(rows), err
		}},
		"ClaimDueTasks unpublished": {"published_at = NULL", 1, func([]uuid.UUID) (int, error) {
			rows, err := r.ClaimDueTasks(t.Context(), db.ClaimDueTasksParams{LeaseMS: 1000, Worker: "me", Queues: []string{"stopped", "going"}, MaxRows: 10})
			return len(rows), err
		}},
		"SweepUnpublished": {"published_at = NULL", 1, func([]uuid.UUID) (int, error) {
			rows, err := r.SweepUnpublished(t.Context(), 10)
			return len(rows), err
		}},
		"OverdueQueues": {old, 2, func([]uuid.UUID) (int, error) {
			rows, err := r.OverdueQueues(t.Context(), 1000)
			return len(rows), err
		}},
		"SweepPublished": {old, 1, func([]uuid.UUID) (int, error) {
			n := 0
			for _, queue := range []string{"stopped", "going"} {
				rows, err := r.SweepPublished(t.Context(), db.SweepPublishedParams{AgeMS: 1000, Queue: queue, MaxRows: 10})
				if err != nil {
					return 0, err
				}
				n += len(rows)
			}
			return n, nil
		}},
	} {
		if _, err := r.pool.Exec(t.Context(), "DELETE FROM tasks"); err != nil {
			t.Fatal(err)
		}
		ids := []uuid.UUID{r.task(t, test.set, "queue = 'stopped'"), r.task(t, test.set, "queue = 'going'")}
		for _, step := range []struct {
			change func(context.Context, string) (int64, error)
			want   int
		}{{r.PauseQueue, 1}, {r.ResumeQueue, test.then}} {
			for _, changes := range []int64{1, 0} {
				if n, err := step.change(t.Context(), "stopped"); n != changes || err != nil {
					t.Errorf("%s: %d rows changed, %v, want %d", name, n, err, changes)
				}
			}
			if got, err := test.do(ids); err != nil || got != step.want {
				t.Errorf("%s = %d, %v, want %d", name, got, err, step.want)
			}
		}
	}
}

// A message whose claim was refused is dropped, but its row is free for the sweep, also when the queue was
// resumed in between; a row that is no longer pending, or in another queue, is left alone.
func TestRefusedMessageIsNotLost(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	p := testPools(t)
	r := record{db.New(p.work), p.work}
	s := testStream(t)
	access := newAccess(testLog(t), time.Second)
	w := newWorker(testLog(t), cfg, r.Queries, r.Queries, s, newHandlerTable(cfg), access, newMetrics())
	asked := 0
	w.refused = func(context.Context) { asked++ }
	stopped := r.task(t, "queue = 'stopped'", touched)
	other := r.task(t, "run_at = now() + interval '1 hour'", touched)
	done := r.task(t, "queue = 'stopped', status = 'completed'", touched)
	if _, err := r.PauseQueue(t.Context(), "stopped"); err != nil {
		t.Fatal(err)
	}
	w.acquire(t.Context())
	changed := r.change(t, stopped, func() {
		w.take(t.Context(), []message{{id: "1-1", queue: "stopped", taskID: stopped}, {id: "1-2", queue: "default", taskID: other}, {id: "1-3", queue: "stopped", taskID: done}, {id: "1-4", queue: "stopped"}})
	})
	if diff := cmp.Diff(map[string]string{"published_at": "NULL"}, changed); diff != "" {
		t.Errorf("refusal changes (-want +got):\n%s", diff)
	}
	if len(w.drops.queue) != 4 || asked != 1 || r.get(t, other).PublishedAt == nil || r.get(t, done).PublishedAt == nil {
		t.Errorf("%d messages dropped, the gate asked %d times; want 4 and once, and the other rows as they were", len(w.drops.queue), asked)
	}
	if rows, err := r.SweepUnpublished(t.Context(), 10); len(rows) != 0 || err != nil {
		t.Errorf("the sweep publishes %v, %v while the queue is paused", rows, err)
	}
	if _, err := r.ResumeQueue(t.Context(), "stopped"); err != nil {
		t.Fatal(err)
	}
	if rows, err := r.SweepUnpublished(t.Context(), 10); len(rows) != 1 || rows[0].TaskID != stopped || err != nil {
		t.Errorf("the sweep publishes %v, %v after the resumption, want the task", rows, err)
	}
	// The queue was resumed between the claim and this: the task must not wait for REPUBLISH_AFTER.
	if n, err := r.UnpublishRefused(t.Context(), []uuid.UUID{stopped, other, done}); n != 1 || err != nil {
		t.Errorf("UnpublishRefused after the resumption = %d, %v, want one row", n, err)
	}
	if _, err := r.pool.Exec(t.Context(), "UPDATE queues SET changed_at = now() - interval '2 minutes'; UPDATE tasks SET published_at = now()"); err != nil {
		t.Fatal(err)
	}
	if n, err := r.UnpublishRefused(t.Context(), []uuid.UUID{stopped, other, done}); n != 0 || err != nil {
		t.Errorf("UnpublishRefused long after the resumption = %d, %v, want none", n, err)
	}
}

// The stream of a paused queue is not read, and the others are.
func TestPausedStreamIsNotRead(t *testing.T) {
	t.Parallel()
	s := testStream(t, func(c *config) { c.Queues = []queueWeight{{defaultQueue, 1}, {"other", 1}} })
	s.mustPublish(t, append(newEntries(3, defaultQueue), newEntries(3, "other")...))
	s.paused.Store(&[]string{defaultQueue})
	if got := s.mustNext(t, 10); len(got) != 3 || slices.ContainsFunc(got, func(m message) bool { return m.queue != "other" }) {
		t.Errorf("delivered %v, want the 3 of the other queue", got)
	}
	s.paused.Store(&[]string{defaultQueue, "other"})
	if got := s.mustNext(t, 10); len(got) != 0 {
		t.Errorf("delivered %v of paused queues", got)
	}
	if _, pending := s.counts(t, defaultQueue); pending != 0 {
		t.Errorf("%d entries of a paused queue were delivered", pending)
	}
	s.paused.Store(&[]string{"other"})
	if got := s.mustNext(t, 10); len(got) != 3 {
		t.Errorf("delivered %v after the resumption, want 3", got)
	}
}

// The whole of it, over two processes: what waits is not run, however it came; what runs goes on; other queues
// are served; no entry is added again and again; and after the resumption all of it runs.
func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.Queues = []queueWeight{{defaultQueue, 1}, {"other", 1}}
	cfg.DatabaseURL = newDatabase(t)
	hold := make(chan struct{})
	var runs atomic.Int32
	handlers := map[string]handlerFunc{
		"hold":  func(context.Context, task) (any, error) { <-hold; return nil, nil },
		"count": func(context.Context, task) (any, error) { runs.Add(1); return nil, nil },
		"quick": func(context.Context, task) (any, error) { return nil, nil },
	}
	a := startService(t, cfg, handlers)
	b := startService(t, cfg, handlers)
	held := a.insert("hold")
	a.await(held, statusProcessing)
	for range 2 {
		if code, body := b.request("POST", "/queues/default/pause"); code != 200 || body["paused"] != true || body["queue"] != "default" {
			t.Fatalf("pause = %d %v, want 200", code, body)
		}
	}
	const waiting = 60
	for i := range waiting {
		if i%3 == 0 {
			a.insert("count")
		} else if code, _ := postTask(t, a.url, "", `{"name":"count"}`); code != http.StatusAccepted {
			t.Fatalf("a paused queue answers %d, want 202", code)
		}
	}
	// Of another queue a task runs that falls due after REPUBLISH_AFTER: by then all sweeps had their chance.
	a.await(a.insert("quick", "queue='other'", "run_at=now()+interval '3 s'"), statusCompleted)
	n, err := a.stream.fast.XLen(t.Context(), cfg.StreamName).Result()
	if err != nil {
		t.Fatal(err)
	}
	// Of each submitted task there is one entry, of those inserted by SQL none, and those that readers
	// held when the pause began are gone; the held task has its own.
	if n > waiting*2/3+1 || runs.Load() != 0 {
		t.Errorf("%d entries and %d runs of a paused queue with %d tasks, want no more than %d and none", n, runs.Load(), waiting, waiting*2/3+1)
	}
	close(hold)
	a.await(held, statusCompleted)
	_, list := a.request("GET", "/queues")
	if q := queueOf(list, "default"); q["paused"] != true || q["pending_due"] != float64(waiting) || q["workers"] != 2. {
		t.Errorf("GET /queues shows %v, want it paused with %d due and 2 workers", q, waiting)
	}
	begin := time.Now()
	if code, body := a.request("POST", "/queues/default/resume"); code != 200 || body["paused"] != false {
		t.Fatalf("resume = %d %v, want 200", code, body)
	}
	eventually(t, "all tasks ran", func() bool { return runs.Load() == waiting })
	t.Logf("%d tasks ran within %v of the resumption", waiting, time.Since(begin))
	a.atRest()
	if n := runs.Load(); n != waiting {
		t.Errorf("%d runs, want %d", n, waiting)
	}
}

// queueOf returns one queue of an answer to GET /queues.
func queueOf(list map[string]any, name string) map[string]any {
	queues, _ := list["queues"].([]any)
	for _, q := range queues {
		if q, ok := q.(map[string]any); ok && q["queue"] == name {
			return q
		}
	}
	return nil
}

// Without Redis, workers take due tasks from the table, and none of a paused queue.
func TestPauseWithoutRedis(t *testing.T) {
	t.Parallel()
	rd := startRedisServer(t)
	cfg := fastConfig(t)
	cfg.RedisURL = rd.url
	cfg.Queues = []queueWeight{{defaultQueue, 1}, {"other", 1}}
	s := startService(t, cfg, nil)
	s.request("POST", "/queues/default/pause")
	rd.stop()
	stopped := s.insert("a")
	s.await(s.insert("a", "queue='other'"), statusCompleted)
	if row := s.task(stopped); row.Status != statusPending || row.Attempt != 0 {
		t.Errorf("the task of the paused queue is %s", describe(row))
	}
	if _, list := s.request("GET", "/queues"); queueOf(list, "default")["workers"] != nil || queueOf(list, "default")["paused"] != true {
		t.Errorf("GET /queues without Redis = %v, want workers null", list)
	}
	s.request("POST", "/queues/default/resume")
	s.await(stopped, statusCompleted)
}

// The numbers of GET /queues, and which queues it shows.
func TestListQueues(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.server.hints.readers = func(_ context.Context, queues []string) (map[string]int, error) {
		return map[string]int{"critical": 2}, nil
	}
	const row = "INSERT INTO tasks (name, queue, status, run_at, published_at, lease_until) SELECT 'a', "
	for _, rows := range []string{
		"'default', 'pending', now() - interval '40 min', now(), NULL FROM generate_series(1, 3)",
		"'default', 'pending', now() - interval '90 min', NULL, NULL FROM generate_series(1, 2)",
		"'default', 'pending', now() + interval '1 h', NULL, NULL FROM generate_series(1, 4)",
		"'default', 'processing', now(), now(), now() FROM generate_series(1, 5)",
		"'default', 'completed', now(), now(), NULL FROM generate_series(1, 6)",
		"'forgotten', 'pending', now() - interval '7 min', now(), NULL",
		"'running', 'processing', now(), now(), now()",
		"'ended', 'failed', now(), now(), NULL",
		"'later', 'pending', now() + interval '1 h', NULL, NULL",
	} {
		g.exec(t, row+rows)
	}
	g.exec(t, "INSERT INTO queues (queue, paused) VALUES ('renamed', true), ('resumed', false)")
	a := g.do(t, "GET", "/queues", "")
	var got struct {
		Queues []struct {
			Queue      string
			Paused     bool
			Due        int      `json:"pending_due"`
			Later      int      `json:"pending_later"`
			Processing int      `json:"processing"`
			Oldest     *float64 `json:"oldest_due_seconds"`
			Workers    *int
		}
		Timestamp string
	}
	if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 200 {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}
	if _, err := time.Parse(timeLayout, got.Timestamp); err != nil {
		t.Error(err)
	}
	var lines []string
	for _, q := range got.Queues {
		oldest := "null"
		if q.Oldest != nil {
			oldest = fmt.Sprint(int(*q.Oldest)/60, " min")
		}
		lines = append(lines, fmt.Sprint(q.Queue, " ", q.Paused, " ", q.Due, " ", q.Later, " ", q.Processing, " ", oldest, " ", *q.Workers))
	}
	if diff := cmp.Diff([]string{
		"critical false 0 0 0 null 2", "default false 5 4 5 90 min 0", "forgotten false 1 0 0 7 min 0", "later false 0 1 0 null 0",
		"renamed true 0 0 0 null 0", "running false 0 0 1 null 0",
	}, lines); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	// A count serves for a while; a pause shows at once.
	counts := g.server.census.queues
	counts.mu.Lock()
	counts.keepUntil = time.Now().Add(time.Hour)
	counts.mu.Unlock()
	g.exec(t, "DELETE FROM tasks")
	if b := g.do(t, "GET", "/queues", ""); b.body != a.body {
		t.Errorf("a second later %s, want the same count", b.body)
	}
	g.do(t, "POST", "/queues/critical/pause", "")
	g.server.hints.readers = nil
	want := `{"queues":[{"queue":"critical","paused":true,"pending_due":0,"pending_later":0,"processing":0,"oldest_due_seconds":null,"workers":null},`
	if b := g.do(t, "GET", "/queues", ""); !strings.HasPrefix(b.body, want) {
		t.Errorf("after the pause: %s", b.body)
	}
	expire(counts, func(context.Context) ([]db.QueueDepthsRow, error) { return nil, errNoRoom })
	if b := g.do(t, "GET", "/queues", ""); b.status != 200 || !strings.HasPrefix(b.body, want) {
		t.Errorf("after a count that failed: %d %s, want the one before", b.status, b.body)
	}
}

// However many ask while a count hangs, they share it, and nobody waits longer than it takes.
func TestListQueuesShareOneCount(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	counts := g.server.census.queues
	count := counts.count
	var calls atomic.Int32
	var asking atomic.Int32
	give := make(chan struct{})
	counts.rest = 1 << 20
	counts.count = func(context.Context) ([]db.QueueDepthsRow, error) {
		calls.Add(1)
		<-give
		time.Sleep(time.Millisecond) // which is kept for a quarter of an hour
		return nil, &pgconn.PgError{Code: tookTooLong}
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			asking.Add(1)
			if a, err := g.try(t.Context(), "GET", "/queues", nil); err != nil || a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("GET /queues = %d %s, %v, want 503", a.status, a.body, err)
			}
		})
	}
	eventually(t, "a count begins", func() bool { return calls.Load() == 1 && asking.Load() == 10 })
	close(give)
	wg.Wait()
	if a := g.do(t, "GET", "/queues", ""); a.status != 503 || calls.Load() != 1 {
		t.Errorf("afterwards %d %s, and %d counts; want 503 and one", a.status, a.body, calls.Load())
	}
	expire(counts, count)
	if a := g.do(t, "GET", "/queues", ""); a.status != 200 {
		t.Errorf("GET /queues = %d %s when counts succeed again", a.status, a.body)
	}
}

// Which queues can be paused, by whom, and what is refused.
func TestPauseRefusals(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"k"}; c.ReadAPIKeys = []string{"r"} })
	g.exec(t, "INSERT INTO queues (queue, paused) VALUES ('renamed', true)")
	for _, test := range []struct {
		method, path, key string
		status            int
	}{
		{"POST", "/queues/default/pause", "k", 200},
		{"POST", "/queues/default/pause", "k", 200},
		{"POST", "/queues/default/resume", "k", 200},
		{"POST", "/queues/default/resume", "k", 200},
		{"POST", "/queues/nowhere/pause", "k", 404},
		{"POST", "/queues/nowhere/resume", "k", 404},
		{"POST", "/queues/renamed/pause", "k", 404},
		{"POST", "/queues/renamed/resume", "k", 200},
		{"POST", "/queues/renamed/resume", "k", 404},
		{"POST", "/queues/a%00b/resume", "k", 404},
		{"POST", "/queues/DEFAULT/pause", "k", 404},
		{"POST", "/queues/default/pause?for=1h", "k", 422},
		{"GET", "/queues?x=1", "k", 422},
		{"POST", "/queues/default/pause", "r", 403},
		{"GET", "/queues", "r", 200},
		{"GET", "/queues", "", 401},
		{"GET", "/queues/default/pause", "k", 405},
	} {
		if a := g.do(t, test.method, test.path, "", "Authorization", "Bearer "+test.key); a.status != test.status {
			t.Errorf("%s %s = %d %s, want %d", test.method, test.path, a.status, a.body, test.status)
		}
	}
}

// Tasks of a paused queue wait because somebody wants it: they close no gate.
func TestBacklogOfPausedQueue(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	r.task(t, "queue = 'stopped', run_at = now() - interval '1 hour'")
	r.task(t, "queue = 'stopped', run_at = now() - interval '1 hour', published_at = NULL")
	r.task(t, "run_at = now() - interval '1 minute', published_at = NULL")
	for _, step := range []struct {
		change  func(context.Context, string) (int64, error)
		minutes int64
	}{{r.PauseQueue, 1}, {r.ResumeQueue, 60}} {
		if _, err := step.change(t.Context(), "stopped"); err != nil {
			t.Fatal(err)
		}
		if ms, err := r.BacklogAge(t.Context()); ms/60_000 != step.minutes || err != nil {
			t.Errorf("backlog %d ms, %v, want %d minutes", ms, err, step.minutes)
		}
	}
}

// Each process counts as a worker of the queues that it reads, once.
func TestStreamReaders(t *testing.T) {
	t.Parallel()
	s := testStream(t, func(c *config) { c.Queues = []queueWeight{{defaultQueue, 1}, {"other", 1}} })
	s.appear(t.Context(), defaultQueue)
	s.appear(t.Context(), defaultQueue)
	s.appear(t.Context(), "other")
	testStream(t, func(c *config) { c.StreamName, c.ConsumerName = s.name, "another" }).appear(t.Context(), defaultQueue)
	got, err := s.readers(t.Context(), []string{defaultQueue, "other", "nowhere"})
	if diff := cmp.Diff(map[string]int{defaultQueue: 2, "other": 1}, got); diff != "" || err != nil {
		t.Errorf("readers (-want +got), %v:\n%s", err, diff)
	}
	// To appear leaves alone what is pending and what is to be read.
	s.mustPublish(t, newEntries(2, defaultQueue))
	s.mustNext(t, 1)
	s.appear(t.Context(), defaultQueue)
	if p, err := s.fast.XPendingExt(t.Context(), &redis.XPendingExtArgs{Stream: s.name, Group: s.group, Start: "-", End: "+", Count: 2}).Result(); err != nil || len(p) != 1 || p[0].RetryCount != 1 {
		t.Errorf("pending: %v, %v, want one delivery", p, err)
	}
	eventually(t, "silent consumers do not count", func() bool {
		got, err := s.readers(t.Context(), []string{defaultQueue})
		return err == nil && got[defaultQueue] == 0
	})
}
