package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
)

// fastConfig has the small time settings of the fault tests.
func fastConfig(t testing.TB) config {
	t.Helper()
	env := map[string]string{
		"HTTP_ADDR": "127.0.0.1:0", "LEASE": "2s", "SWEEP_INTERVAL": "100ms", "REPUBLISH_AFTER": "2s", "MAX_LOST": "3",
		"PEL_SCAN_INTERVAL_S": "1", "PEL_IDLE_THRESHOLD_MS": "2500", "REQUEUE_BASE_DELAY_MS": "100", "REQUEUE_MAX_DELAY_MS": "1000",
		"SHUTDOWN_GRACE": "2s", "WORKER_CONCURRENCY": "4", "BLOCK_MS": "200", "LOG_LEVEL": "debug", "STREAM_NAME": streamName(t),
	}
	cfg, _, err := loadConfig(func(name string) string { return env[name] }, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// A testService is the whole program in this process, on a database and a stream of
// its own.
type testService struct {
	t      testing.TB
	cfg    config
	url    string
	pool   *pgxpool.Pool
	stream *stream
	stop   func() error // ends the service as a signal does; later calls return the same
}

// startService runs the program with Go handlers until the test ends. Instances
// that share a database and a stream are made with the first one's cfg.
func startService(t testing.TB, cfg config, handlers map[string]handlerFunc) *testService {
	t.Helper()
	if cfg.DatabaseURL == "" {
		cfg.DatabaseURL = newDatabase(t)
	}
	if cfg.RedisURL == "" {
		cfg.RedisURL = newRedisURL(t)
	}
	log := testLog(t)
	table, err := loadHandlers(cfg, false, log)
	if err != nil {
		t.Fatal(err)
	}
	for name, h := range handlers {
		table.handle(name, h)
	}
	p, err := openPools(t.Context(), cfg.DatabaseURL, cfg.Lease)
	if err != nil {
		t.Fatal(err)
	}
	instance := cfg
	instance.ConsumerName = "test-" + uuid.NewString()
	s, err := openStream(log, instance, cfg.RedisURL)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	ready := make(chan string, 1)
	var g errgroup.Group
	g.Go(func() error {
		defer p.close()
		defer s.close()
		all := parts{log: log, cfg: instance, pools: p, stream: s, handlers: table, metrics: newMetrics()}
		return all.serve(ctx, l, func(addr string) { ready <- addr })
	})
	svc := &testService{t: t, cfg: cfg, pool: p.api, stream: s, url: "http://" + <-ready}
	svc.stop = sync.OnceValue(func() error {
		cancel(errors.New("test over"))
		return g.Wait()
	})
	t.Cleanup(func() {
		if err := svc.stop(); err != nil {
			t.Errorf("service ended: %v", err)
		}
	})
	return svc
}

// insert submits a task the way any SQL program may.
func (s *testService) insert(name string, columns ...string) uuid.UUID {
	s.t.Helper()
	names, values := "name", "'"+name+"'"
	for _, c := range columns {
		n, v, _ := strings.Cut(c, "=")
		names, values = names+", "+n, values+", "+v
	}
	var id uuid.UUID
	if err := s.pool.QueryRow(context.Background(), fmt.Sprintf("INSERT INTO tasks (%s) VALUES (%s) RETURNING task_id", names, values)).Scan(&id); err != nil {
		s.t.Fatal(err)
	}
	return id
}

func (s *testService) task(id uuid.UUID) db.Task {
	s.t.Helper()
	row, err := db.New(s.pool).GetTask(context.Background(), id)
	if err != nil {
		s.t.Fatal(err)
	}
	return row
}

// await waits until a task has the status and returns it.
func (s *testService) await(id uuid.UUID, status string) db.Task {
	s.t.Helper()
	var row db.Task
	eventually(s.t, "task "+status, func() bool {
		row = s.task(id)
		return row.Status == status
	}, func() any { return describe(row) })
	return row
}

// atRest checks what holds when nothing is left to do: no entries and nothing pending.
func (s *testService) atRest() {
	s.t.Helper()
	var length, pending int64
	eventually(s.t, "stream empty", func() bool {
		ctx := context.Background()
		length, _ = s.stream.fast.XLen(ctx, s.cfg.StreamName).Result()
		p, err := s.stream.fast.XPending(ctx, s.cfg.StreamName, s.cfg.ConsumerGroup).Result()
		if err != nil {
			return false
		}
		pending = p.Count
		return length == 0 && pending == 0
	}, func() any { return fmt.Sprintf("length %d, pending %d", length, pending) })
}

func describe(t db.Task) string {
	message := ""
	if t.ErrorMessage != nil {
		message = *t.ErrorMessage
	}
	return fmt.Sprintf("%s attempt=%d retry=%d lost=%d result=%s error=%q attempts=%s",
		t.Status, t.Attempt, t.RetryCount, t.LostCount, t.Result, message, t.Attempts)
}

func wantTask(t testing.TB, row db.Task, status string, attempt, retries, lost int32, message string) {
	t.Helper()
	got := ""
	if row.ErrorMessage != nil {
		got = *row.ErrorMessage
	}
	if row.Status != status || row.Attempt != attempt || row.RetryCount != retries || row.LostCount != lost || !strings.Contains(got, message) || (message == "") != (got == "") {
		t.Errorf("task is %s\nwant %s attempt=%d retry=%d lost=%d error with %q", describe(row), status, attempt, retries, lost, message)
	}
}

// Each way in which an attempt can end, and what the row says then.
func TestAttemptOutcomes(t *testing.T) {
	t.Parallel()
	var once atomic.Int32
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"echo":      func(_ context.Context, t task) (any, error) { return t.Payload, nil },
		"none":      func(context.Context, task) (any, error) { return nil, nil },
		"fails":     func(context.Context, task) (any, error) { return nil, errors.New("no luck") },
		"permanent": func(context.Context, task) (any, error) { return nil, permanent(errors.New("bad data")) },
		"wrapped": func(context.Context, task) (any, error) {
			return nil, fmt.Errorf("outer: %w", permanent(errors.New("bad data")))
		},
		"panics": func(context.Context, task) (any, error) { panic("boom") },
		"exits":  func(context.Context, task) (any, error) { runtime.Goexit(); return nil, nil },
		"slow": func(ctx context.Context, _ task) (any, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"flaky": func(context.Context, task) (any, error) {
			if once.Add(1) == 1 {
				return nil, retryAfter(errors.New("later"), 50*time.Millisecond)
			}
			return "fine", nil
		},
		"nul":      func(context.Context, task) (any, error) { return "a\x00b", nil },
		"bomb":     func(context.Context, task) (any, error) { return json.RawMessage(`1e100000`), nil },
		"notjson":  func(context.Context, task) (any, error) { return json.RawMessage(`{`), nil },
		"channel":  func(context.Context, task) (any, error) { return make(chan int), nil },
		"big":      func(context.Context, task) (any, error) { return strings.Repeat("x", maxResultBytes), nil },
		"badtext":  func(context.Context, task) (any, error) { return nil, errors.New("a\x00b\xffc") },
		"longtext": func(context.Context, task) (any, error) { return nil, errors.New(strings.Repeat("é", 5000) + "end") },
	})
	for _, test := range []struct {
		name    string
		columns []string
		status  string
		attempt int32
		retries int32
		message string
		result  string
	}{
		{"echo", []string{`payload='{"n": 12345678901234567890}'`}, statusCompleted, 1, 0, "", `{"n": 12345678901234567890}`},
		{"none", nil, statusCompleted, 1, 0, "", ""},
		{"fails", []string{"max_retries=2"}, statusFailed, 3, 2, "no luck", ""},
		{"fails", []string{"max_retries=0"}, statusFailed, 1, 0, "no luck", ""},
		{"permanent", nil, statusFailed, 1, 0, "bad data", ""},
		{"wrapped", nil, statusFailed, 1, 0, "outer: bad data", ""},
		{"panics", []string{"max_retries=1"}, statusFailed, 2, 1, "panic: boom", ""},
		{"exits", []string{"max_retries=1"}, statusFailed, 2, 1, "runtime.Goexit", ""},
		{"slow", []string{"max_retries=1", "timeout_ms=100"}, statusFailed, 2, 1, "timed out after 100ms", ""},
		{"flaky", nil, statusCompleted, 2, 1, "", `"fine"`},
		{"nul", nil, statusFailed, 1, 0, "result not storable", ""},
		{"bomb", nil, statusFailed, 1, 0, "result not storable", ""},
		{"notjson", nil, statusFailed, 1, 0, "result not storable", ""},
		{"channel", nil, statusFailed, 1, 0, "result not storable", ""},
		{"big", nil, statusFailed, 1, 0, "result not storable", ""},
		{"badtext", []string{"max_retries=0"}, statusFailed, 1, 0, "ab\uFFFDc", ""},
		{"longtext", []string{"max_retries=0"}, statusFailed, 1, 0, "end", ""},
		{"echo", []string{`payload='"str"'`}, statusFailed, 1, 0, "payload is not a JSON object", ""},
		{"echo", []string{`payload='[]'`}, statusFailed, 1, 0, "payload is not a JSON object", ""},
	} {
		t.Run(test.name+strings.Join(test.columns, ","), func(t *testing.T) {
			id := s.insert(test.name, test.columns...)
			row := s.await(id, test.status)
			wantTask(t, row, test.status, test.attempt, test.retries, 0, test.message)
			if string(row.Result) != test.result {
				t.Errorf("result = %s, want %s", row.Result, test.result)
			}
			if row.ErrorMessage != nil && len(*row.ErrorMessage) > maxErrorBytes {
				t.Errorf("error_message has %d bytes, want at most %d", len(*row.ErrorMessage), maxErrorBytes)
			}
			if row.FinishedAt == nil || row.StartedAt == nil || row.LeaseUntil != nil || row.LockedBy != nil {
				t.Errorf("finished_at %v, started_at %v, lease_until %v, locked_by %v", row.FinishedAt, row.StartedAt, row.LeaseUntil, row.LockedBy)
			}
			var ledger []struct{ Attempt int }
			if err := json.Unmarshal(row.Attempts, &ledger); err != nil {
				t.Fatal(err)
			}
			want := int(test.attempt)
			if test.status == statusCompleted {
				want--
			}
			if len(ledger) != want {
				t.Errorf("ledger has %d attempts, want %d: %s", len(ledger), want, row.Attempts)
			}
		})
	}
	s.atRest()
}

// A row whose name no handler has ends at once, with the reason.
func TestUnknownNameFails(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	id := s.insert("anything") // the demonstration set knows every name
	wantTask(t, s.await(id, statusCompleted), statusCompleted, 1, 0, 0, "")

	table := &handlerTable{}
	cfg := fastConfig(t)
	w := newWorker(testLog(t), cfg, nil, nil, nil, table, newAccess(discardLog(), time.Second), newMetrics())
	a := &attempt{w: w, task: task{Name: "nobody", Payload: json.RawMessage(`{}`)}, ctx: context.Background()}
	_, err := a.call()
	o := a.outcome(nil, err)
	if o.kind != outcomeFail || !o.permanent || !strings.Contains(o.message, `no handler for task name "nobody"`) {
		t.Errorf("outcome = %+v", o)
	}
}

// The line of an attempt carries the submitter's trace context, where there is one.
func TestOutcomeLogTraced(t *testing.T) {
	for _, traceparent := range []string{"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""} {
		var out bytes.Buffer
		log := slog.New(slog.NewJSONHandler(&out, nil))
		w := newWorker(log, fastConfig(t), nil, nil, nil, &handlerTable{}, newAccess(discardLog(), time.Second), newMetrics())
		a := &attempt{w: w, task: task{Name: "x", Traceparent: traceparent}}
		w.logOutcome(outcome{attempt: a, kind: outcomeComplete}, verdict{status: statusCompleted})
		var line map[string]any
		if err := json.Unmarshal(out.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if got, there := line["traceparent"]; there != (traceparent != "") || there && got != traceparent {
			t.Errorf("traceparent %q is logged as %s", traceparent, &out)
		}
	}
}

// Copies of an entry, and entries that name nothing, start no run (fault test 32).
func TestCopiesAndRubbishAreDropped(t *testing.T) {
	t.Parallel()
	var runs atomic.Int32
	goOn := make(chan struct{})
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"held":  func(context.Context, task) (any, error) { runs.Add(1); <-goOn; return nil, nil },
		"retry": func(context.Context, task) (any, error) { return nil, retryAfter(errors.New("later"), time.Hour) },
	})
	held, done, retrying := s.insert("held"), s.insert("other"), s.insert("retry")
	s.await(held, statusProcessing)
	s.await(done, statusCompleted)
	eventually(t, "task waits for its retry", func() bool { return s.task(retrying).RetryCount == 1 })
	var copies []entry
	for range 100 {
		copies = append(copies, entry{held, defaultQueue}, entry{done, defaultQueue}, entry{retrying, defaultQueue})
	}
	copies = append(copies, entry{uuid.New(), defaultQueue})
	if _, err := s.stream.publish(t.Context(), copies); err != nil {
		t.Fatal(err)
	}
	for _, values := range [][]string{{"task_id", "rubbish"}, {"other", "field"}, {"task_id", ""}, {"task_id", "{" + held.String() + "}"}} {
		s.add(values...)
	}
	eventually(t, "copies dropped", func() bool {
		n, err := s.stream.fast.XLen(t.Context(), s.cfg.StreamName).Result()
		return err == nil && n == 1
	})
	close(goOn)
	s.await(held, statusCompleted)
	if n := runs.Load(); n != 1 {
		t.Errorf("held task ran %d times, want 1", n)
	}
	if row := s.task(retrying); row.Attempt != 1 || row.Status != statusPending {
		t.Errorf("retrying task is %s", describe(row))
	}
	s.atRest()
}

