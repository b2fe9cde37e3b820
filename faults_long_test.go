//go:build linux

package main

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/redis/go-redis/v9"
)

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

// Redis loses everything five times while 1,000 tasks are worked off.
func TestFault08RedisRestarts(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	submitted := make(chan []uuid.UUID)
	go func() {
		var ids []uuid.UUID
		for i := range 10 {
			ids = append(ids, members[i%2].submitMany(100, `{"name":"probe","payload":{"ms":50}}`)...)
			<-time.After(500 * time.Millisecond)
		}
		submitted <- ids
	}()
	for range 5 {
		b.pause(time.Second)
		b.rd.stop()
		b.pause(200 * time.Millisecond)
		if err := b.rd.start(); err != nil {
			t.Fatal(err)
		}
	}
	ids := <-submitted
	b.within(120*time.Second, "all completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	if n := b.probe.count(); n != len(ids) {
		t.Errorf("%d runs of %d tasks, want one each", n, len(ids))
	}
}

// Redis is full: tasks are accepted, what is queued drains, and the rest runs afterwards.
func TestFault10RedisFull(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	ids := a.submitMany(200, `{"name":"probe","payload":{"ms":20}}`)
	b.redisDo("CONFIG", "SET", "maxmemory", "1")
	for range 20 {
		s := a.post(probeTask)
		if s.code != http.StatusAccepted {
			t.Errorf("POST while Redis is full = %d %s, want 202", s.code, s.body)
		}
		ids = append(ids, s.id)
	}
	b.within(20*time.Second, "the full stream drained", func() bool { return b.entries() == 0 && b.pending() == 0 })
	b.pause(5 * time.Second)
	b.redisDo("CONFIG", "SET", "maxmemory", "0")
	b.within(60*time.Second, "all completed", b.allAre(ids, statusCompleted), b.openTasks)
	b.check()
	if n := b.probe.count(); n != len(ids) {
		t.Errorf("%d runs of %d tasks, want one each", n, len(ids))
	}
}

// A task runs much longer than its lease and than the idle time of its entry.
func TestFault20LongTask(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	id := members[0].submit(`{"name":"probe","payload":{"do":"hold"}}`)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	owner := b.owner()
	b.during(4*max(faultLease, faultIdle), "one run, and its entry stays with one consumer", func() bool {
		return b.probe.count() == 1 && b.owner() == owner
	})
	b.probe.release()
	b.check()
	if row := b.row(id); row.Attempt != 1 || row.Lost != 0 || row.Retry != 0 || b.probe.count() != 1 {
		t.Errorf("the task ran %d times and became %+v", b.probe.count(), row)
	}
}

// owner is the consumer of the one pending entry.
func (b *bed) owner() string {
	b.t.Helper()
	p, err := b.redis.XPendingExt(b.t.Context(), &redis.XPendingExtArgs{Stream: "tasks", Group: "workers", Start: "-", End: "+", Count: 10}).Result()
	if err != nil || len(p) != 1 {
		b.t.Fatalf("pending entries: %v, %v, want one", p, err)
	}
	return p[0].Consumer
}

// A consumer takes entries and is never heard of again.
func TestFault31Ghost(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	held := a.submitMany(4, probeTask)
	b.within(20*time.Second, "4 held", func() bool { return len(b.probe.running()) == 4 })
	ids := a.submitMany(20, probeTask)
	b.within(20*time.Second, "20 queued", func() bool { return b.entries() == 24 })
	taken, err := b.redis.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: "workers", Consumer: "ghost", Streams: []string{"tasks", ">"}, Count: 20, Block: -1}).Result()
	if err != nil || len(taken) != 1 || len(taken[0].Messages) != 20 {
		t.Fatalf("the ghost took %v, %v", taken, err)
	}
	b.probe.release()
	b.soon(faultIdle+faultScan+2*time.Second, "the ghost's tasks completed", b.allAre(append(ids, held...), statusCompleted))
	b.check()
	consumers, err := b.redis.XInfoConsumers(t.Context(), "tasks", "workers").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range consumers {
		if c.Name == "ghost" && c.Pending != 0 {
			t.Errorf("the ghost still has %d entries", c.Pending)
		}
	}
}

