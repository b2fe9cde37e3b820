package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// T10 and T12, column by column, and what they leave alone.
func TestOperations(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	const ended = `retry_count = 3, lost_count = 2, attempt = 6, result = '1', error_message = 'last error', finished_at = now() - interval '1 hour',
		cancel_requested = true, run_at = now() - interval '1 hour', ` + touched
	cancel := func(id uuid.UUID) error { _, err := r.CancelTask(t.Context(), id); return err }
	retry := func(id uuid.UUID) error { _, err := r.RetryTask(t.Context(), id); return err }
	retried := map[string]string{
		"status": "pending", "retry_count": "0", "lost_count": "0", "result": "NULL", "finished_at": "NULL", "published_at": "NULL",
		"cancel_requested": "false", "run_at": "now0s", "updated_at": "now0s",
	}
	for _, test := range []struct {
		name, set string
		do        func(uuid.UUID) error
		want      map[string]string // nil: no row
	}{
		{"cancel pending", touched, cancel, map[string]string{"status": "cancelled", "finished_at": "now0s", "updated_at": "now0s"}},
		{"cancel one that is not due", "run_at = now() + interval '1 hour', published_at = NULL, updated_at = now() - interval '1 hour'", cancel,
			map[string]string{"status": "cancelled", "finished_at": "now0s", "updated_at": "now0s"}},
		{"cancel processing", running, cancel, map[string]string{"cancel_requested": "true", "updated_at": "now0s"}},
		{"cancel processing again", running + ", " + cancelled, cancel, nil},
		{"cancel completed", "status = 'completed'", cancel, nil},
		{"cancel failed", "status = 'failed'", cancel, nil},
		{"cancel cancelled", "status = 'cancelled'", cancel, nil},
		{"retry failed", "status = 'failed', " + ended, retry, retried},
		{"retry cancelled", "status = 'cancelled', " + ended, retry, retried},
		{"retry completed", "status = 'completed'", retry, nil},
		{"retry pending", touched, retry, nil},
		{"retry processing", running, retry, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			id := r.task(t, test.set)
			var err error
			got := r.change(t, id, func() { err = test.do(id) })
			if errors.Is(err, pgx.ErrNoRows) != (test.want == nil) || err != nil && test.want != nil {
				t.Fatalf("error %v", err)
			}
			if test.want == nil {
				test.want = map[string]string{}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
		})
	}
}

