//go:build linux

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A replica of Redis that lags behind takes its place: what was delivered is undelivered again,
// what was acknowledged is pending again, and what came last is gone. Nothing runs twice for it.
func TestFaultStaleFailover(t *testing.T) {
	longFault(t)
	b := newBed(t, withRedis("--repl-diskless-sync-delay", "0"))
	members := b.started("A", "B")
	replica := startRedisServer(t)
	behind := redis.NewClient(&redis.Options{Network: "unix", Addr: replica.socket})
	t.Cleanup(func() { behind.Close() })
	do := func(args ...any) string {
		v, err := behind.Do(t.Context(), args...).Result()
		if err != nil {
			t.Fatalf("replica: %v: %v", args, err)
		}
		return fmt.Sprint(v)
	}

	b.probe.set(holding)
	delivered := members[0].submitMany(8, probeTask)
	b.within(20*time.Second, "8 held", func() bool { return len(b.probe.running()) == 8 })
	queued := members[0].submitMany(100, probeTask)
	b.within(20*time.Second, "100 queued", func() bool { return b.entries() == 108 })
	do("REPLICAOF", "127.0.0.1", fmt.Sprint(newLink(t, "127.0.0.1:0", b.rd.socket).port()))
	b.within(30*time.Second, "the replica is in step", func() bool {
		return strings.Contains(do("INFO", "replication"), "master_link_status:up") && do("XLEN", "tasks") == "108"
	})
	do("REPLICAOF", "NO", "ONE")

	// The master goes on: it acknowledges all of that, and gets more.
	b.probe.release()
	old := append(delivered, queued...)
	b.within(60*time.Second, "the first ones completed", b.allAre(old, statusCompleted), b.openTasks)
	b.within(20*time.Second, "and acknowledged", func() bool { return b.entries() == 0 })
	b.probe.set(holding)
	fresh := members[1].submitMany(8, probeTask)
	b.within(20*time.Second, "8 more held", func() bool { return len(b.probe.running()) == 8 })
	fresh = append(fresh, members[1].submitMany(100, probeTask)...)
	b.within(20*time.Second, "100 more queued", func() bool { return b.entries() == 108 })

	stale, err := behind.XPending(t.Context(), "tasks", "workers").Result()
	if err != nil || stale.Count != 8 || do("XLEN", "tasks") != "108" {
		t.Fatalf("the replica holds %s entries, pending %+v, %v, want 108 with 8 pending", do("XLEN", "tasks"), stale, err)
	}
	b.rd.stop()
	if err := os.Remove(b.rd.socket); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(replica.socket, b.rd.socket); err != nil {
		t.Fatal(err)
	}
	b.within(20*time.Second, "the replica serves", func() bool { return b.entries() >= 0 })
	b.probe.release()
	b.soon(faultRepublish+5*time.Second, "all completed", b.allAre(fresh, statusCompleted), b.openTasks)
	b.check()
	if n := b.probe.count(); n != len(old)+len(fresh) {
		t.Errorf("%d runs of %d tasks, want one each", n, len(old)+len(fresh))
	}
	if n := b.number("SELECT count(*) FROM tasks WHERE attempt <> 1 OR lost_count > 0 OR retry_count > 0"); n != 0 {
		t.Errorf("%d tasks paid for the failover", n)
	}
}
