//go:build linux

package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// The entry of a dead worker's task was deleted.
func TestCase24DeletedEntry(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	id := a.submit(probeTask)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	a.kill()
	entries, err := b.redis.XRange(t.Context(), "tasks", "-", "+").Result()
	if err != nil || len(entries) != 1 {
		t.Fatalf("entries: %v, %v, want one", entries, err)
	}
	b.redisDo("XDEL", "tasks", entries[0].ID)
	b.probe.release()
	a.start()
	b.within(30*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
	b.check()
	if n := a.log.count(`"level":"ERROR"`); n != 0 {
		t.Errorf("%d errors logged", n)
	}
}

// Consumers go on after each of several restarts of Redis.
func TestCase43RedisRestarts(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	for range 3 {
		b.rd.restart(t)
		id := a.submit(probeTask)
		b.soon(10*time.Second, "completed", b.allAre([]uuid.UUID{id}, statusCompleted))
		b.pause(2 * time.Second)
	}
	b.check()
}

// Redis becomes a replica and later a master again.
func TestCase49RedisReadOnly(t *testing.T) {
	longFault(t)
	b := newBed(t, with("LOG_LEVEL", "info"))
	a := b.started("A")[0]
	ids := a.submitMany(10, probeTask)
	b.redisDo("REPLICAOF", "127.0.0.1", "1")
	lines := len(a.log.allLines())
	const length = 8 * time.Second
	for range 8 {
		ids = append(ids, a.submit(probeTask))
		b.pause(length / 8)
	}
	if n := len(a.log.allLines()) - lines; n > 60 {
		t.Errorf("%d log lines in %v", n, length)
	}
	b.redisDo("REPLICAOF", "NO", "ONE")
	b.soon(10*time.Second, "completed", b.allAre(ids, statusCompleted))
	b.check()
}

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
