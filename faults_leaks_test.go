//go:build linux

package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// Nothing is left over by 15 restarts of Redis, 15 of PostgreSQL, 50,000 tasks and some
// hundred programs.
func TestFaultLeaks(t *testing.T) {
	longFault(t)
	b := newBed(t, ownPostgres, with("LOG_LEVEL", "info", "WORKER_CONCURRENCY", "16"))
	// The audit would write a row for each change; this test asks for counts only.
	b.exec("ALTER TABLE tasks DISABLE TRIGGER USER")
	a := b.member("A")
	a.handlers(`{"noop": {"go": "noop"}, "true": {"exec": ["true"]}}`)
	a.start()
	const restarts, noops, programs = 30, 50_000, 300
	round := func(noops, programs int) {
		b.exec("INSERT INTO tasks (name, payload) SELECT 'noop', '{}' FROM generate_series(1, $1)", noops)
		b.exec("INSERT INTO tasks (name, payload) SELECT 'true', '{}' FROM generate_series(1, $1)", programs)
	}
	round(2000, 50)
	b.settle(120 * time.Second)
	before := b.use(a)
	for i := range restarts {
		round(noops/restarts+1, programs/restarts)
		if i%2 == 0 {
			b.rd.stop()
			if err := b.rd.start(); err != nil {
				t.Fatal(err)
			}
		} else {
			b.pg.restart(t)
			b.db.Reset()
		}
		b.within(60*time.Second, "the round is worked off", func() bool {
			return b.number("SELECT count(*) FROM tasks WHERE status IN ('pending', 'processing')") < noops/restarts/4
		}, b.openTasks)
	}
	b.settle(120 * time.Second)
	// Idle connections beside the lease pool's may stay as they may go; their number is bounded.
	var after use
	b.within(60*time.Second, "what is in use is as before", func() bool {
		after = b.use(a)
		return after.fds <= before.fds+8 && after.children == 0
	}, func() any { return after })
	t.Logf("before %+v, after %+v", before, after)
	if after.threads > before.threads+8 {
		t.Errorf("%d threads, %d at the start", after.threads, before.threads)
	}
	// The Go heap breathes: what is looked for is growth with the number of tasks.
	if after.rss > before.rss+before.rss/2 {
		t.Errorf("the process uses %d kB, %d at the start", after.rss, before.rss)
	}
	if after.connections > 8+2+4+3 {
		t.Errorf("%d connections, more than the pools may have", after.connections)
	}
	if after.consumers != 1 {
		t.Errorf("%d consumers of one process", after.consumers)
	}
	if n := b.number("SELECT count(*) FROM tasks WHERE status <> 'completed'"); n != 0 {
		t.Errorf("%d tasks did not complete", n)
	}
	b.checkRest()
}

// use is what a process holds of its machine and servers.
type use struct {
	fds, threads, children, rss int
	connections, consumers      int
}

func (b *bed) use(m *instance) use {
	b.t.Helper()
	pid := m.process().cmd.Process.Pid
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	u := use{
		fds:         m.fds(b.t),
		threads:     infoNumber(b.t, string(status), "Threads:"),
		rss:         m.rss(b.t),
		connections: b.number("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'nexusflow'"),
		consumers:   b.consumers(),
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, task := range tasks { // each thread has its own children
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		if err == nil {
			u.children += len(strings.Fields(string(text)))
		}
	}
	return u
}
