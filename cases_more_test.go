//go:build linux

package main

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// Redis wants a password that is not known: tasks are accepted and wait, and the log says why
// without a flood and without the password.
func TestCase96RedisPassword(t *testing.T) {
	longFault(t)
	b := newBed(t, withRedis("--requirepass", "right-password"), with("LOG_LEVEL", "info"))
	b.redis.Options().Password = "right-password"
	none := b.member("A")
	wrong := b.member("B")
	wrong.env["REDIS_URL"] = "redis://:wrong-password@" + wrong.rd.addr + "/0"
	for _, m := range []*instance{none, wrong} {
		m.launch()
		b.within(60*time.Second, "degraded", func() bool {
			code, body := m.get("/readyz")
			return code == http.StatusOK && strings.Contains(body, `"degraded"`)
		})
		m.submit(probeTask)
	}
	lines := len(none.log.allLines())
	b.pause(5 * time.Second)
	if n := len(none.log.allLines()) - lines; n > 15 {
		t.Errorf("%d log lines in 5 s", n)
	}
	for _, m := range []*instance{none, wrong} {
		if m.log.count("NOAUTH")+m.log.count("WRONGPASS") == 0 {
			t.Errorf("%s does not say that the password is the trouble", m.name)
		}
		if m.log.count("wrong-password") != 0 {
			t.Errorf("%s logged the password", m.name)
		}
		m.kill()
	}
	right := b.member("C")
	right.env["REDIS_URL"] = "redis://:right-password@" + right.rd.addr + "/0"
	right.start()
	b.within(30*time.Second, "completed", func() bool {
		return b.number("SELECT count(*) FROM tasks WHERE status = 'completed'") == 2
	})
}

// The servers have IPv6 addresses.
func TestCase98IPv6(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.memberAt("A", "::1", "HTTP_ADDR", "[::1]:0")
	a.start()
	a.submit(probeTask)
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

// Database and process live in odd time zones.
func TestCase115TimeZones(t *testing.T) {
	longFault(t)
	b := newBed(t, with("TZ", "America/St_Johns"))
	b.exec("ALTER DATABASE " + b.name + " SET timezone = 'Asia/Kolkata'")
	a := b.started("A")[0]
	id := a.submit(probeTask)
	b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	code, body := a.get("/tasks/" + id.String())
	var task map[string]any
	if err := json.Unmarshal([]byte(body), &task); err != nil || code != http.StatusOK {
		t.Fatalf("GET = %d %s: %v", code, body, err)
	}
	seen := 0
	for name, value := range task {
		text, ok := value.(string)
		if !ok || !strings.HasSuffix(name, "_at") {
			continue
		}
		seen++
		at, err := time.Parse(time.RFC3339Nano, text)
		if _, offset := at.Zone(); err != nil || offset != 0 || time.Since(at).Abs() > 30*time.Second {
			t.Errorf("%s is %q (%v), want now in UTC", name, text, err)
		}
	}
	if seen < 2 {
		t.Errorf("the task shows %d times: %s", seen, body)
	}
	b.check()
}

// Five processes migrate an empty database at once.
func TestCase123Migrations(t *testing.T) {
	longFault(t)
	files, err := filepath.Glob("migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		b := newBed(t, noSchema)
		members := b.started("A", "B", "C", "D", "E")
		if n := b.number("SELECT count(*) FROM goose_db_version WHERE version_id > 0"); n != len(files) {
			t.Errorf("%d migrations on record, want %d", n, len(files))
		}
		for _, m := range members {
			if !m.alive() {
				t.Errorf("%s ended", m.name)
			}
			b.checkLog(m)
			m.kill()
		}
	}
}

// PostgreSQL turns read-only, as a demoted primary does.
func TestCase127PostgresReadOnly(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres)
	a := b.started("A")[0]
	known := a.submit(probeTask)
	b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{known}, statusCompleted))
	ids := a.submitMany(20, `{"name":"probe","payload":{"ms":300}}`)
	a.disturb()
	b.pg.exec(t, "ALTER DATABASE fault SET default_transaction_read_only = on; "+terminate)
	b.within(20*time.Second, "POST is refused", func() bool { return a.post(probeTask).code == http.StatusServiceUnavailable })
	b.during(10*time.Second, "POST is 503 and GET works", func() bool {
		<-time.After(200 * time.Millisecond)
		s := a.post(probeTask)
		code, _ := a.get("/tasks/" + known.String())
		if s.code != http.StatusServiceUnavailable || code != http.StatusOK {
			t.Logf("POST %d %s, GET %d", s.code, s.body, code)
		}
		return s.code == http.StatusServiceUnavailable && code == http.StatusOK
	})
	b.pg.exec(t, "ALTER DATABASE fault RESET default_transaction_read_only; "+terminate)
	a.calm()
	b.within(60*time.Second, "completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE retry_count > 0 OR lost_count > 0"); n != 0 {
		t.Errorf("%d tasks paid for the outage", n)
	}
}

