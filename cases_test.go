//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
)

// The tests of the cases files reproduce failures that users of other
// task queues reported. A case that other tests show as well has none here: TESTING.md names them.

// A retry is taken by one of two processes only.
func TestCase11OneRetry(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	ids := members[0].submitMany(100, `{"name":"probe","payload":{"do":"fail once"}}`)
	b.within(60*time.Second, "completed", b.allAre(ids, statusCompleted))
	b.check()
	if n := b.probe.count(); n != 200 {
		t.Errorf("%d runs, want 200", n)
	}
	if n := b.number("SELECT count(*) FROM tasks WHERE retry_count <> 1"); n != 0 {
		t.Errorf("%d tasks with another retry_count than 1", n)
	}
}

// Two processes of one host are two consumers.
func TestCase13TwoNames(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	ids := members[0].submitMany(100, probeTask)
	b.within(60*time.Second, "completed", b.allAre(ids, statusCompleted))
	if n := b.consumers(); n != 2 {
		t.Errorf("%d consumers, want 2", n)
	}
	b.check()
	if n := b.probe.count(); n != 100 {
		t.Errorf("%d runs, want 100", n)
	}
}

func (b *bed) consumers() int {
	b.t.Helper()
	c, err := b.redis.XInfoConsumers(b.t.Context(), "tasks", "workers").Result()
	if err != nil {
		b.t.Fatal(err)
	}
	return len(c)
}

// Names of consumers do not pile up.
func TestCase22ConsumerNames(t *testing.T) {
	longFault(t)
	b := newBed(t, with("BLOCK_MS", "200"))
	a := b.member("A")
	const graceful, killed = 20, 5
	for i := range graceful + killed {
		a.start()
		id := a.submit(probeTask)
		b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
		b.within(20*time.Second, "acknowledged", func() bool { return b.pending() == 0 })
		if i >= graceful {
			a.kill()
		} else if _, code := a.stop(); code != 0 {
			t.Fatalf("ended with code %d", code)
		}
	}
	a.start()
	b.check()
	if n := b.consumers(); n > killed+1 {
		t.Errorf("%d consumers, want at most %d", n, killed+1)
	}
}

// The death of a worker spends no retry: a task without any is run again.
func TestCase28NoRetries(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	id := a.submit(`{"name":"probe","payload":{},"max_retries":0}`)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	a.kill()
	b.probe.release()
	a.start()
	b.soon(faultIdle+2*faultScan, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	if row := b.row(id); row.Attempt != 2 || row.Lost != 1 || row.Retry != 0 {
		t.Errorf("ended as %+v", row)
	}
	b.check()
}

// A blocking read does not hold up a stop, and what is handed to a leaving reader is not
// delayed. The nets that catch lost entries are set so wide that they cannot help.
func TestCase34BlockingReadOnStop(t *testing.T) {
	longFault(t)
	b := newBed(t, with("PEL_IDLE_THRESHOLD_MS", "60000", "LEASE", "60s", "REPUBLISH_AFTER", "60s"))
	a, other := b.member("A"), b.member("B")
	a.start()
	if took, code := a.stop(); code != 0 || took > slack*3*time.Second {
		t.Errorf("an idle process ended with code %d after %v, want 0 within 3s", code, took)
	}
	other.start()
	longest := time.Duration(0)
	for range 30 {
		a.start()
		var id uuid.UUID
		var wg sync.WaitGroup
		wg.Go(func() { a.signal(syscall.SIGTERM) })
		wg.Go(func() { id = other.submit(probeTask) })
		wg.Wait()
		longest = max(longest, b.within(slack*5*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted), b.openTasks))
		if code := a.wait(slack * 4 * time.Second); code != 0 {
			t.Fatalf("A ended with code %d", code)
		}
	}
	t.Logf("the slowest task took %v; promised 5s", longest)
	b.check()
}

// A stop just before a task ends does not spoil the record of its end.
func TestCase36StopAtTheEnd(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.member("A")
	for range 30 {
		a.start()
		runs := b.probe.count()
		a.submit(`{"name":"probe","payload":{"ms":1000}}`)
		b.within(20*time.Second, "runs", func() bool { return b.probe.count() > runs })
		b.pause(950 * time.Millisecond)
		if _, code := a.stop(); code != 0 {
			t.Fatalf("ended with code %d", code)
		}
		if n := b.number("SELECT count(*) FROM tasks WHERE status = 'processing'"); n != 0 {
			t.Fatalf("%d tasks are processing and no process lives", n)
		}
	}
	a.start()
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE status <> 'completed' OR attempt > 2 OR error_message LIKE '%context canceled%'"); n != 0 {
		t.Errorf("%d tasks did not complete within two runs", n)
	}
}