// What the two routes answer in every state of a task.
func TestCancelAndRetry(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	const conflict = problemURN + "task-not-"
	for _, test := range []struct {
		do, set string
		status  int
		want    string // status in the answer, or the problem's type
	}{
		{"cancel", "status = 'pending'", 200, "cancelled"},
		{"cancel", "status = 'pending', retry_count = 1, run_at = now() + interval '1 h'", 200, "cancelled"},
		{"cancel", "status = 'processing', lease_until = now()", 202, "processing"},
		{"cancel", "status = 'processing', lease_until = now(), cancel_requested = true", 202, "processing"},
		{"cancel", "status = 'cancelled'", 200, "cancelled"},
		{"cancel", "status = 'completed'", 409, conflict + "cancellable"},
		{"cancel", "status = 'failed'", 409, conflict + "cancellable"},
		{"retry", "status = 'failed', result = '1', attempt = 4", 202, "pending"},
		{"retry", "status = 'cancelled'", 202, "pending"},
		{"retry", "status = 'pending'", 409, conflict + "retryable"},
		{"retry", "status = 'processing', lease_until = now()", 409, conflict + "retryable"},
		{"retry", "status = 'completed'", 409, conflict + "retryable"},
	} {
		id := g.submitted(t, `{"name":"a"}`)
		g.exec(t, "UPDATE tasks SET updated_at = now() - interval '1 min', "+test.set+" WHERE task_id = $1", id)
		before := g.do(t, "GET", "/tasks/"+id, "")
		a := g.do(t, "POST", "/tasks/"+id+"/"+test.do, "no JSON, and ignored")
		after := g.do(t, "GET", "/tasks/"+id, "")
		if test.status == 409 {
			if a.status != 409 || a.str("type") != test.want || !strings.Contains(a.str("detail"), before.str("status")) || after.body != before.body {
				t.Errorf("%s of %s = %d %s, want 409 %s that tells the status, and no change", test.do, test.set, a.status, a.body, test.want)
			}
			continue
		}
		if a.status != test.status || a.str("status") != test.want || a.body != after.body {
			t.Errorf("%s of %s = %d %s, want %d %s and what GET shows", test.do, test.set, a.status, a.body, test.status, test.want)
		}
		if a.header.Get("Location") != "/tasks/"+id || (a.header.Get("Retry-After") == "1") != (a.status == 202) || a.header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s of %s: headers %v", test.do, test.set, a.header)
		}
		idle := strings.Contains(test.set, "'cancelled'") && test.do == "cancel" || strings.Contains(test.set, "cancel_requested")
		if same := before.header.Get("ETag") == after.header.Get("ETag"); same != idle {
			t.Errorf("%s of %s: the ETag is the same: %t, want %t", test.do, test.set, same, idle)
		}
		if test.do == "cancel" && a.str("cancel_requested") != fmt.Sprint(a.status == 202) {
			t.Errorf("%s of %s: cancel_requested = %s", test.do, test.set, a.str("cancel_requested"))
		}
		if sent := len(g.published()); test.do == "retry" && g.published()[sent-1] != (entry{uuid.MustParse(id), "default"}) {
			t.Errorf("the retried task was not published")
		}
	}
	unknown := uuid.NewString()
	for path, want := range map[string]string{
		"/tasks/" + unknown + "/cancel": "Task '" + unknown + "' not found.", "/tasks/" + unknown + "/retry": "Task '" + unknown + "' not found.",
		"/tasks/x/cancel": "Task 'x' not found.", "/tasks/a%00b/retry": "Task 'a\x00b' not found.",
	} {
		if a := g.do(t, "POST", path, ""); a.status != 404 || a.str("detail") != want {
			t.Errorf("POST %s = %d %s, want 404 %q", path, a.status, a.body, want)
		}
	}
	id := g.submitted(t, `{"name":"a"}`)
	if a := g.do(t, "POST", "/tasks/"+id+"/cancel?force=1", ""); a.status != 422 || !strings.Contains(a.str("errors"), `["query","force"]`) {
		t.Errorf("with a query: %d %s, want 422 that names it", a.status, a.body)
	}
	if a := g.do(t, "GET", "/tasks/"+id+"/cancel", ""); a.status != 405 || a.header.Get("Allow") != "POST" {
		t.Errorf("GET = %d %v, want 405", a.status, a.header)
	}
	// Without the stream a retry is as good, only not as fast.
	g.up.Store(false)
	sent := len(g.published())
	g.exec(t, "UPDATE tasks SET status = 'failed' WHERE task_id = $1", id)
	if a := g.do(t, "POST", "/tasks/"+id+"/retry", ""); a.status != 202 || len(g.published()) != sent {
		t.Errorf("retry without the stream = %d %s", a.status, a.body)
	}
}

// Of two retries at once one is accepted, and of a cancel and a retry each is in its turn.
func TestConcurrentRetries(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for range 10 {
		id := g.submitted(t, `{"name":"a"}`)
		g.exec(t, "UPDATE tasks SET status = 'failed' WHERE task_id = $1", id)
		var accepted, refused atomic.Int32
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				a, err := g.try(t.Context(), "POST", "/tasks/"+id+"/retry", http.NoBody)
				switch {
				case err == nil && a.status == 202:
					accepted.Add(1)
				case err == nil && a.status == 409:
					refused.Add(1)
				default:
					t.Errorf("%d %s %v", a.status, a.body, err)
				}
			})
		}
		wg.Wait()
		if accepted.Load() != 1 || refused.Load() != 3 {
			t.Errorf("%d accepted and %d refused, want 1 and 3", accepted.Load(), refused.Load())
		}
	}
}

