package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// programEnv is the environment of a whole program on the test servers.
func programEnv(t testing.TB) map[string]string {
	return map[string]string{
		"HTTP_ADDR": "127.0.0.1:0", "DATABASE_URL": newDatabase(t), "REDIS_URL": newRedisURL(t), "STREAM_NAME": streamName(t),
		"BLOCK_MS": "100", "SWEEP_INTERVAL": "100ms", "SHUTDOWN_GRACE": "5s",
	}
}

// startMain calls run as main does, and returns the base URL and what stops it.
func startMain(t testing.TB, env map[string]string, logw io.Writer) (url string, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- run(ctx, func(name string) string { return env[name] }, nil, logw, func(addr string) { ready <- addr })
	}()
	stop = sync.OnceValue(func() error {
		cancel(errors.New("test over"))
		return <-ended
	})
	select {
	case addr := <-ready:
		t.Cleanup(func() { stop() })
		return "http://" + addr, stop
	case err := <-ended:
		t.Fatalf("run ended: %v", err)
		return "", nil
	}
}

func getJSON(t testing.TB, url string) map[string]any {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var body map[string]any
	if err := json.NewDecoder(response.Body).Decode(&body); err != nil {
		t.Fatal(err)
	}
	return body
}

func postTask(t testing.TB, url, key, body string) (int, map[string]any) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/tasks", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var answer map[string]any
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer
}

// The original's session, through the whole program: 202, then 200 with the same id, and
// the demonstration set's results.
func TestProgramSession(t *testing.T) {
	t.Parallel()
	url, stop := startMain(t, programEnv(t), io.Discard)
	const body = `{"name": "process_video", "payload": {"file": "clip.mp4"}}`
	status, first := postTask(t, url, "demo-key-001", body)
	if status != http.StatusAccepted || first["status"] != "accepted" {
		t.Fatalf("first POST = %d %v", status, first)
	}
	id := first["task_id"].(string)
	_, failing := postTask(t, url, "", `{"name": "fail_task", "max_retries": 0}`)
	var task map[string]any
	eventually(t, "task completed", func() bool {
		task = getJSON(t, url+"/tasks/"+id)
		return task["status"] == "completed"
	}, func() any { return task })
	if got := fmt.Sprint(task["result"]); got != "map[name:process_video processed:true]" {
		t.Errorf("result = %v", got)
	}
	status, again := postTask(t, url, "demo-key-001", body)
	if status != http.StatusOK || again["task_id"] != id || again["status"] != "completed" || again["accepted_at"] != first["accepted_at"] {
		t.Errorf("second POST = %d %v, first was %v", status, again, first)
	}
	eventually(t, "failing task failed", func() bool {
		task = getJSON(t, url+"/tasks/"+failing["task_id"].(string))
		return task["status"] == "failed"
	}, func() any { return task })
	if task["error_message"] != "Simulated failure for testing" {
		t.Errorf("error_message = %v", task["error_message"])
	}
	if err := stop(); err != nil {
		t.Errorf("run = %v, want nil", err)
	}
	if _, err := http.Get(url + "/health"); err == nil {
		t.Error("still answers after run returned")
	}
}

// Field case 105: after the one context ended nothing runs on. Not parallel, since it
// counts the goroutines of the process.
func TestProgramLeavesNothing(t *testing.T) {
	env := programEnv(t)
	before := runtime.NumGoroutine()
	url, stop := startMain(t, env, io.Discard)
	for i := range 50 {
		if status, answer := postTask(t, url, "", fmt.Sprintf(`{"name": "x", "payload": {"i": %d}}`, i)); status != http.StatusAccepted {
			t.Fatalf("POST = %d %v", status, answer)
		}
	}
	if err := stop(); err != nil {
		t.Fatalf("run = %v", err)
	}
	http.DefaultClient.CloseIdleConnections()
	eventually(t, "goroutines ended", func() bool { return runtime.NumGoroutine() <= before }, func() any {
		stacks := make([]byte, 1<<20)
		return string(stacks[:runtime.Stack(stacks, true)])
	})
}