// Nothing grows over many restarts.
func TestFault35NoGrowth(t *testing.T) {
	longFault(t)
	b := newBed(t, with("LOG_LEVEL", "warn", "WORKER_CONCURRENCY", "16"))
	stays := b.member("stays")
	stays.env["LOG_LEVEL"] = "info" // for its address
	comes := b.member("comes")
	comes.env["LOG_LEVEL"] = "info"
	stays.start()
	comes.start()
	stays.submitMany(500, probeTask)
	b.settle(60 * time.Second)
	memory, rss, fds := b.redisMemory(), stays.rss(t), stays.fds(t)
	killed := 0
	for i := range 30 {
		stays.submitMany(150, probeTask)
		if i%5 == 4 {
			comes.kill()
			killed++
		} else {
			comes.stop()
		}
		comes.start()
	}
	b.check()
	if n := len(b.accepted); n != 5000 {
		t.Fatalf("%d tasks, want 5000", n)
	}
	consumers, err := b.redis.XInfoConsumers(t.Context(), "tasks", "workers").Result()
	if err != nil {
		t.Fatal(err)
	}
	if len(consumers) > 2+killed {
		t.Errorf("%d consumers, want at most %d", len(consumers), 2+killed)
	}
	t.Logf("redis %d -> %d bytes, rss %d -> %d kB, fds %d -> %d", memory, b.redisMemory(), rss, stays.rss(t), fds, stays.fds(t))
	if now := b.redisMemory(); now > memory+memory/10 {
		t.Errorf("Redis uses %d bytes, %d at the start", now, memory)
	}
	// The Go heap breathes: what is looked for is growth with the number of tasks.
	if now := stays.rss(t); now > rss+rss/2 {
		t.Errorf("the process uses %d kB, %d at the start", now, rss)
	}
	if now := stays.fds(t); now > fds+8 {
		t.Errorf("the process has %d files open, %d at the start", now, fds)
	}
}

func (b *bed) redisMemory() int {
	b.t.Helper()
	info, err := b.redis.Info(b.t.Context(), "memory").Result()
	if err != nil {
		b.t.Fatal(err)
	}
	return infoNumber(b.t, info, "used_memory:")
}

func infoNumber(t testing.TB, text, name string) int {
	t.Helper()
	_, rest, _ := strings.Cut(text, name)
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		t.Fatalf("no %s in %s", name, text)
	}
	n, err := strconv.Atoi(fields[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func (m *instance) rss(t testing.TB) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.process().cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return infoNumber(t, string(status), "VmRSS:")
}

func (m *instance) fds(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.process().cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A backlog that waits much longer than REPUBLISH_AFTER is not added to the stream again.
func TestFault36Backlog(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	b.probe.set(holding)
	held := members[0].submitMany(8, probeTask)
	b.within(20*time.Second, "all slots held", func() bool { return len(b.probe.running()) == 8 })
	ids := members[0].submitMany(2000, probeTask)
	longest := int64(0)
	b.during(5*faultRepublish, "XLEN stays at 2,010 at most", func() bool {
		longest = max(longest, b.entries())
		return longest <= 2010
	})
	b.probe.release()
	b.within(120*time.Second, "all completed", b.allAre(append(ids, held...), statusCompleted), func() any {
		longest = max(longest, b.entries())
		return longest
	})
	t.Logf("XLEN was %d at most", longest)
	b.check()
	if n := b.probe.count(); n != len(ids)+len(held) {
		t.Errorf("%d runs of %d tasks", n, len(ids)+len(held))
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
	run := b.probe.running()[0]
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

// A claim is answered when another worker has long run the task: the handler must not begin.
func TestFaultLateClaim(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	a.submit(probeTask)
	b.settle(30 * time.Second)
	a.disturb()
	a.pg.delayReply("ClaimTasks", 2*faultLease+time.Second)
	id := a.submit(probeTask)
	b.within(20*time.Second, "claimed by A", func() bool { return b.row(id).Attempt == 1 })
	other.start()
	b.within(20*time.Second, "completed by B", b.allAre([]uuid.UUID{id}, statusCompleted))
	b.within(20*time.Second, "A is told", func() bool { return a.log.count("outcome refused", id.String()) == 1 })
	a.calm()
	if runs := b.probe.of(id); len(runs) != 1 || runs[0].member != "B" {
		t.Errorf("%d runs, want one on B", len(runs))
	}
	b.check()
}

// The replies to statements and commands are lost one kind after another: what was done is
// neither lost nor done twice.
func TestFaultLostReplies(t *testing.T) {
	longFault(t)
	b := newBed(t)
	members := b.started("A", "B")
	for _, kind := range []string{"InsertTasks", "ClaimTasks", "CompleteTasks", "FailTasks", "BeatTasks", "xadd", "xreadgroup", "xack"} {
		lost := members[0].pg.repliesLost() + members[0].rd.repliesLost()
		for _, m := range members {
			m.submitMany(4, `{"name":"probe","payload":{"do":"fail once","ms":100}}`)
		}
		members[0].disturb()
		members[0].pg.loseReply(kind)
		members[0].rd.loseReply(kind)
		end := time.Now().Add(10 * time.Second)
		b.within(30*time.Second, "the reply to "+kind+" lost", func() bool {
			key := strconv.FormatUint(rand.Uint64(), 36)
			payload := `{"name":"probe","payload":{"do":"fail once","ms":200}}`
			s := members[0].post(payload, "Idempotency-Key", key)
			if s.code != http.StatusAccepted && s.code != http.StatusServiceUnavailable {
				t.Errorf("POST = %d %s", s.code, s.body)
			}
			<-time.After(50 * time.Millisecond)
			return members[0].pg.repliesLost()+members[0].rd.repliesLost() > lost || time.Now().After(end)
		})
		if members[0].pg.repliesLost()+members[0].rd.repliesLost() == lost {
			t.Errorf("no reply to %s was lost: nothing tested", kind)
		}
		members[0].pg.loseReply("")
		members[0].rd.loseReply("")
		members[0].calm()
	}
	b.check()
}