// request sends a POST without a body to a running service and returns status and body.
func (s *testService) request(method, path string) (int, map[string]any) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, s.url+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	var body map[string]any
	if err := json.NewDecoder(resp.Body).Decode(&body); err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, body
}

// A task that runs in one process is cancelled through another: Go functions and commands, with Redis and without.
func TestCancelElsewhere(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "handlers.json")
	if err := os.WriteFile(file, []byte(`{"command": {"exec": ["sleep", "300"]}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	rd := startRedisServer(t)
	cfg := fastConfig(t)
	cfg.HandlersFile = file
	cfg.RedisURL = rd.url
	cfg.DatabaseURL = newDatabase(t)
	handlers := map[string]handlerFunc{"function": func(ctx context.Context, _ task) (any, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}}
	a := startService(t, cfg, handlers)
	ids := make(map[string]uuid.UUID)
	for _, name := range []string{"function", "command", "function without redis", "command without redis"} {
		kind, _, _ := strings.Cut(name, " ")
		ids[name] = a.insert(kind)
		a.await(ids[name], statusProcessing)
	}
	b := startService(t, cfg, handlers)
	cancel := func(name string) {
		begin := time.Now()
		if code, body := b.request("POST", "/tasks/"+ids[name].String()+"/cancel"); code != 202 || body["cancel_requested"] != true {
			t.Fatalf("cancel = %d %v, want 202", code, body)
		}
		row := a.await(ids[name], statusCancelled)
		t.Logf("%s: cancelled after %v", name, time.Since(begin))
		if row.Attempt != 1 || row.RetryCount != 0 || row.FinishedAt == nil || !strings.Contains(string(row.Attempts), "cancelled") {
			t.Errorf("%s: %s", name, describe(row))
		}
	}
	cancel("function")
	cancel("command")
	rd.stop()
	cancel("function without redis")
	cancel("command without redis")
	// And a retry runs it again, as the next attempt.
	if code, body := b.request("POST", "/tasks/"+ids["function"].String()+"/retry"); code != 202 {
		t.Fatalf("retry = %d %v, want 202", code, body)
	}
	eventually(t, "the retried task runs as attempt 2", func() bool {
		row := a.task(ids["function"])
		return row.Status == statusProcessing && row.Attempt == 2
	})
}

// The entry of a cancelled task is dropped, and one that is retried starts though nothing sweeps.
func TestCancelledEntryIsDropped(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.WorkerConcurrency = 1
	cfg.SweepInterval = time.Hour
	cfg.RepublishAfter = time.Hour
	hold := make(chan struct{})
	var runs atomic.Int32
	s := startService(t, cfg, map[string]handlerFunc{
		"hold":    func(context.Context, task) (any, error) { <-hold; return nil, nil },
		"counted": func(context.Context, task) (any, error) { runs.Add(1); return nil, nil },
	})
	submit := func(name string) uuid.UUID {
		_, body := postTask(t, s.url, "", `{"name":"`+name+`"}`)
		id, _ := body["task_id"].(string)
		return uuid.MustParse(id)
	}
	s.await(submit("hold"), statusProcessing)
	id := submit("counted")
	if code, body := s.request("POST", "/tasks/"+id.String()+"/cancel"); code != 200 || body["status"] != statusCancelled {
		t.Fatalf("cancel = %d %v, want 200", code, body)
	}
	close(hold)
	s.await(submit("counted"), statusCompleted)
	s.atRest()
	if row := s.task(id); runs.Load() != 1 || row.Attempt != 0 || row.Status != statusCancelled {
		t.Errorf("%d runs, the cancelled task is %s", runs.Load(), describe(row))
	}
	if code, body := s.request("POST", "/tasks/"+id.String()+"/retry"); code != 202 {
		t.Fatalf("retry = %d %v, want 202", code, body)
	}
	wantTask(t, s.await(id, statusCompleted), statusCompleted, 1, 0, 0, "")
}

// bulkTasks inserts n tasks a second apart: the first is the oldest and has the smallest id.
func (g *gateway) bulkTasks(t testing.TB, n int, name, status string) {
	t.Helper()
	g.exec(t, `INSERT INTO tasks (task_id, name, status, created_at, updated_at, lease_until, finished_at, published_at, error_message)
		SELECT lpad(i::text, 32, '0')::uuid, $2, $3, timestamptz '2026-01-01 00:00:00+00' + i * interval '1 s', now() - interval '1 h',
			CASE WHEN $3 = 'processing' THEN now() + interval '1 h' END,
			CASE WHEN $3 IN ('completed', 'failed', 'cancelled') THEN now() - interval '1 h' END, now(), 'old'
		FROM generate_series((SELECT count(*) FROM tasks) + 1, (SELECT count(*) FROM tasks) + $1::int) i`, n, name, status)
}

func (g *gateway) statuses(t testing.TB) map[string]int {
	t.Helper()
	counts := make(map[string]int)
	for _, status := range []string{statusPending, statusProcessing, statusCompleted, statusFailed, statusCancelled} {
		if n := g.number(t, "SELECT count(*) FROM tasks WHERE status = $1", status); n > 0 {
			counts[status] = n
		}
	}
	return counts
}

func TestBulk(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		path, want string
		after      map[string]int
	}{
		{"/tasks/cancel?name=a", `{"cancelled":300,"cancel_requested":5,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 20, "processing": 5, "completed": 10, "failed": 10, "cancelled": 310}},
		{"/tasks/cancel?status=pending", `{"cancelled":320,"cancel_requested":0,"skipped":0,"next_cursor":null}`, map[string]int{"processing": 5, "completed": 10, "failed": 10, "cancelled": 330}},
		{"/tasks/cancel?status=processing&status=processing", `{"cancelled":0,"cancel_requested":5,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 320, "processing": 5, "completed": 10, "failed": 10, "cancelled": 10}},
		{"/tasks/cancel?status=processing,pending&name=b", `{"cancelled":20,"cancel_requested":0,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 300, "processing": 5, "completed": 10, "failed": 10, "cancelled": 30}},
		{"/tasks/retry?status=failed", `{"retried":10,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 330, "processing": 5, "completed": 10, "cancelled": 10}},
		{"/tasks/retry?name=a", `{"retried":20,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 340, "processing": 5, "completed": 10}},
		{"/tasks/retry?name=nothing", `{"retried":0,"skipped":0,"next_cursor":null}`, map[string]int{"pending": 320, "processing": 5, "completed": 10, "failed": 10, "cancelled": 10}},
		// The first bound is included, the second is not; a plus that nobody encoded is understood.
		{"/tasks/cancel?created_after=2026-01-01T00:00:10%2B00:00&created_before=2026-01-01T01:00:21+01:00", `{"cancelled":11,"cancel_requested":0,"skipped":0,"next_cursor":null}`,
			map[string]int{"pending": 309, "processing": 5, "completed": 10, "failed": 10, "cancelled": 21}},
	} {
		g := startGateway(t, newDatabase(t), nil)
		g.bulkTasks(t, 300, "a", statusPending)
		g.bulkTasks(t, 20, "b", statusPending)
		for _, n := range []struct {
			status string
			n      int
		}{{statusProcessing, 5}, {statusCompleted, 10}, {statusFailed, 10}, {statusCancelled, 10}} {
			g.bulkTasks(t, n.n, "a", n.status)
		}
		a := g.do(t, "POST", test.path, "")
		if a.status != 200 || a.body != test.want {
			t.Errorf("%s = %d %s, want %s", test.path, a.status, a.body, test.want)
		}
		if diff := cmp.Diff(test.after, g.statuses(t)); diff != "" {
			t.Errorf("%s: tasks by status (-want +got):\n%s", test.path, diff)
		}
		// Again, nothing is left to do.
		if strings.HasPrefix(test.path, "/tasks/cancel") {
			if a := g.do(t, "POST", test.path, ""); a.body != `{"cancelled":0,"cancel_requested":0,"skipped":0,"next_cursor":null}` {
				t.Errorf("%s again = %d %s", test.path, a.status, a.body)
			}
		}
		g.Close()
	}
}

