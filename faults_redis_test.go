//go:build linux

package main

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Redis is killed, tasks go on being accepted, and run once it is back.
func TestFault05RedisDown(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a := b.started("A")[0]
	b.rd.stop()
	var ids []uuid.UUID
	for range 50 {
		s := a.post(probeTask)
		if s.code != http.StatusAccepted || s.took > slack*2*time.Second {
			t.Errorf("POST without Redis = %d after %v, want 202 within 2 s", s.code, s.took)
		}
		ids = append(ids, s.id)
	}
	if err := b.rd.start(); err != nil {
		t.Fatal(err)
	}
	b.soon(faultRepublish+3*time.Second, "all tasks completed", b.allAre(ids, statusCompleted))
	b.check()
}

// Redis is wiped with tasks queued and tasks running.
func TestFault07Flush(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	held := a.submitMany(4, probeTask)
	b.within(20*time.Second, "4 held", func() bool { return len(b.probe.running()) == 4 })
	queued := a.submitMany(200, probeTask)
	b.redisDo("FLUSHALL")
	b.probe.release()
	b.within(60*time.Second, "all completed", b.allAre(append(queued, held...), statusCompleted))
	b.check()
	for _, id := range held {
		if row, n := b.row(id), len(b.probe.of(id)); row.Attempt != 1 || n != 1 {
			t.Errorf("a held task ran %d times and became %+v", n, row)
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
	// The buffers of its clients come and go, which was an eighth of it over 30 restarts, without a trend.
	if now := b.redisMemory(); now > memory+memory/4 {
		t.Errorf("Redis uses %d bytes, %d at the start", now, memory)
	}
	// The Go heap breathes, by as much as the ballast: what is looked for is growth with the number of tasks.
	if now := stays.rss(t); now > rss+rss/2+ballast>>10 {
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

// Copies of entries start nothing.
func TestFault32Copies(t *testing.T) {
	t.Parallel()
	b := newBed(t, with("REQUEUE_BASE_DELAY_MS", "4000", "REQUEUE_MAX_DELAY_MS", "4000"))
	members := b.started("A", "B")
	done := members[0].submit(probeTask)
	b.within(20*time.Second, "completed", b.allAre([]uuid.UUID{done}, statusCompleted))
	held := members[0].submit(`{"name":"probe","payload":{"do":"hold"}}`)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	retrying := members[0].submit(`{"name":"probe","payload":{"do":"fail once"}}`)
	b.within(20*time.Second, "waits for its retry", func() bool { return b.row(retrying).Retry == 1 })
	for range 100 {
		for _, id := range []uuid.UUID{done, held, retrying} {
			b.redisDo("XADD", "tasks", "*", "task_id", id.String())
		}
	}
	// One entry is that of the task which runs.
	b.within(20*time.Second, "copies gone", func() bool { return b.entries() == 1 })
	if n := b.probe.count(); n != 3 {
		t.Errorf("%d runs, want 3: a copy started one", n)
	}
	b.within(30*time.Second, "retried", b.allAre([]uuid.UUID{retrying}, statusCompleted))
	runs := b.probe.of(retrying)
	if gap := runs[1].began.Sub(b.probe.endOf(runs[0])); gap < 3600*time.Millisecond {
		t.Errorf("retried after %v, before it was due", gap)
	}
	b.probe.release()
	b.check()
	if n := b.probe.count(); n != 4 {
		t.Errorf("%d runs, want 4", n)
	}
}
