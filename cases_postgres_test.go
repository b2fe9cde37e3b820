//go:build linux

package main

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
)

// PostgreSQL comes after the service, or never.
func TestCase45PostgresLate(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres)
	b.pg.stop()
	a := b.member("A")
	a.launch()
	b.pause(9 * time.Second)
	if !a.alive() || a.log.count("postgres", `"attempt":`) < 3 {
		t.Errorf("alive: %v; attempts logged: %d", a.alive(), a.log.count("postgres", `"attempt":`))
	}
	never := b.member("B", "STARTUP_MAX_RETRIES", "2", "STARTUP_RETRY_DELAY_S", "1")
	never.launch()
	if code := never.wait(slack * 5 * time.Second); code != 1 || !strings.Contains(never.log.stderr.String(), "postgres") {
		t.Errorf("ended with code %d and %q, want 1 and the reason", code, never.log.stderr.String())
	}
	never.log.stderr = lockedBuffer{}
	if err := b.pg.start(); err != nil {
		t.Fatal(err)
	}
	b.db.Reset()
	b.soon(5*time.Second, "serving", func() bool {
		code, _ := a.get("/readyz")
		return code == http.StatusOK
	})
	a.submit(probeTask)
	b.check()
}

// PostgreSQL is away for long while tasks run.
func TestCase47PostgresOutage(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres, with("WORKER_CONCURRENCY", "10"))
	a := b.started("A")[0]
	ids := a.submitMany(10, `{"name":"probe","payload":{"ms":5000}}`)
	b.within(20*time.Second, "10 run", func() bool { return len(b.probe.running()) == 10 })
	b.pause(2 * time.Second)
	a.disturb()
	b.pg.stop()
	refused := 0
	b.during(20*time.Second, "POST is refused with 503", func() bool {
		s := a.post(probeTask)
		refused++
		<-time.After(100 * time.Millisecond)
		return s.code == http.StatusServiceUnavailable
	})
	if err := b.pg.start(); err != nil {
		t.Fatal(err)
	}
	a.calm()
	b.db.Reset()
	b.within(60*time.Second, "completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	for _, id := range ids {
		if row, n := b.row(id), len(b.probe.of(id)); n > 2 || row.Retry != 0 {
			t.Errorf("a task ran %d times and became %+v", n, row)
		}
	}
	t.Logf("%d POSTs refused, %d runs", refused, b.probe.count())
	// One line, and perhaps more while old connections meet the new server.
	if n := a.log.count("postgres away"); n > 3 {
		t.Errorf("one outage was logged %d times", n)
	}
}

// The table is locked: every request is answered in time.
func TestCase51LockedTable(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	known := a.submit(probeTask)
	b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{known}, statusCompleted))
	conn, err := b.db.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	a.disturb()
	if _, err := conn.Exec(t.Context(), "BEGIN; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var longest atomic.Int64
	for i := range 40 {
		wg.Go(func() {
			begin := time.Now()
			var code int
			if i < 30 {
				code = a.post(probeTask).code
			} else {
				code, _ = a.get("/tasks/" + known.String())
			}
			if code != http.StatusServiceUnavailable && code != http.StatusGatewayTimeout {
				t.Errorf("answer %d while the table is locked", code)
			}
			longest.Store(max(longest.Load(), int64(time.Since(begin))))
		})
	}
	wg.Wait()
	t.Logf("the slowest answer took %v; promised 10s", time.Duration(longest.Load()))
	if longest.Load() > int64(15*time.Second) {
		t.Error("a request was left waiting")
	}
	if _, err := conn.Exec(t.Context(), "ROLLBACK"); err != nil {
		t.Fatal(err)
	}
	a.calm()
	b.soon(2*time.Second, "POST is accepted again", func() bool { return a.post(probeTask).code == http.StatusAccepted })
	b.check()
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
	if code, body := a.get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, `"postgres":"down"`) {
		t.Errorf("readiness = %d %s, want 503", code, body)
	}
	if n := a.log.count("postgres back") + a.log.count("postgres is back"); n > 0 {
		t.Errorf("the log says %d times that a read-only PostgreSQL is back", n)
	}
	b.pg.exec(t, "ALTER DATABASE fault RESET default_transaction_read_only; "+terminate)
	a.calm()
	b.within(60*time.Second, "completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE retry_count > 0 OR lost_count > 0"); n != 0 {
		t.Errorf("%d tasks paid for the outage", n)
	}
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