// Redis is full while tasks run of which half must be retried.
func TestCase129FullRedisAndRetries(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	first := a.submitMany(4, probeTask)
	b.within(20*time.Second, "all slots held", func() bool { return len(b.probe.running()) == 4 })
	good := a.submitMany(50, probeTask)
	bad := a.submitMany(50, `{"name":"probe","payload":{"do":"fail once"}}`)
	b.redisDo("CONFIG", "SET", "maxmemory", "1")
	b.probe.release()
	b.within(30*time.Second, "the good ones completed while Redis is full", b.allAre(append(good, first...), statusCompleted), b.openTasks)
	b.redisDo("CONFIG", "SET", "maxmemory", "0")
	b.within(30*time.Second, "the others completed", b.allAre(bad, statusCompleted), b.openTasks)
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE task_id = ANY($1) AND (attempt <> 2 OR retry_count <> 1)", bad); n != 0 {
		t.Errorf("%d retries were lost or doubled", n)
	}
}

// The disk under Redis is gone, and it refuses to write.
func TestCase130RedisCannotSave(t *testing.T) {
	longFault(t)
	b := newBed(t, withRedis("--enable-protected-configs", "yes"), with("LOG_LEVEL", "info"))
	a := b.started("A")[0]
	dir := filepath.Join(b.rd.dir, "gone")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	b.redisDo("CONFIG", "SET", "dir", dir)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	b.redisDo("CONFIG", "SET", "save", "1 1")
	b.redisDo("SET", "other", "x")
	b.redis.BgSave(t.Context())
	b.within(20*time.Second, "Redis refuses to write", func() bool {
		err := b.redis.Set(t.Context(), "other", "y", 0).Err()
		return err != nil && strings.Contains(err.Error(), "MISCONF")
	})
	b.within(20*time.Second, "degraded", func() bool {
		code, body := a.get("/readyz")
		return code == http.StatusOK && strings.Contains(body, `"degraded"`)
	})
	var ids []uuid.UUID
	lines := len(a.log.allLines())
	for range 5 {
		ids = append(ids, a.submit(probeTask))
		b.pause(time.Second)
	}
	if n := len(a.log.allLines()) - lines; n > 60 {
		t.Errorf("%d log lines in 5 s", n)
	}
	b.redisDo("CONFIG", "SET", "save", "")
	b.redisDo("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
	b.soon(10*time.Second, "completed", b.allAre(ids, statusCompleted))
	b.check()
}

// Readiness tells what is away, in time, also when it only keeps silent.
func TestCase132Readiness(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	for _, c := range []struct {
		link *link
		mode linkMode
		code int
		want string
	}{
		{a.pg, blackHole, http.StatusServiceUnavailable, `"postgres":"down"`},
		{a.pg, refused, http.StatusServiceUnavailable, `"postgres":"down"`},
		{a.rd, blackHole, http.StatusOK, `"redis":"down"`},
		{a.rd, refused, http.StatusOK, `"redis":"down"`},
	} {
		a.disturb()
		c.link.set(c.mode)
		b.soon(5*time.Second, "readiness says "+c.want, func() bool {
			begin := time.Now()
			code, body := a.get("/readyz")
			if took := time.Since(begin); took > slack*3*time.Second {
				t.Errorf("readiness answered after %v", took)
			}
			return code == c.code && strings.Contains(body, c.want)
		})
		if code, _ := a.get("/livez"); code != http.StatusOK {
			t.Errorf("liveness = %d while %s", code, c.want)
		}
		c.link.set(pass)
		a.calm()
		a.waitReady()
	}
	a.submit(probeTask)
	b.check()
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

// A group that must be made anew begins at the first entry.
func TestCase17GroupFromTheStart(t *testing.T) {
	longFault(t)
	b := newBed(t, with("REPUBLISH_AFTER", "60s"))
	a := b.started("A")[0]
	a.submit(probeTask)
	b.settle(30 * time.Second)
	a.stop()
	b.redisDo("DEL", "tasks")
	var id uuid.UUID
	b.query(&id, "INSERT INTO tasks (name, payload, published_at) VALUES ('probe', '{}', now()) RETURNING task_id")
	b.redisDo("XADD", "tasks", "*", "task_id", id.String())
	a.start()
	b.soon(5*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted), b.openTasks)
	b.check()
}

// The group is destroyed while a task runs; all loops get over it.
func TestCase19GroupDestroyed(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	ids := a.submitMany(1, probeTask)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	b.redisDo("XGROUP", "DESTROY", "tasks", "workers")
	b.pause(2 * faultScan)
	b.probe.release()
	ids = append(ids, a.submit(probeTask))
	b.soon(5*time.Second, "completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	if n := a.log.count("NOGROUP"); n > 3 {
		t.Errorf("the missing group was logged %d times", n)
	}
	if n := b.probe.count(); n != 2 {
		t.Errorf("%d runs of 2 tasks", n)
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