// A task that waits for its retry holds no slot: others go on.
func TestBackoffHoldsNoSlot(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.WorkerConcurrency = 1
	cfg.Backoff = backoff{base: time.Hour, max: time.Hour}
	s := startService(t, cfg, map[string]handlerFunc{
		"fails": func(context.Context, task) (any, error) { return nil, errors.New("no luck") },
	})
	for range 20 {
		s.insert("fails")
	}
	s.await(s.insert("fine"), statusCompleted)
	eventually(t, "all failed once", func() bool {
		var n int
		s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE retry_count = 1 AND run_at > now() + interval '50 minutes'").Scan(&n)
		return n == 20
	})
	s.atRest()
}

// Retries keep their delays to within a sweep: 100 + 100 + 200 ms here.
func TestRetrySchedule(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.SweepInterval = time.Hour // only the local timer wakes the dispatcher
	cfg.Backoff.jitter = 0
	var mu sync.Mutex
	var starts []time.Time
	s := startService(t, cfg, map[string]handlerFunc{
		"fails": func(context.Context, task) (any, error) {
			mu.Lock()
			defer mu.Unlock()
			starts = append(starts, time.Now())
			return nil, errors.New("no luck")
		},
	})
	id := s.insert("fails")
	eventually(t, "group created", func() bool { return s.stream.ensure(t.Context(), defaultQueue) == nil })
	if _, err := s.stream.publish(t.Context(), []entry{{id, defaultQueue}}); err != nil {
		t.Fatal(err)
	}
	row := s.await(id, statusFailed)
	wantTask(t, row, statusFailed, 4, 3, 0, "no luck")
	mu.Lock()
	defer mu.Unlock()
	for i, want := range []time.Duration{100 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond} {
		if got := starts[i+1].Sub(starts[i]); got < want || got > want+2*time.Second {
			t.Errorf("attempt %d began %v after the one before, want %v or a little more", i+2, got, want)
		}
	}
}