// A stop during a back-off is quick and keeps the retry and its time.
func TestCase38StopDuringBackoff(t *testing.T) {
	longFault(t)
	b := newBed(t, with("REQUEUE_BASE_DELAY_MS", "12000", "REQUEUE_MAX_DELAY_MS", "12000"))
	a := b.started("A")[0]
	id := a.submit(`{"name":"probe","payload":{"do":"fail once"}}`)
	b.within(20*time.Second, "failed once", func() bool { return b.row(id).Retry == 1 })
	b.pause(time.Second)
	if took, code := a.stop(); code != 0 || took > slack*3*time.Second {
		t.Errorf("ended with code %d after %v, want 0 within 3s", code, took)
	}
	a.start()
	b.within(60*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	runs := b.probe.of(id)
	if gap := runs[1].began.Sub(b.probe.endOf(runs[0])); len(runs) != 2 || gap < 10800*time.Millisecond {
		t.Errorf("%d runs, the second %v after the first, want 12s", len(runs), gap)
	}
	b.check()
}

// A handler that cannot be stopped does not keep the process from stopping.
func TestCase42StuckHandler(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.member("A")
	dir := b.t.TempDir()
	script := filepath.Join(dir, "stuck.sh")
	began, free := filepath.Join(dir, "began"), filepath.Join(dir, "free")
	text := fmt.Sprintf("#!/bin/sh\n[ -e %s ] && exit 0\ntrap '' TERM INT HUP\necho $$ >> %s\nwhile :; do sleep 0.1; done\n", free, began)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	a.handlers(fmt.Sprintf(`{"stuck": {"exec": [%q]}}`, script))
	runs := func() int {
		pids, _ := os.ReadFile(began)
		return strings.Count(string(pids), "\n")
	}
	a.start()
	id := a.submit(`{"name":"stuck","payload":{}}`)
	b.within(20*time.Second, "stuck", func() bool { return runs() == 1 })
	took, code := a.stop()
	t.Logf("ended after %v", took)
	if code != 0 || took > faultGrace+2*time.Second+slack*time.Second {
		t.Errorf("ended with code %d after %v, want 0 within %v", code, took, faultGrace+2*time.Second)
	}
	if a.log.count("handlers cut short by shutdown") == 0 {
		t.Error("the log does not tell that a handler was cut short")
	}
	if row := b.row(id); row.Status != statusPending || row.Retry != 0 || row.Lost != 0 {
		t.Errorf("left as %+v, want pending with its budgets untouched", row)
	}
	a.start()
	b.within(20*time.Second, "stuck again", func() bool { return runs() == 2 })
	a.signal(syscall.SIGTERM)
	b.within(20*time.Second, "shutting down", func() bool { return a.log.count("shutting down") == 2 })
	begin := time.Now()
	a.signal(syscall.SIGTERM)
	if code := a.wait(20 * time.Second); code == 0 || time.Since(begin) > slack*500*time.Millisecond {
		t.Errorf("a second signal ended the process with code %d after %v, want another at once", code, time.Since(begin))
	}
	if err := os.WriteFile(free, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	a.start()
	b.within(30*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	if row := b.row(id); row.Retry != 0 || row.Lost != 1 {
		t.Errorf("ended as %+v, want lost_count 1", row)
	}
	pids, err := os.ReadFile(began)
	if err != nil {
		t.Fatal(err)
	}
	for pid := range strings.FieldsSeq(string(pids)) {
		b.within(10*time.Second, "the handler's process is gone", func() bool {
			_, err := os.Stat("/proc/" + pid)
			return os.IsNotExist(err)
		})
	}
	b.check()
}

// The port is taken.
func TestCase100PortTaken(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	second := b.member("B", "HTTP_ADDR", a.address())
	begin := time.Now()
	second.launch()
	code := second.wait(20 * time.Second)
	if took := time.Since(begin); code != 1 || took > slack*2*time.Second {
		t.Errorf("ended with code %d after %v, want 1 within 2s", code, took)
	}
	if text := second.log.stderr.String(); !strings.Contains(text, a.address()) {
		t.Errorf("the message does not name the address: %q", text)
	}
}

// A stop in the process leaves no goroutine.
func TestCase105NothingLeft(t *testing.T) {
	if !allFaults() {
		t.Skip("runs with FAULTS=all")
	}
	b := newBed(t) // not parallel: it counts the goroutines of all
	file := filepath.Join(t.TempDir(), "handlers.json")
	if err := os.WriteFile(file, []byte(`{"noop": {"go": "noop"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"HANDLERS_FILE": file, "DATABASE_URL": b.pg.dsn(b.name), "REDIS_URL": b.rd.url}
	maps.Copy(env, b.env)
	b.db.Reset()
	before := runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	addr := make(chan string, 1)
	go func() {
		ended <- run(ctx, func(name string) string { return env[name] }, nil, io.Discard, func(a string) { addr <- a })
	}()
	client := &http.Client{Transport: new(http.Transport)}
	base := <-addr
	for range 50 {
		resp, err := client.Post("http://"+base+"/tasks", "application/json", strings.NewReader(`{"name":"noop","payload":{}}`))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	b.within(30*time.Second, "completed", func() bool {
		return b.number("SELECT count(*) FROM tasks WHERE status = 'completed'") == 50
	})
	client.CloseIdleConnections()
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("run: %v", err)
		}
	case <-time.After(slack * (faultGrace + 2*time.Second)):
		t.Fatal("run does not return")
	}
	b.db.Reset()
	b.within(20*time.Second, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before }, func() any {
		buf := make([]byte, 1<<20)
		return string(buf[:runtime.Stack(buf, true)])
	})
}

// Copies of the entry of a waiting task start it once.
func TestCase113CopiesWhilePending(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	b.probe.set(holding)
	members[0].submitMany(8, probeTask)
	b.within(20*time.Second, "all slots held", func() bool { return len(b.probe.running()) == 8 })
	id := members[0].submit(probeTask)
	for range 20 {
		b.redisDo("XADD", "tasks", "*", "task_id", id.String())
	}
	b.probe.release()
	b.within(30*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	b.check()
	if n := len(b.probe.of(id)); n != 1 {
		t.Errorf("%d runs, want one", n)
	}
}

// Logs hold no secret, no payload and no forged line.
func TestCase136Logs(t *testing.T) {
	longFault(t)
	b := newBed(t, with("LOG_LEVEL", "info"))
	a := b.member("A")
	a.env["DATABASE_URL"] = strings.Replace(a.env["DATABASE_URL"], "nexusflow@", "nexusflow:secret-1@", 1)
	a.env["API_KEYS"] = "secret-2-secret-2"
	a.start()
	auth := []string{"Authorization", "Bearer secret-2-secret-2"}
	s := a.post(`{"name":"probe","payload":{"password":"secret-3","do":"fail"},"max_retries":0}`, auth...)
	if s.code != http.StatusAccepted {
		t.Fatalf("POST = %d %s", s.code, s.body)
	}
	for _, body := range []string{
		`{"name":"probe\u001b[31m\n{\"level\":\"INFO\",\"msg\":\"forged\"}","payload":{}}`,
		`{"name":"probe","payload":{},"idempotency_key":"\u001b[31m\n{\"msg\":\"forged\"}"}`,
	} {
		if s := a.post(body, auth...); s.code < 400 || s.code > 499 {
			t.Errorf("POST of %s = %d", body, s.code)
		}
	}
	wrong := b.member("B", "DATABASE_URL", "postgres://nexusflow:secret-4@127.0.0.1:1/none", "STARTUP_MAX_RETRIES", "1")
	wrong.launch()
	if code := wrong.wait(30 * time.Second); code != 1 {
		t.Errorf("ended with code %d", code)
	}
	b.within(20*time.Second, "failed", b.allAre([]uuid.UUID{s.id}, statusFailed))
	b.checkLog(a)
	for _, m := range []*instance{a, wrong} {
		for _, line := range append(m.log.allLines(), m.log.stderr.String()) {
			if strings.Contains(line, "secret-") {
				t.Errorf("a secret is in the log of %s: %s", m.name, line)
			}
			var l struct{ Msg string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "forged" {
				t.Errorf("a forged line is in the log of %s", m.name)
			}
		}
	}
}

// A payload that no handler can take fails at its first delivery.
func TestCase30UnreadablePayload(t *testing.T) {
	longFault(t)
	b := newBed(t)
	b.started("A")
	for _, payload := range []string{`"text"`, `[]`} {
		id := b.insert(1, payload)[0]
		b.within(20*time.Second, "failed", b.allAre([]uuid.UUID{id}, statusFailed))
		if row := b.row(id); row.Attempt != 1 || !strings.Contains(row.Error, "payload") {
			t.Errorf("a task with payload %s ended as %+v", payload, row)
		}
	}
	b.check()
	if n := b.probe.count(); n != 0 {
		t.Errorf("%d runs, want none", n)
	}
}
