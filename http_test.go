package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

// A gateway is a server under test, with the real limits, on a database of its own choice.
type gateway struct {
	*httptest.Server
	server *server
	pools  *pools
	dsn    string
	up     atomic.Bool // what the gateway is told about the stream
	mu     sync.Mutex
	sent   []entry // what it published
}

// testConfig returns the settings that a gateway reads, at their defaults.
func testConfig() config {
	return config{
		MaxRetries:     3,
		TaskTimeout:    5 * time.Minute,
		MaxTaskTimeout: 24 * time.Hour,
		Queues:         []queueWeight{{"default", 1}, {"critical", 6}},
	}
}

// startGateway starts a server on the database that dsn names. change, if not nil, may
// alter its settings.
func startGateway(t testing.TB, dsn string, change func(*config)) *gateway {
	t.Helper()
	return startGatewayLog(t, dsn, change, testLog(t))
}

func startGatewayLog(t testing.TB, dsn string, change func(*config), log *slog.Logger) *gateway {
	t.Helper()
	cfg := testConfig()
	if change != nil {
		change(&cfg)
	}
	p, err := openPools(t.Context(), dsn, testLease)
	if err != nil {
		t.Fatal(err)
	}
	handlers := newHandlerTable(cfg)
	handlers.handle(anyName, demo)
	handlers.handle("fail_task", fail)
	g := &gateway{pools: p, dsn: dsn}
	g.up.Store(true)
	g.server = newServer(log, cfg, p, handlers, hints{publish: g.publish, up: g.up.Load})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- g.server.run(ctx) }()
	g.Server = httptest.NewUnstartedServer(nil)
	g.Config = g.server.httpServer()
	g.Start()
	t.Cleanup(func() {
		g.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		p.close()
	})
	return g
}

func (g *gateway) publish(entries []entry) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sent = append(g.sent, entries...)
}

func (g *gateway) published() []entry {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]entry(nil), g.sent...)
}

// exec runs a statement on a connection of its own.
func (g *gateway) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	conn := connect(t, g.dsn)
	if _, err := conn.Exec(context.WithoutCancel(t.Context()), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// number returns what a query for one number says.
func (g *gateway) number(t testing.TB, sql string, args ...any) (n int) {
	t.Helper()
	conn := connect(t, g.dsn)
	if err := conn.QueryRow(context.WithoutCancel(t.Context()), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// An answer is a response read to its end.
type answer struct {
	status int
	header http.Header
	body   string
}

// str returns a member of a JSON object, a string as it is and anything else as JSON.
func (a answer) str(member string) string {
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(a.body), &object); err != nil {
		return "not JSON: " + a.body
	}
	var s string
	if json.Unmarshal(object[member], &s) == nil && string(object[member]) != "null" {
		return s
	}
	return string(object[member])
}

// do sends one request; header holds names and values in turn.
func (g *gateway) do(t testing.TB, method, path, body string, header ...string) answer {
	t.Helper()
	a, err := g.try(t.Context(), method, path, strings.NewReader(body), header...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (g *gateway) try(ctx context.Context, method, path string, body io.Reader, header ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, g.URL+path, body)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header[header[i]] = append(req.Header[header[i]], header[i+1])
	}
	client := *g.Client()
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(b)}, err
}

// post submits body with a JSON Content-Type.
func (g *gateway) post(t testing.TB, body string, header ...string) answer {
	t.Helper()
	return g.do(t, "POST", "/tasks", body, append([]string{"Content-Type", "application/json"}, header...)...)
}

// submitted posts body, which must be accepted, and returns the task's id.
func (g *gateway) submitted(t testing.TB, body string, header ...string) string {
	t.Helper()
	a := g.post(t, body, header...)
	if a.status != 202 {
		t.Fatalf("POST %s = %d %s, want 202", body, a.status, a.body)
	}
	return a.str("task_id")
}

var variable = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00|-[0-9a-f]{13}"`)

// transcript renders an answer without what differs from run to run.
func transcript(a answer) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %s\n", a.status, http.StatusText(a.status))
	h := a.header.Clone()
	h.Del("Date")
	if err := h.Write(&b); err != nil {
		panic(err)
	}
	b.WriteString("\n" + a.body + "\n")
	text := strings.ReplaceAll(b.String(), "\r\n", "\n")
	return variable.ReplaceAllStringFunc(text, func(s string) string {
		switch {
		case strings.HasSuffix(s, `"`):
			return `-<us>"`
		case strings.Contains(s, "T"):
			return "<time>"
		}
		return "<uuid>"
	})
}

