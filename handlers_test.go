package main

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// handlersConfig returns a config whose handlers file holds text; none for "".
func handlersConfig(t *testing.T, text string) config {
	t.Helper()
	cfg := config{
		Worker:            true,
		MaxRetries:        3,
		TaskTimeout:       5 * time.Minute,
		MaxTaskTimeout:    24 * time.Hour,
		Backoff:           backoff{base: time.Second, max: time.Minute, jitter: 0.2},
		WorkerConcurrency: 4,
		Queues:            []queueWeight{{"high", 2}, {defaultQueue, 1}},
	}
	if text != "" {
		cfg.HandlersFile = filepath.Join(t.TempDir(), "handlers.json")
		if err := os.WriteFile(cfg.HandlersFile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

func TestDemonstrationSet(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	table, err := loadHandlers(handlersConfig(t, ""), true, slog.New(slog.NewJSONHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(log.String(), "demonstration set"); n != 1 {
		t.Errorf("%d log lines speak of the demonstration set, want 1:\n%s", n, &log)
	}
	if !table.open() {
		t.Error("open() = false, want every name to have a handler")
	}
	if got, want := table.names(), []string{"fail_task"}; !slices.Equal(got, want) {
		t.Errorf("names() = %q, want %q", got, want)
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		h, ok := table.find("send_email")
		if !ok {
			t.Fatal("no handler for send_email")
		}
		task := handlerTask(`{}`)
		task.Name = "send_email"
		result, err := h.run(t.Context(), task)
		if err != nil || resultJSON(t, result) != `{"processed":true,"name":"send_email"}` {
			t.Errorf("send_email = %v, %v", result, err)
		}
		if took := time.Since(start); took != 100*time.Millisecond {
			t.Errorf("send_email took %v, want 100ms", took)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errShutdown)
		if _, err := h.run(ctx, task); err != errShutdown {
			t.Errorf("send_email with an ended context = %v, want the cause", err)
		}
	})
	h, _ := table.find("fail_task")
	if _, err := h.run(t.Context(), handlerTask(`{}`)); err == nil || err.Error() != "Simulated failure for testing" || isPermanent(err) {
		t.Errorf("fail_task = %v", err)
	}
	if result, err := goHandlers()["noop"](t.Context(), handlerTask(`{"n": 12345678901234567890}`)); err != nil ||
		resultJSON(t, result) != `{"n":12345678901234567890}` {
		t.Errorf("noop = %v, %v, want the payload", result, err)
	}
}

func TestLoadHandlers(t *testing.T) {
	t.Parallel()
	cfg := handlersConfig(t, `{
		"full": {"exec": ["sh", "-c", "echo 1"], "timeout": "10m", "max_retries": 0, "queue": "low", "backoff_base": "5s", "backoff_max": "1h"},
		"plain": {"url": "http://user:pw@127.0.0.1:9/x?y=z"},
		"other": {"go": "noop", "queue": "high"}
	}`)
	var log bytes.Buffer
	table, err := loadHandlers(cfg, true, slog.New(slog.NewJSONHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	full, _ := table.find("full")
	if full.kind != "exec" || full.timeout != 10*time.Minute || full.maxRetries != 0 || full.queue != "low" ||
		full.backoff != (backoff{base: 5 * time.Second, max: time.Hour, jitter: 0.2}) {
		t.Errorf("full = %+v", full)
	}
	if result, err := full.run(t.Context(), handlerTask(`{}`)); err != nil || resultJSON(t, result) != "1" {
		t.Errorf("full ran to %v, %v", result, err)
	}
	plain, _ := table.find("plain")
	if plain.kind != "url" || plain.timeout != cfg.TaskTimeout || plain.maxRetries != 3 || plain.queue != defaultQueue || plain.backoff != cfg.Backoff {
		t.Errorf("plain = %+v, want the defaults", plain)
	}
	if h, ok := table.find("unknown"); ok {
		t.Errorf("find(unknown) = %v, want nothing", h)
	}
	if table.open() {
		t.Error("open() = true, want false")
	}
	if got, want := table.names(), []string{"full", "other", "plain"}; !slices.Equal(got, want) {
		t.Errorf("names() = %q, want %q", got, want)
	}
	if got, want := table.queues(), []string{"high", "low"}; !slices.Equal(got, want) {
		t.Errorf("queues() = %q, want %q", got, want)
	}
	if lines := log.String(); strings.Count(lines, "\n") != 2 || !strings.Contains(lines, `"handlers":3`) || strings.Count(lines, `"level":"WARN"`) != 1 || !strings.Contains(lines, `"queue":"low"`) {
		t.Errorf("want the number of handlers and one warning, about queue low:\n%s", &log)
	}

	table.handle("full", noop)
	if h, _ := table.find("full"); h.kind != "go" || h.timeout != cfg.TaskTimeout || h.maxRetries != 3 {
		t.Errorf("full after handle = %+v, want the defaults", h)
	}
	table.handle(anyName, noop)
	if _, ok := table.find("unknown"); !ok || !table.open() {
		t.Error("a handler for * does not serve an unknown name")
	}
}

// TestGatewayNeedsNoExecutables also has no queues of its own to warn about.
func TestGatewayNeedsNoExecutables(t *testing.T) {
	t.Parallel()
	cfg := handlersConfig(t, `{"a": {"exec": ["./no-such-program"], "queue": "low"}}`)
	cfg.Worker = false
	var log bytes.Buffer
	if _, err := loadHandlers(cfg, false, slog.New(slog.NewJSONHandler(&log, nil))); err != nil || strings.Contains(log.String(), `"level":"WARN"`) {
		t.Errorf("loadHandlers = %v, log %q, want no error and no warning", err, &log)
	}
}

// TestHandlersFileProblems wants every one of them at once, each on a line of its own that
// says where it is and holds no secret.
func TestHandlersFileProblems(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, text, want string }{ // want: the lines, without the file's name
		{"empty file", ``, `the JSON ends too early`},
		{"no object", `[]`, `want a JSON object`},
		{"no entries", `{}`, `names no handler`},
		{"cut short", `{"a": {"go": "demo"}`, `the JSON ends too early`},
		{"syntax", "{\n\"a\": {\"go\": \"demo\"}\n\"b\": 1}", `line 3: invalid character '"' after object key:value pair`},
		{"syntax inside", "{\n\"a\": {\"go\": demo}}", `line 2: invalid character 'd' looking for beginning of value`},
		{"trailing comma", "{\n\n\"a\": {\"go\": \"demo\"},\n}", `line 4: invalid character '}'`},
		{"trailing data", `{"a": {"go": "demo"}} {}`, `there is text after the JSON object`},
		{"entry of a wrong type", `{"a": "demo"}`, `"a": want a JSON object`},
		{"null entry", `{"a": null}`, `"a": want a JSON object`},
		{"names twice", `{"a": {"go": "demo"}, "a": {"go": "demo"}}`, `"a": the name is there twice`},
		{"key twice", `{"a": {"go": "demo", "go": "noop"}}`, `"a": "go": the key is there twice`},
		{"impossible names", `{" ": {"go": "demo"}, "a\u0007": {"go": "demo"}, "` + strings.Repeat("x", 129) + `": {"go": "demo"}}`,
			`" ": a name has 1 to 128 characters` + "\n" + `"a\a": a name has 1 to 128 characters` + "\n" + `"` + strings.Repeat("x", 129)},
		{"no kind", `{"a": {"timeout": "5m"}}`, `"a": want exactly one of exec, url and go, not 0 of them`},
		{"two kinds", `{"a": {"go": "demo", "url": "http://h/"}}`, `"a": want exactly one of exec, url and go, not 2 of them`},
		{"unknown keys", `{"a": {"go": "demo", "Timeout": "5m", "schedule": "* * * * *", "payload": {}, "concurrency": 2}}`,
			`"a": "Timeout": unknown key` + "\n" + `"a": "schedule": unknown key` + "\n" + `"a": "payload": unknown key` + "\n" + `"a": "concurrency": unknown key`},
		{"exec", `{"a": {"exec": []}, "b": {"exec": [""]}, "c": {"exec": "ls"}, "d": {"exec": ["ls", null]}, "e": {"exec": null}, "f": {"exec": ["l\u0000s"]}, "g": {"exec": ["./no-such-program"]}}`,
			`"a": "exec": the command is empty
"b": "exec": the command is empty
"c": "exec": want a list of strings, as in ["./run.sh", "-v"]
"d": "exec": want a list of strings
"e": "exec": want a list of strings
"f": "exec": an argument cannot hold a NUL character
"g": "exec": exec: "./no-such-program": stat ./no-such-program: no such file or directory`},
		{"url", `{"a": {"url": "ftp://h/"}, "b": {"url": "/x"}, "c": {"url": "http://"}, "d": {"url": 1}, "e": {"url": "http://bob:hunter2@h:port/"}, "f": {"url": "http://h:70000"}, "g": {"url": "http://:80/"}}`,
			`"a": "url": want an http:// or https:// URL
"b": "url": want an http:// or https:// URL
"c": "url": the URL names no host
"d": "url": want a string
"e": "url": not a valid URL
"f": "url": want a port from 1 to 65535
"g": "url": the URL names no host`},
		{"go", `{"a": {"go": "nope"}, "b": {"go": null}}`, `"a": "go": no function "nope"; known: demo, fail, noop` + "\n" + `"b": "go": want a string`},
		{"timeout", `{"a": {"go": "demo", "timeout": "5x"}, "b": {"go": "demo", "timeout": 5}, "c": {"go": "demo", "timeout": "0s"}, "d": {"go": "demo", "timeout": "25h"}}`,
			`"a": "timeout": not a duration: "5x"; want one like 30s or 1h30m
"b": "timeout": want a duration in a string, as in "30s"
"c": "timeout": 0s is out of range; want 1ms to 24h0m0s
"d": "timeout": 25h0m0s is out of range; want 1ms to 24h0m0s`},
		{"max_retries", `{"a": {"go": "demo", "max_retries": -1}, "b": {"go": "demo", "max_retries": 101}, "c": {"go": "demo", "max_retries": 1.5}, "d": {"go": "demo", "max_retries": "3"}}`,
			`"a": "max_retries": want a whole number from 0 to 100
"b": "max_retries": want a whole number from 0 to 100
"c": "max_retries": want a whole number from 0 to 100
"d": "max_retries": want a whole number from 0 to 100`},
		{"queue", `{"a": {"go": "demo", "queue": "Low"}, "b": {"go": "demo", "queue": ""}, "c": {"go": "demo", "queue": "a b"}}`,
			`"a": "queue": a queue name has 1 to 64 of the characters a-z, 0-9, _ and -
"b": "queue": a queue name
"c": "queue": a queue name`},
		{"backoff", `{"a": {"go": "demo", "backoff_base": "2m"}, "b": {"go": "demo", "backoff_max": "0s"}, "c": {"go": "demo", "backoff_base": "2h", "backoff_max": "1h"}}`,
			`"a": backoff_base 2m0s is above backoff_max 1m0s
"b": "backoff_max": 0s is out of range; want 1ms to 24h0m0s
"c": backoff_base 2h0m0s is above backoff_max 1h0m0s`},
		{"several in one entry", `{"a": {"go": "x", "timeout": "y", "z": 1}}`, `"a": "go": no function` + "\n" + `"a": "timeout": not a duration` + "\n" + `"a": "z": unknown key`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := handlersConfig(t, "x")
			if err := os.WriteFile(cfg.HandlersFile, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := loadHandlers(cfg, true, slog.New(slog.DiscardHandler))
			if err == nil {
				t.Fatal("loadHandlers = nil, want an error")
			}
			got, want := strings.Split(err.Error(), "\n"), strings.Split(tt.want, "\n")
			for i, line := range got {
				if i >= len(want) || !strings.HasPrefix(line, cfg.HandlersFile+": "+want[i]) {
					t.Errorf("line %d: unwanted %s", i+1, line)
				}
			}
			if len(got) != len(want) || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("got\n%v\nwant\n%s", err, tt.want)
			}
		})
	}
}

func TestHandlersFileMissing(t *testing.T) {
	t.Parallel()
	cfg := handlersConfig(t, "")
	cfg.HandlersFile = filepath.Join(t.TempDir(), "no-such-file.json")
	_, err := loadHandlers(cfg, true, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), cfg.HandlersFile) {
		t.Errorf("loadHandlers = %v, want an error that names the file", err)
	}
}

// FuzzHandlersFile: any bytes either list problems, one line each and without the
// secrets of a URL, or make a table whose every handler can run.
func FuzzHandlersFile(f *testing.F) {
	for _, seed := range []string{
		`{"a": {"exec": ["true"]}, "*": {"go": "demo"}}`,
		`{"a": {"url": "http://user:hunter2@host/x", "timeout": "1m", "max_retries": 0, "queue": "low", "backoff_base": "1s", "backoff_max": "2s"}}`,
		`{"a": {"url": "://hunter2"}}`, `{"a": {"exec": [], "go": 1}}`, `{"a": {}, "a": {}}`, `{}`, `[]`, ``, `{"a": {"go": "demo"}} x`,
		`{"a": {"timeout": "-1s"}}`, `{"": {"go": "demo"}}`, "{\"a\\u0000\": {\"go\": \"demo\"}}", `{"a": {"go": "demo", "timeout": 1e999}}`,
	} {
		f.Add([]byte(seed))
	}
	cfg := fastConfig(f)
	cfg.HandlersFile = "handlers.json"
	pusher, err := newPusher(cfg)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		table := newHandlerTable(cfg)
		r := &fileReader{cfg: cfg, table: table, pusher: pusher}
		r.file(data)
		for _, problem := range r.problems {
			if text := problem.Error(); strings.ContainsAny(text, "\n\r\x00") || strings.Contains(text, ":hunter2@") {
				t.Errorf("problem %q", text)
			}
		}
		if len(r.problems) > 0 {
			return
		}
		if len(table.byName) == 0 {
			t.Error("a table without handlers and without problems")
		}
		for name, h := range table.byName {
			if !validTaskName(name) && name != anyName || h.run == nil || h.timeout <= 0 || h.maxRetries < 0 || h.maxRetries > maxRetryLimit ||
				h.backoff.base <= 0 || h.backoff.max < h.backoff.base || h.queue == "" {
				t.Errorf("handler %q = %+v", name, h)
			}
		}
	})
}