// A handler of four leases with an idle instance beside it runs once (field case 7).
func TestLongTaskRunsOnce(t *testing.T) {
	t.Parallel()
	var runs atomic.Int32
	long := map[string]handlerFunc{"long": func(ctx context.Context, _ task) (any, error) {
		runs.Add(1)
		if !sleep(ctx, 8*time.Second) {
			return nil, ctx.Err()
		}
		return "done", nil
	}}
	cfg := fastConfig(t)
	a := startService(t, cfg, long)
	startService(t, a.cfg, long)
	id := a.insert("long")
	wantTask(t, a.await(id, statusCompleted), statusCompleted, 1, 0, 0, "")
	if n := runs.Load(); n != 1 {
		t.Errorf("long task ran %d times, want 1", n)
	}
	a.atRest()
}

// Whoever asks for it in the record has a running task cancelled within two seconds (T11).
func TestCancelRequestStopsHandler(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"waits": func(ctx context.Context, _ task) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
	})
	id := s.insert("waits")
	s.await(id, statusProcessing)
	if _, err := s.pool.Exec(t.Context(), "UPDATE tasks SET cancel_requested = true WHERE task_id = $1", id); err != nil {
		t.Fatal(err)
	}
	row := s.await(id, statusCancelled)
	if row.Attempt != 1 || row.FinishedAt == nil || !strings.Contains(string(row.Attempts), `"outcome": "cancelled"`) {
		t.Errorf("task is %s", describe(row))
	}
	s.atRest()
}