// Bad settings and a bad handlers file stop the start, all problems in one go.
func TestProgramBadSettings(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/handlers.json"
	if err := os.WriteFile(file, []byte(`{"a": {"exec": []}, "b": {"go": "nothing"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"LEASE": "abc", "WORKER_CONCURRENCY": "1_000", "HANDLERS_FILE": file}
	err := run(t.Context(), func(name string) string { return env[name] }, nil, io.Discard, func(string) {})
	if _, ok := errors.AsType[usageError](err); !ok {
		t.Fatalf("run = %v, want a usage error", err)
	}
	for _, want := range []string{"LEASE", "abc", "WORKER_CONCURRENCY", "1_000", `"a"`, `"b"`, "nothing"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
}

// Field case 100: a port in use ends the start with the address.
func TestProgramPortInUse(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	env := map[string]string{"HTTP_ADDR": l.Addr().String(), "DATABASE_URL": "postgres://nobody@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1"}
	err = run(t.Context(), func(name string) string { return env[name] }, nil, io.Discard, func(string) {})
	if err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("run = %v, want an error that names %s", err, l.Addr())
	}
}

// Field case 45: PostgreSQL that is not there is asked for as often as set, each attempt
// logged with its number, and then the start fails; a signal ends the wait.
func TestProgramWaitsForPostgres(t *testing.T) {
	t.Parallel()
	env := map[string]string{
		"HTTP_ADDR": "127.0.0.1:0", "DATABASE_URL": "postgres://nobody:secretword@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1",
		"STARTUP_MAX_RETRIES": "2", "STARTUP_RETRY_DELAY_S": "1",
	}
	var log bytes.Buffer
	err := run(t.Context(), func(name string) string { return env[name] }, nil, &log, func(string) {})
	if err == nil || !strings.Contains(err.Error(), "gave up after 2 attempts") {
		t.Errorf("run = %v", err)
	}
	for _, want := range []string{`"attempt":1`, `"attempt":2`, `"max_attempts":2`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("log lacks %s:\n%s", want, log.String())
		}
	}
	if strings.Contains(log.String()+fmt.Sprint(err), "secretword") {
		t.Errorf("password shown:\n%s\n%v", log.String(), err)
	}
	env["STARTUP_RETRY_DELAY_S"], env["STARTUP_MAX_RETRIES"] = "60", "100"
	ctx, cancel := context.WithTimeoutCause(t.Context(), 300*time.Millisecond, errShutdown)
	defer cancel()
	if err := run(ctx, func(name string) string { return env[name] }, nil, io.Discard, func(string) {}); !errors.Is(err, errShutdown) {
		t.Errorf("interrupted run = %v, want %v", err, errShutdown)
	}
}

// The image's health check asks the process at HTTP_ADDR.
func TestHealthcheck(t *testing.T) {
	t.Parallel()
	url, stop := startMain(t, programEnv(t), io.Discard)
	addr := strings.TrimPrefix(url, "http://")
	if err := healthcheck(t.Context(), addr); err != nil {
		t.Errorf("healthcheck = %v", err)
	}
	_, port, _ := net.SplitHostPort(addr)
	if err := healthcheck(t.Context(), ":"+port); err != nil {
		t.Errorf("healthcheck of :%s = %v", port, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := healthcheck(t.Context(), addr); err == nil {
		t.Error("healthcheck of a stopped process succeeds")
	}
}

// A PostgreSQL that answers and goes away again during the start is waited for, as one is
// that was not there yet.
func TestProgramStartsThroughRestart(t *testing.T) {
	t.Parallel()
	direct := newDatabase(t)
	through := newLink(t, "127.0.0.1:0", testPostgres(t).socket)
	name, _, _ := strings.Cut(strings.TrimPrefix(direct, "postgres://nexusflow@/"), "?")
	through.loseReply("HasKeyIndex")
	env := programEnv(t)
	env["DATABASE_URL"] = through.dsn(name)
	env["STARTUP_RETRY_DELAY_S"] = "1"
	url, _ := startMain(t, env, io.Discard)
	if n := through.repliesLost(); n != 1 {
		t.Fatalf("%d replies lost, want 1", n)
	}
	if status, answer := postTask(t, url, "", `{"name": "x"}`); status != http.StatusAccepted {
		t.Errorf("POST = %d %v", status, answer)
	}
}
