//go:build linux

package main

import (
	"context"
	"database/sql"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

// PostgreSQL crashes twice while tasks are submitted and run.
func TestFault12PostgresCrash(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres)
	members := b.started("A", "B")
	stop := make(chan struct{})
	var mu sync.Mutex
	var last time.Time // the last 202
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				s := members[i%2].post(`{"name":"probe","payload":{"ms":50}}`)
				switch s.code {
				case http.StatusAccepted:
					mu.Lock()
					last = time.Now()
					mu.Unlock()
				case http.StatusServiceUnavailable:
				default:
					t.Errorf("POST while PostgreSQL crashes = %d %s", s.code, s.body)
				}
			}
		})
	}
	for range 2 {
		b.pause(2 * time.Second)
		for _, m := range members {
			m.disturb()
		}
		b.pg.crash()
		b.pause(time.Second)
		if err := b.pg.start(); err != nil {
			t.Fatal(err)
		}
		back := time.Now()
		b.soon(5*time.Second, "first success", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return last.After(back)
		})
		for _, m := range members {
			m.calm()
		}
	}
	close(stop)
	wg.Wait()
	for _, m := range members {
		if !m.alive() {
			t.Errorf("%s ended", m.name)
		}
	}
	b.check()
}

// PostgreSQL is silent for longer than the leases, and results come meanwhile.
func TestFault15SilentPostgres(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	b.probe.set(holding)
	ids := members[0].submitMany(4, probeTask)
	b.within(20*time.Second, "4 held", func() bool { return len(b.probe.running()) == 4 })
	for _, m := range members {
		m.disturb()
		m.pg.set(blackHole)
	}
	b.probe.release()
	b.pause(3 * faultLease)
	for _, m := range members {
		m.pg.set(pass)
		m.calm()
	}
	b.within(30*time.Second, "all completed", b.allAre(ids, statusCompleted))
	b.check()
	for _, id := range ids {
		if row, n := b.row(id), len(b.probe.of(id)); row.Attempt != 1 || row.Lost != 0 || n != 1 {
			t.Errorf("a task ran %d times and became %+v, want one run and attempt 1", n, row)
		}
	}
}

// The clock of PostgreSQL is an hour wrong.
func TestFault37ClockSkew(t *testing.T) {
	longFault(t)
	libs, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(libs) == 0 {
		t.Skip("SKIPPED, NOT TESTED: libfaketime is not installed")
	}
	for _, skew := range []string{"+3600s", "-3600s"} {
		t.Run(skew, func(t *testing.T) {
			b := newBed(t, ownPostgres)
			b.pg.stop()
			b.pg.env = []string{"LD_PRELOAD=" + libs[0], "FAKETIME=" + skew, "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1", "FAKETIME_NO_CACHE=1"}
			if err := b.pg.start(); err != nil {
				t.Fatal(err)
			}
			b.db.Reset()
			var now time.Time
			b.query(&now, "SELECT now()")
			if off := time.Until(now).Abs(); off < 50*time.Minute {
				t.Fatalf("PostgreSQL's clock is off by %v only", off)
			}
			b.checkClock()
		})
	}
}

// checkClock checks what depends on time: retries, leases and long tasks.
func (b *bed) checkClock() {
	members := b.started("A", "B")
	plain := members[0].submit(probeTask)
	b.soon(time.Second, "completed", b.allAre([]uuid.UUID{plain}, statusCompleted))
	failing := members[0].submit(`{"name":"probe","payload":{"do":"fail"},"max_retries":3}`)
	b.soon(3*time.Second, "failed", b.allAre([]uuid.UUID{failing}, statusFailed))
	runs := b.probe.of(failing)
	if len(runs) != 4 {
		b.t.Fatalf("%d runs, want 4", len(runs))
	}
	for i, base := range []time.Duration{100, 100, 200} {
		if gap := runs[i+1].began.Sub(b.probe.endOf(runs[i])); gap < base*time.Millisecond*9/10 {
			b.t.Errorf("gap %d is %v", i+1, gap)
		}
	}
	long := members[0].submit(`{"name":"probe","payload":{"do":"hold"}}`)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	b.during(2*faultIdle, "one run", func() bool { return len(b.probe.of(long)) == 1 })
	run := b.probe.of(long)[0]
	for _, m := range members {
		if m.name == run.member {
			m.kill()
			b.soon(faultLease+2*time.Second, "restarted", func() bool { return len(b.probe.of(long)) == 2 })
			m.start()
		}
	}
	b.probe.release()
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE created_at > updated_at OR finished_at < started_at"); n != 0 {
		b.t.Errorf("%d rows with times in a wrong order", n)
	}
}

// Four processes start at once on an empty database whose server comes late; then the
// goose of the command line finds nothing to do.
func TestFault39Start(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres, noSchema)
	b.pg.stop()
	members := make([]*instance, 4)
	for i := range members {
		members[i] = b.member(string(rune('A' + i)))
		members[i].launch()
	}
	b.pause(8 * time.Second)
	if err := b.pg.start(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for _, m := range members {
		if !m.alive() {
			t.Fatalf("%s ended while PostgreSQL was away", m.name)
		}
		m.waitReady()
	}
	t.Logf("all ready %v after PostgreSQL; promised 5s", time.Since(begin))
	if took := time.Since(begin); took > slack*5*time.Second {
		t.Errorf("ready after %v", took)
	}
	for range 4 {
		b.gooseUp()
	}
	files, err := filepath.Glob("migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	if n := b.number("SELECT count(*) FROM goose_db_version WHERE is_applied AND version_id > 0"); n != len(files) {
		t.Errorf("%d applied migrations on record, want %d", n, len(files))
	}
	if n := b.number("SELECT count(DISTINCT version_id) FROM goose_db_version WHERE version_id > 0"); n != len(files) {
		t.Errorf("%d versions on record, want %d", n, len(files))
	}
	b.installAudit()
	ids := members[0].submitMany(20, probeTask)
	b.within(30*time.Second, "completed", b.allAre(ids, statusCompleted))
	b.check()
	for _, m := range members {
		if _, code := m.stop(); code != 0 {
			t.Errorf("%s ended with code %d", m.name, code)
		}
	}
}

// gooseUp does what `goose up` does on the command line.
func (b *bed) gooseUp() {
	b.t.Helper()
	db, err := sql.Open("pgx", b.pg.dsn(b.name))
	if err != nil {
		b.t.Fatal(err)
	}
	defer db.Close()
	p, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS("migrations"))
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	done, err := p.Up(ctx)
	if err != nil || len(done) != 0 {
		b.t.Errorf("goose up = %v, %v, want nothing to do", done, err)
	}
}