// An attempt whose lease was taken away is told to stop, and what it returns is refused.
func TestStaleAttemptCannotWrite(t *testing.T) {
	t.Parallel()
	causes := make(chan error, 1)
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"waits": func(ctx context.Context, t task) (any, error) {
			if t.Attempt == 1 {
				<-ctx.Done()
				causes <- context.Cause(ctx)
				return "stale", nil
			}
			return "fresh", nil
		},
	})
	id := s.insert("waits")
	s.await(id, statusProcessing)
	// What the reaper of another process does when it believes this one dead.
	if _, err := s.pool.Exec(t.Context(), `UPDATE tasks SET status = 'pending', run_at = now(), published_at = NULL,
		lost_count = 1, lease_until = NULL, locked_by = NULL WHERE task_id = $1`, id); err != nil {
		t.Fatal(err)
	}
	row := s.await(id, statusCompleted)
	if string(row.Result) != `"fresh"` || row.Attempt != 2 {
		t.Errorf("task is %s", describe(row))
	}
	if cause := <-causes; !errors.Is(cause, errLeaseLost) {
		t.Errorf("stale handler ended because of %v, want %v", cause, errLeaseLost)
	}
	s.atRest()
	if row := s.task(id); string(row.Result) != `"fresh"` {
		t.Errorf("task is %s", describe(row))
	}
}