// A walk in small steps meets every task once.
func TestBulkCursor(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.bulkTasks(t, 3*bulkBatch, "other", statusCompleted)
	g.bulkTasks(t, 25, "a", statusPending)
	g.bulkTasks(t, bulkBatch, "other", statusCompleted)
	g.bulkTasks(t, 15, "a", statusFailed)
	for _, test := range []struct { // in this order: what is retried first would be cancelled too
		path string
		want int
	}{{"/tasks/cancel?name=a&limit=10", 25}, {"/tasks/retry?status=failed&limit=10", 15}} {
		path, want := test.path, test.want
		total, cursor := 0, ""
		for calls := 0; ; calls++ {
			a := g.do(t, "POST", path+cursor, "")
			if a.status != 200 || calls > 5 {
				t.Fatalf("call %d of %s = %d %s", calls, path, a.status, a.body)
			}
			var got struct {
				Cancelled, Retried int
				Next               *string `json:"next_cursor"`
			}
			if err := json.Unmarshal([]byte(a.body), &got); err != nil {
				t.Fatal(err)
			}
			if total += got.Cancelled + got.Retried; got.Cancelled+got.Retried > 10 {
				t.Errorf("%s changed %d tasks at once", path, got.Cancelled+got.Retried)
			}
			if got.Next == nil {
				break
			}
			cursor = "&cursor=" + *got.Next
			for _, other := range []string{strings.Replace(path, "=a", "=b", 1), strings.Replace(path, "failed", "cancelled", 1), strings.Replace(path, "cancel", "retry", 1), path + "&created_after=2026-01-01T00:00:00Z"} {
				if other == path {
					continue
				}
				if a := g.do(t, "POST", other+cursor, ""); a.status != 422 || !strings.Contains(a.str("errors"), `["query","cursor"]`) {
					t.Errorf("%s with the cursor of %s = %d %s, want 422", other, path, a.status, a.body)
				}
			}
		}
		if total != want {
			t.Errorf("%s changed %d tasks, want %d", path, total, want)
		}
	}
}