// golden compares text with a file of testdata.
func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

func TestTranscripts(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	key := []string{"Idempotency-Key", "demo-key-001"}
	const video = `{"name": "process_video", "payload": {"file": "clip.mp4"}}`

	golden(t, "accepted.txt", transcript(g.post(t, video, key...)))
	golden(t, "replayed_pending.txt", transcript(g.post(t, video, key...)))
	id := g.post(t, video, key...).str("task_id")
	golden(t, "pending.txt", transcript(g.do(t, "GET", "/tasks/"+id, "")))

	g.exec(t, `UPDATE tasks SET status = 'completed', attempt = 1, started_at = now(), finished_at = now(), updated_at = now(),
		result = '{"processed": true, "name": "process_video"}' WHERE task_id = $1`, id)
	golden(t, "replayed_completed.txt", transcript(g.post(t, video, key...)))
	completed := g.do(t, "GET", "/tasks/"+id, "")
	golden(t, "completed.txt", transcript(completed))
	golden(t, "not_modified.txt", transcript(g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", completed.header.Get("Etag"))))

	golden(t, "key_reused.txt", transcript(g.post(t, `{"name":"process_video","payload":{"file":"OTHER.mp4"}}`, key...)))
	golden(t, "validation.txt", transcript(g.post(t, `{"payload":[1],"max_retries":"x"}`)))
	golden(t, "malformed.txt", transcript(g.post(t, `{"name":"a",}`)))
	golden(t, "media_type.txt", transcript(g.do(t, "POST", "/tasks", `{"name":"a"}`, "Content-Type", "application/x-www-form-urlencoded")))
	golden(t, "method.txt", transcript(g.do(t, "PUT", "/tasks", "")))
	golden(t, "no_uuid.txt", transcript(g.do(t, "GET", "/tasks/not-a-uuid", "")))
	golden(t, "no_path.txt", transcript(g.do(t, "GET", "/nothing", "")))
	golden(t, "key_invalid.txt", transcript(g.post(t, video, "Idempotency-Key", `"open`)))
	golden(t, "unknown_field.txt", transcript(g.post(t, `{"name":"a","max_retires":9}`)))

	g.exec(t, `UPDATE tasks SET status = 'pending', attempt = 2, retry_count = 1, result = NULL, finished_at = NULL, published_at = NULL,
		updated_at = now(), run_at = now() + interval '20 s', error_message = E'line one\n"two" <b>',
		attempts = task_ledger(attempts, 2, 'host-1-abc', started_at, 'failed', 'no "luck"') WHERE task_id = $1`, id)
	waiting := g.do(t, "GET", "/tasks/"+id, "")
	if s := waiting.header.Get("Retry-After"); s != "20" {
		t.Errorf("Retry-After of a task due in 20 s = %s, want 20", s)
	}
	golden(t, "waiting.txt", transcript(waiting))
}

// The time a task was accepted is one text wherever it is shown.
func TestAcceptedAtIsCreatedAt(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	first := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
	again := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
	shown := g.do(t, "GET", first.header.Get("Location"), "")
	if at := first.str("accepted_at"); again.str("accepted_at") != at || shown.str("created_at") != at {
		t.Errorf("accepted_at %s, replayed %s, created_at %s: want them equal", at, again.str("accepted_at"), shown.str("created_at"))
	}
}

func TestShowTask(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","payload":{"id":12345678901234567890,"y":1.00,"s":"<&>\u2028\ud83d\ude00","n":{"e":[]}}}`)
	shown := g.do(t, "GET", "/tasks/"+id, "")
	if want := `{"n":{"e":[]},"s":"<&>` + "\u2028" + `😀","y":1.00,"id":12345678901234567890}`; shown.str("payload") != want {
		t.Errorf("payload = %s, want %s", shown.str("payload"), want)
	}
	if upper := g.do(t, "GET", "/tasks/"+strings.ToUpper(id), ""); upper.body != shown.body {
		t.Errorf("GET by upper-case id = %d %s", upper.status, upper.body)
	}
	head := g.do(t, "HEAD", "/tasks/"+id, "")
	if head.status != 200 || head.body != "" || head.header.Get("Content-Length") != fmt.Sprint(len(shown.body)) || head.header.Get("Etag") != shown.header.Get("Etag") {
		t.Errorf("HEAD = %d %v %q", head.status, head.header, head.body)
	}
	if s := shown.header.Get("Retry-After"); s != "1" {
		t.Errorf("Retry-After of a pending task = %q, want 1", s)
	}
	for _, bad := range []string{
		uuid.NewString(), "a%00b", "a%2Fb", "%ff", "{" + id + "}", strings.ReplaceAll(id, "-", ""), "urn:uuid:" + id, id[:35] + "g", strings.Repeat("x", 5000),
	} {
		a := g.do(t, "GET", "/tasks/"+bad, "")
		if a.status != 404 || !strings.HasPrefix(a.str("detail"), "Task '") || len(a.body) > 1500 {
			t.Errorf("GET /tasks/%.50s = %d %s, want 404", bad, a.status, a.body)
		}
	}
}

func TestETag(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	tag := g.do(t, "GET", "/tasks/"+id, "").header.Get("Etag")
	for value, want := range map[string]int{
		tag: 304, "W/" + tag: 304, "*": 304, `"x", ` + tag: 304, `"x"`: 200, strings.Trim(tag, `"`): 200, "": 200,
	} {
		if a := g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", value); a.status != want || want == 304 && (a.body != "" || a.header.Get("Etag") != tag) {
			t.Errorf("If-None-Match: %s = %d %q, want %d", value, a.status, a.body, want)
		}
	}
	seen := map[string]string{tag: "submitted"}
	for _, set := range []string{
		"status = 'processing', lease_until = now()", "cancel_requested = true",
		"status = 'pending', lease_until = NULL, retry_count = 1", "status = 'failed'",
	} {
		g.exec(t, "UPDATE tasks SET updated_at = now(), "+set+" WHERE task_id = $1", id)
		a := g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", tag)
		tag = a.header.Get("Etag")
		if before, old := seen[tag]; a.status != 200 || old {
			t.Errorf("after %s: %d, tag %s (as %s)", set, a.status, tag, before)
		}
		seen[tag] = set
	}
}

func TestNextRetry(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","delay_ms":60000}`)
	check := func(what string, waits bool) {
		t.Helper()
		a := g.do(t, "GET", "/tasks/"+id, "")
		if got := a.str("next_retry_at"); (got != "null") != waits || waits && got != a.str("run_at") {
			t.Errorf("%s: next_retry_at = %s, run_at %s", what, got, a.str("run_at"))
		}
	}
	check("delayed, never tried", false)
	g.exec(t, "UPDATE tasks SET retry_count = 1, updated_at = now(), run_at = now() + interval '1 s' WHERE task_id = $1", id)
	check("waits after a failure", true)
	g.exec(t, "UPDATE tasks SET updated_at = now(), run_at = now() WHERE task_id = $1", id)
	check("given back by a worker that stopped", false)
	g.exec(t, "UPDATE tasks SET status = 'processing', lease_until = now(), updated_at = now() WHERE task_id = $1", id)
	check("runs again", false)
}

func TestHealth(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	for _, path := range []string{"/health", "/healthz", "/livez"} {
		golden(t, "health.txt", transcript(g.do(t, "GET", path, "")))
	}
	golden(t, "ready.txt", transcript(g.do(t, "GET", "/readyz", "")))
	g.up.Store(false)
	golden(t, "ready_degraded.txt", transcript(g.do(t, "GET", "/readyz", "")))
	g.server.drain()
	golden(t, "ready_draining.txt", transcript(g.do(t, "GET", "/readyz", "")))
	if a := g.do(t, "GET", "/livez", ""); a.status != 200 {
		t.Errorf("livez while draining = %d, want 200", a.status)
	}
}

func TestReadyWithoutSchema(t *testing.T) {
	t.Parallel()
	g := startGateway(t, emptyDatabase(t), nil)
	golden(t, "ready_unavailable.txt", transcript(g.do(t, "GET", "/readyz", "")))
	if a := g.post(t, `{"name":"a"}`); a.status != 503 {
		t.Errorf("POST without a schema = %d, want 503", a.status)
	}
}

// Probes answer within their limit and share one connection also when PostgreSQL takes
// connections and never answers, as a stopped process does.
func TestReadyWhenFrozen(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	var accepted atomic.Int32
	go func() {
		for {
			conn, err := silent.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			t.Cleanup(func() { conn.Close() })
		}
	}()
	g := startGateway(t, "postgres://nobody@"+silent.Addr().String()+"/none?sslmode=disable", nil)
	var wg sync.WaitGroup
	start := time.Now()
	for range 20 {
		wg.Go(func() {
			a, err := g.try(t.Context(), "GET", "/readyz", nil)
			if err != nil || a.status != 503 || a.str("status") != "unavailable" {
				t.Errorf("readyz = %d %s, %v", a.status, a.body, err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("20 probes took %v, want at most 3 s", took)
	}
	// Three more are the lease pool's, which it opens by itself.
	if n := accepted.Load(); n > 3+3 {
		t.Errorf("20 probes made %d connections, want at most 6", n)
	}
	if a := g.do(t, "GET", "/health", ""); a.status != 200 {
		t.Errorf("health = %d, want 200", a.status)
	}
}

// PostgreSQL stopped: 503 at once, nothing else, and service as before when it is back.
func TestPostgresStopped(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	var lines lineLog
	g := startGatewayLog(t, pg.createDatabase(t, "gateway"), nil, lines.logger())
	id := g.submitted(t, `{"name":"a"}`)
	pg.stop()
	for i := range 20 {
		start := time.Now()
		a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
		b := g.do(t, "GET", "/tasks/"+id, "")
		if a.status != 503 || b.status != 503 || a.header.Get("Retry-After") != "1" || b.header.Get("Retry-After") != "1" {
			t.Fatalf("POST %d %s, GET %d %s: want 503", a.status, a.body, b.status, b.body)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("request %d took %v, want less than 1 s", i, took)
		}
	}
	eventually(t, "readyz says unavailable", func() bool { return g.do(t, "GET", "/readyz", "").status == 503 })
	if err := pg.start(); err != nil {
		t.Fatal(err)
	}
	if a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k"); a.status != 202 {
		t.Errorf("POST after the restart = %d %s, want 202", a.status, a.body)
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET after the restart = %d %s, want 200", a.status, a.body)
	}
	eventually(t, "readyz says ok", func() bool { return g.do(t, "GET", "/readyz", "").status == 200 })
	if away, back := lines.count("postgres does not serve"), lines.count("postgres is back"); away != 1 || back != 1 {
		t.Errorf("%d lines say that PostgreSQL went and %d that it is back, want one of each", away, back)
	}
}

// A restart leaves every pooled connection dead. Nobody is to see that.
func TestPostgresRestarted(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	g := startGateway(t, pg.createDatabase(t, "gateway"), nil)
	id := g.submitted(t, `{"name":"a"}`)
	warm := func() {
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if a, err := g.try(t.Context(), "GET", "/tasks/"+id, nil); err != nil || a.status != 200 {
					t.Errorf("GET = %d %s, %v, want 200", a.status, a.body, err)
				}
			})
			wg.Go(func() {
				a, err := g.try(t.Context(), "POST", "/tasks", strings.NewReader(`{"name":"a"}`), "Content-Type", "application/json")
				if err != nil || a.status != 202 {
					t.Errorf("POST = %d %s, %v, want 202", a.status, a.body, err)
				}
			})
		}
		wg.Wait()
	}
	warm()
	for range 3 {
		pg.restart(t)
		warm()
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 81 {
		t.Errorf("%d rows, want 81", n)
	}
}

// Field case 127.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	const terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
	g.exec(t, "DO $$ BEGIN EXECUTE 'ALTER DATABASE ' || current_database() || ' SET default_transaction_read_only = on'; END $$")
	g.number(t, terminate)
	for range 5 {
		if a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k"); a.status != 503 || a.header.Get("Retry-After") == "" {
			t.Fatalf("POST to a read-only database = %d %s, want 503", a.status, a.body)
		}
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET from a read-only database = %d %s, want 200", a.status, a.body)
	}
	writable := &gateway{dsn: g.dsn + "&default_transaction_read_only=off"}
	writable.exec(t, "DO $$ BEGIN EXECUTE 'ALTER DATABASE ' || current_database() || ' RESET default_transaction_read_only'; END $$")
	g.number(t, terminate)
	eventually(t, "POST is accepted again", func() bool { return g.post(t, `{"name":"a"}`, "Idempotency-Key", "k").status == 202 })
}