// A handler that ignores its context is recorded without it, keeps its slot, and does
// not hold up the others.
func TestHandlerThatIgnoresItsContext(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"stuck": func(context.Context, task) (any, error) { <-goOn; return "too late", nil },
	})
	id := s.insert("stuck", "timeout_ms=100", "max_retries=0")
	s.await(s.insert("fine"), statusCompleted)
	row := s.await(id, statusFailed)
	wantTask(t, row, statusFailed, 1, 0, 0, "timed out after 100ms")
	close(goOn)
	s.atRest()
}

// A row that PostgreSQL refuses to have claimed, here by a trigger of the operator's, is
// left alone, and its neighbours in the batch run.
func TestUnclaimableRowHoldsUpNobody(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	if _, err := s.pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN IF NEW.name = 'refused' AND NEW.status = 'processing' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION refuse()`); err != nil {
		t.Fatal(err)
	}
	if _, err := s.pool.Exec(t.Context(), `INSERT INTO tasks (name) SELECT CASE WHEN n = 7 THEN 'refused' ELSE 'fine' END FROM generate_series(1, 20) n`); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the others done", func() bool {
		var done int
		s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE status = 'completed'").Scan(&done)
		return done == 19
	})
	if _, err := s.pool.Exec(t.Context(), "DROP TRIGGER refuse ON tasks"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all done", func() bool {
		var left int
		err := s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE status <> 'completed'").Scan(&left)
		return err == nil && left == 0
	})
	s.atRest()
}

// A row that somebody holds locked, a user with an open transaction, holds up nobody
// else: not their claims, not their leases, not their outcomes.
func TestLockedRowHoldsUpNobody(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	s := startService(t, fastConfig(t), map[string]handlerFunc{
		"held": func(ctx context.Context, _ task) (any, error) {
			select {
			case <-goOn:
				return "done", nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		},
	})
	running, locked := s.insert("held"), s.insert("held", "max_retries=0")
	for _, id := range []uuid.UUID{running, locked} {
		s.await(id, statusProcessing)
	}
	// Not through the service's pools, whose sessions end when they idle in a transaction.
	tx, err := connect(t, s.cfg.DatabaseURL).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	var waiting uuid.UUID
	if err := tx.QueryRow(t.Context(), "SELECT task_id FROM tasks WHERE task_id = $1 FOR UPDATE", locked).Scan(&locked); err != nil {
		t.Fatal(err)
	}
	if err := tx.QueryRow(t.Context(), "INSERT INTO tasks (name) VALUES ('other') RETURNING task_id").Scan(&waiting); err != nil {
		t.Fatal(err)
	}
	// One whose entry arrives while its row is locked, among others.
	pending := s.insert("other", "run_at=now() + interval '1 hour'")
	if _, err := tx.Exec(t.Context(), "UPDATE tasks SET run_at = now() WHERE task_id = $1", pending); err != nil {
		t.Fatal(err)
	}
	entries := []entry{{pending, defaultQueue}}
	var others []uuid.UUID
	for range 10 {
		id := s.insert("other")
		others = append(others, id)
		entries = append(entries, entry{id, defaultQueue})
	}
	s.stream.mustPublish(t, entries)
	for _, id := range others {
		wantTask(t, s.await(id, statusCompleted), statusCompleted, 1, 0, 0, "")
	}
	// The other lease is renewed past its first end.
	claimed := s.task(running).LeaseUntil
	eventually(t, "lease renewed beside the locked one", func() bool {
		row := s.task(running)
		return row.LeaseUntil != nil && row.LeaseUntil.After(claimed.Add(2*s.cfg.Lease))
	})
	close(goOn)
	wantTask(t, s.await(running, statusCompleted), statusCompleted, 1, 0, 0, "")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range []uuid.UUID{pending, waiting} {
		s.await(id, statusCompleted)
	}
	// Its lease could not be renewed, so it was stopped in time and given back, or its
	// result was kept and stored: one way or the other it ends, with its budgets whole.
	row := s.await(locked, statusCompleted)
	if row.RetryCount != 0 {
		t.Errorf("task is %s", describe(row))
	}
	s.atRest()
}

// Fault test 29: what can finish in the grace time does, the rest is handed back with its
// budgets untouched, and nothing stays pending in the stream.
func TestShutdownHandsTasksBack(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	handlers := map[string]handlerFunc{
		"soon": func(context.Context, task) (any, error) { <-goOn; return "done", nil },
		"long": func(ctx context.Context, _ task) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
		"deaf": func(context.Context, task) (any, error) { select {} },
	}
	a := startService(t, fastConfig(t), handlers)
	soon, long, deaf := a.insert("soon"), a.insert("long", "max_retries=0"), a.insert("deaf", "max_retries=0")
	for _, id := range []uuid.UUID{soon, long, deaf} {
		a.await(id, statusProcessing)
	}
	pool, err := pgxpool.New(t.Context(), a.cfg.DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	began := time.Now()
	ended := make(chan error)
	go func() { ended <- a.stop() }()
	close(goOn)
	if err := <-ended; err != nil {
		t.Fatalf("stop: %v", err)
	}
	if took := time.Since(began); took > a.cfg.ShutdownGrace+2*time.Second {
		t.Errorf("shutdown took %v, want at most %v", took, a.cfg.ShutdownGrace+2*time.Second)
	}
	a.pool = pool
	wantTask(t, a.task(soon), statusCompleted, 1, 0, 0, "")
	for _, id := range []uuid.UUID{long, deaf} {
		row := a.task(id)
		wantTask(t, row, statusPending, 1, 0, 0, "")
		if !strings.Contains(string(row.Attempts), `"outcome": "interrupted"`) {
			t.Errorf("task is %s", describe(row))
		}
	}
	b := startService(t, a.cfg, map[string]handlerFunc{
		"long": func(context.Context, task) (any, error) { return "second", nil },
		"deaf": func(context.Context, task) (any, error) { return "second", nil },
	})
	wantTask(t, b.await(long, statusCompleted), statusCompleted, 2, 0, 0, "")
	wantTask(t, b.await(deaf, statusCompleted), statusCompleted, 2, 0, 0, "")
	b.atRest()
	consumers, err := b.stream.fast.XInfoConsumers(t.Context(), b.cfg.StreamName, b.cfg.ConsumerGroup).Result()
	if err != nil || len(consumers) != 1 {
		t.Errorf("consumers = %v, %v; want only the live one", consumers, err)
	}
}

// add puts a raw entry into the stream.
func (s *testService) add(values ...string) {
	s.t.Helper()
	args := []any{"XADD", s.cfg.StreamName, "*"}
	for _, v := range values {
		args = append(args, v)
	}
	if err := s.stream.fast.Do(context.Background(), args...).Err(); err != nil {
		s.t.Fatal(err)
	}
}