// A task that somebody holds locked is passed over and told of; the others are not held up.
func TestBulkPassesOverLockedTasks(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.bulkTasks(t, 10, "a", statusPending)
	tx, err := connect(t, g.dsn).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), "SELECT FROM tasks WHERE task_id = '00000000-0000-0000-0000-000000000003' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if a := g.do(t, "POST", "/tasks/cancel?name=a", ""); a.body != `{"cancelled":9,"cancel_requested":0,"skipped":1,"next_cursor":null}` {
		t.Errorf("%d %s, want 9 cancelled and 1 skipped", a.status, a.body)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := g.do(t, "POST", "/tasks/cancel?name=a", ""); a.body != `{"cancelled":1,"cancel_requested":0,"skipped":0,"next_cursor":null}` {
		t.Errorf("%d %s, want the last one cancelled", a.status, a.body)
	}
}

func TestBulkRefusals(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.bulkTasks(t, 3, "a", statusPending)
	g.bulkTasks(t, 3, "a", statusFailed)
	for query, want := range map[string][]string{
		"":                                    {"missing status"},
		"limit=5":                             {"missing status"},
		"name=":                               {"string_too_short name"},
		"name=a&name=b":                       {"value_error name"},
		"name=%00":                            {"string_pattern_mismatch name"},
		"name=%ff":                            {"string_pattern_mismatch name"},
		"status=completed":                    {"literal_error status"},
		"status=":                             {"literal_error status"},
		"status=failed,pending":               {"literal_error status"},
		"created_after=yesterday":             {"datetime_parsing created_after"},
		"created_before=0000-01-01T00:00:00Z": {"datetime_parsing created_before"},
		"name=a&limit=0":                      {"greater_than_equal limit"},
		"name=a&limit=1001":                   {"less_than_equal limit"},
		"name=a&limit=99999999999999999999":   {"less_than_equal limit"},
		"name=a&limit=ten":                    {"int_type limit"},
		"name=a&cursor=":                      {"value_error cursor"},
		"name=a&cursor=!":                     {"value_error cursor"},
		"name=a&cursor=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA": {"value_error cursor"},
		"name=a&dry_run=1": {"extra_forbidden dry_run"},
		"%zz":              {"value_error "},
		"nmae=x&limit=-1&created_after=x&status=done": {"literal_error status", "datetime_parsing created_after", "greater_than_equal limit", "extra_forbidden nmae"},
	} {
		for _, path := range []string{"/tasks/cancel", "/tasks/retry"} {
			a := g.do(t, "POST", path+"?"+query, "")
			var p problem
			if err := json.Unmarshal([]byte(a.body), &p); err != nil {
				t.Fatalf("%s?%s = %d %s: %v", path, query, a.status, a.body, err)
			}
			var got []string
			for _, e := range p.Errors {
				name := ""
				if len(e.Loc) == 2 {
					name = fmt.Sprint(e.Loc[1])
				}
				if e.Loc[0] != "query" {
					t.Errorf("%s?%s: loc %v", path, query, e.Loc)
				}
				got = append(got, e.Type+" "+name)
			}
			if a.status != 422 || !slices.Equal(got, want) || !strings.Contains(p.Detail, "query") {
				t.Errorf("%s?%s = %d %q %q, want 422 %q", path, query, a.status, p.Detail, got, want)
			}
		}
	}
	if diff := cmp.Diff(map[string]int{"pending": 3, "failed": 3}, g.statuses(t)); diff != "" {
		t.Errorf("refused requests changed tasks (-want +got):\n%s", diff)
	}
}