// Field case 51: somebody holds the whole table.
func TestTableLocked(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	ctx := context.WithoutCancel(t.Context())
	rival, err := connect(t, g.dsn).Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rival.Exec(ctx, "LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			a, err := g.try(ctx, "POST", "/tasks", strings.NewReader(`{"name":"a"}`), "Content-Type", "application/json")
			if err != nil || a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("POST = %d %s, %v, want 503", a.status, a.body, err)
			}
		})
	}
	for range 10 {
		wg.Go(func() {
			a, err := g.try(ctx, "GET", "/tasks/"+id, nil)
			if err != nil || a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("GET = %d %s, %v, want 503", a.status, a.body, err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the last answer came after %v, want at most 10 s", took)
	}
	if err := rival.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	if a := g.post(t, `{"name":"a"}`); a.status != 202 {
		t.Errorf("POST afterwards = %d %s, want 202", a.status, a.body)
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET afterwards = %d %s, want 200", a.status, a.body)
	}
	if took := time.Since(back); took > 2*time.Second {
		t.Errorf("service was back after %v, want at most 2 s", took)
	}
	eventually(t, "nothing waits beside the batches", func() bool { return g.server.intake.waiting.Load() == 0 })
}

// Field case 53: the modes of poolers that keep no prepared statements.
func TestExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			g := startGateway(t, newDatabase(t)+"&default_query_exec_mode="+mode, func(c *config) { c.MaxBacklogAge = time.Hour })
			const body = `{"name":"it's \"a\"","payload":{"q":"'\\\"ü😀","n":[1.00,{}]}}`
			id := g.submitted(t, body, "Idempotency-Key", "k")
			if a := g.post(t, body, "Idempotency-Key", "k"); a.status != 200 || a.str("task_id") != id {
				t.Errorf("replay = %d %s, want 200", a.status, a.body)
			}
			if a := g.do(t, "GET", "/tasks/"+id, ""); a.str("payload") != `{"n":[1.00,{}],"q":"'\\\"ü😀"}` || a.str("name") != `it's "a"` {
				t.Errorf("GET = %d %s", a.status, a.body)
			}
			if a := g.do(t, "GET", "/readyz", ""); a.status != 200 {
				t.Errorf("readyz = %d %s, want 200", a.status, a.body)
			}
		})
	}
}

// A lineLog keeps the messages that were logged.
type lineLog struct {
	mu    sync.Mutex
	lines []string
}

func (l *lineLog) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (l *lineLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(b))
	return len(b), nil
}

func (l *lineLog) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.lines...)
}

func (l *lineLog) count(text string) (n int) {
	for _, line := range l.all() {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// raw sends bytes as they are and reads one answer.
func (g *gateway) raw(t testing.TB, request string) answer {
	t.Helper()
	conn, err := net.Dial("tcp", g.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%.200q: %v", request, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.Close {
		resp.Header.Set("Connection", "close") // which ReadResponse takes out
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}
