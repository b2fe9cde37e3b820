package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
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
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

// A gateway is a server under test, with the real limits, on a database of its own choice.
type gateway struct {
	*httptest.Server
	server   *server
	pools    *pools
	contract *contract // which every answer must keep
	dsn      string
	up       atomic.Bool // what the gateway is told about the stream
	mu       sync.Mutex
	sent     []entry // what it published
}

// testConfig returns the settings that a gateway reads, at their defaults.
func testConfig() config {
	return config{
		Gateway:        true,
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
	g := &gateway{pools: p, contract: testContract(t), dsn: dsn}
	g.up.Store(true)
	g.server = newServer(log, cfg, p, handlers, hints{publish: g.publish, up: g.up.Load, depth: noDepth}, newMetrics())
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

// noDepth is what a gateway without a stream knows of it.
func noDepth(context.Context, []string) (streamDepth, error) {
	return streamDepth{}, errors.New("no stream")
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
	a := answer{resp.StatusCode, resp.Header, string(b)}
	if err != nil {
		return a, err
	}
	return a, g.keeps(method, path, a)
}

// keeps returns in what an answer departs from the contract. A process without the gateway role
// answers as if it had no path but those of the probes.
func (g *gateway) keeps(method, target string, a answer) error {
	if !g.server.cfg.Gateway && a.status == http.StatusNotFound {
		target = "/unknown"
	}
	return g.contract.check(method, target, a)
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
	a := answer{resp.StatusCode, resp.Header, string(b)}
	if method, rest, ok := strings.Cut(request, " "); ok && a.header.Get("X-Request-Id") != "" { // else net/http answered itself
		target, _, _ := strings.Cut(rest, " ")
		if err := g.keeps(method, target, a); err != nil {
			t.Error(err)
		}
	}
	return a
}