// FuzzBulkQuery looks for queries that panic, or that choose everything without saying so.
func FuzzBulkQuery(f *testing.F) {
	for _, seed := range []string{"", "name=a", "status=failed,cancelled&limit=5", "created_after=2026-01-01T00:00:00Z", "cursor=AAAA&name=a", "%", "name=%00", ";"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		allowed := []string{statusFailed, statusCancelled}
		b, err := readBulk(&url.URL{Path: "/tasks/retry", RawQuery: raw}, allowed)
		if err != nil {
			if errs, ok := errors.AsType[fieldErrors](err); !ok || len(errs) == 0 {
				t.Errorf("%q: error %v", raw, err)
			}
			return
		}
		if b.limit < 1 || b.limit > maxBulk || len(b.statuses) == 0 || !strings.ContainsAny(raw, "=") {
			t.Errorf("%q is read as %+v", raw, b)
		}
		if from, ok := b.position(b.cursor(b.from)); b.since.Before(b.from.created) && b.from.created.Before(b.before) && (!ok || from != b.from) {
			t.Errorf("%q: the cursor does not come back", raw)
		}
	})
}

// The paths of what is done to many tasks are no ids of tasks.
func TestBulkMethods(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for _, path := range []string{cancelPath, retryPath} {
		for _, method := range []string{"GET", "PUT", "DELETE"} {
			if a := g.do(t, method, path, ""); a.status != 405 || a.header.Get("Allow") != "POST" {
				t.Errorf("%s %s = %d, Allow %q; want 405, POST", method, path, a.status, a.header.Get("Allow"))
			}
		}
	}
}
