//go:build linux

package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

const probeTask = `{"name":"probe","payload":{}}`

// 50 POSTs with one key at two processes make one task, and it runs once.
func TestFault27OneKey(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	members := b.started("A", "B")
	answers := make(chan submitted, 50)
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			<-begin
			answers <- members[i%2].post(probeTask, "Idempotency-Key", "one key")
		})
	}
	close(begin)
	wg.Wait()
	close(answers)
	codes := make(map[int]int)
	ids := make(map[uuid.UUID]bool)
	for s := range answers {
		codes[s.code]++
		ids[s.id] = true
	}
	if codes[202] != 1 || codes[200] != 49 || len(ids) != 1 {
		t.Errorf("answers %v with %d ids, want one 202, 49 x 200 and one id", codes, len(ids))
	}
	if n := b.number("SELECT count(*) FROM tasks"); n != 1 {
		t.Errorf("%d rows, want one", n)
	}
	b.check()
	if n := b.probe.count(); n != 1 {
		t.Errorf("%d runs, want one", n)
	}
}

// A process dies between the commit and the entry in the stream.
func TestFault03DeadGateway(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	a.rd.set(blackHole)
	go a.post(probeTask)
	b.within(20*time.Second, "the row is there", func() bool { return b.number("SELECT count(*) FROM tasks") == 1 })
	a.kill()
	a.rd.set(pass)
	other.start()
	b.soon(faultRepublish+2*time.Second, "task completed", func() bool {
		return b.number("SELECT count(*) FROM tasks WHERE status = 'completed'") == 1
	})
	b.check()
}

// A worker is killed while its tasks run.
func TestFault01DeadWorker(t *testing.T) {
	t.Parallel()
	b := newBed(t, with("WORKER_CONCURRENCY", "10"))
	members := b.started("A", "B")
	a := members[0]
	b.probe.set(holding)
	ids := members[1].submitMany(20, probeTask)
	b.within(30*time.Second, "20 tasks held", func() bool { return len(b.probe.running()) == 20 })
	lost := b.probe.runningOn("A")
	if len(lost) == 0 {
		t.Fatal("A got no task")
	}
	a.kill()
	b.probe.release()
	b.soon(faultLease+2*time.Second, "the dead worker's tasks restarted", func() bool {
		for _, r := range lost {
			if len(b.probe.of(r.task)) < 2 {
				return false
			}
		}
		return true
	})
	b.within(30*time.Second, "all tasks completed", b.allAre(ids, statusCompleted))
	for _, r := range lost {
		if row := b.row(r.task); row.Attempt != 2 || row.Retry != 0 || row.Lost != 1 {
			t.Errorf("a dead worker's task ended as %+v, want attempt 2, retry_count 0, lost_count 1", row)
		}
	}
	b.check()
}

// A worker is stopped past its lease; another completes the task; the first one goes on with an
// answer in hand.
func TestFault17Zombie(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	b.probe.set(holding)
	id := a.submit(probeTask)
	b.within(20*time.Second, "A holds the task", func() bool { return len(b.probe.runningOn("A")) == 1 })
	zombie := b.probe.runningOn("A")[0]
	other.start()
	a.freeze()
	frozen := time.Now()
	b.within(slack*3*faultLease, "B runs the task", func() bool { return len(b.probe.runningOn("B")) == 1 })
	b.probe.runningOn("B")[0].end(reply{http.StatusOK, `{"by":"B"}`})
	b.within(20*time.Second, "B completed the task", b.allAre([]uuid.UUID{id}, statusCompleted))
	before := b.row(id)
	zombie.end(reply{http.StatusOK, `{"by":"A"}`})
	b.pause(3*faultLease - min(3*faultLease, time.Since(frozen)))
	a.thaw()
	refusals := func() int {
		return a.log.count("outcome refused", id.String()) + a.log.count("lease lost", id.String())
	}
	b.within(20*time.Second, "A is told that the task is not its own", func() bool { return refusals() > 0 })
	b.during(time.Second, "A is refused once", func() bool { return a.log.count("outcome refused", id.String()) <= 1 })
	if after := b.row(id); after != before || after.Result != `{"by": "B"}` || after.Attempt != 2 || after.Lost != 1 {
		t.Errorf("the row became %+v, was %+v", after, before)
	}
	b.probe.release()
	other.stop()
	next := a.submit(probeTask)
	b.within(20*time.Second, "A serves new tasks", b.allAre([]uuid.UUID{next}, statusCompleted))
	b.check()
}

// A stopped worker goes on while others run its tasks: neither its results nor its errors
// count, and no third run begins beside the second.
func TestFault17ZombieMeetsHeir(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	b.probe.set(holding)
	ids := a.submitMany(4, probeTask)
	b.within(20*time.Second, "A holds 4 tasks", func() bool { return len(b.probe.runningOn("A")) == 4 })
	zombies := b.probe.runningOn("A")
	other.start()
	a.freeze()
	b.within(slack*3*faultLease, "B runs them", func() bool { return len(b.probe.runningOn("B")) == 4 })
	for i, r := range zombies {
		if i%2 == 0 {
			r.end(failing)
		} else {
			r.end(reply{http.StatusOK, `{"by":"A"}`})
		}
	}
	a.thaw()
	b.within(20*time.Second, "A is told", func() bool {
		return a.log.count("outcome refused")+a.log.count("lease lost") >= 4
	})
	b.during(faultLease, "the second attempts go on", func() bool {
		return b.number("SELECT count(*) FROM tasks WHERE status = 'processing' AND attempt = 2 AND retry_count = 0") == 4 && b.probe.count() == 8
	})
	b.probe.release()
	b.within(20*time.Second, "completed", b.allAre(ids, statusCompleted))
	if n := b.number(`SELECT count(*) FROM tasks WHERE result->>'by' = 'B' AND attempt = 2`); n != 4 {
		t.Errorf("%d tasks hold B's result, want 4", n)
	}
	b.check()
}

// A task kills every process that runs it.
func TestFault23PoisonTask(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	members := b.started("A", "B")
	byName := map[string]*instance{"A": members[0], "B": members[1]}
	kills := make(chan *instance, 100)
	b.probe.set(func(r *probeRun) reply {
		if r.payload.Do == "poison" {
			kills <- byName[r.member]
			return reply{}
		}
		r.payload.MS = 300
		return completing(r)
	})
	stop := make(chan struct{})
	supervisor := make(chan struct{})
	go func() {
		defer close(supervisor)
		for {
			select {
			case m := <-kills:
				m.kill()
				m.launch()
			case <-stop:
				return
			}
		}
	}()
	poison := members[0].submit(`{"name":"probe","payload":{"do":"poison"}}`)
	ids := b.insert(20, "{}")
	b.within(120*time.Second, "the poison task failed", b.allAre([]uuid.UUID{poison}, statusFailed))
	if n := len(b.probe.of(poison)); n != faultMaxLost+1 {
		t.Errorf("the poison task ran %d times, want %d", n, faultMaxLost+1)
	}
	if row := b.row(poison); row.Error != fmt.Sprintf("worker lost during attempt %d", faultMaxLost+1) || row.Retry != 0 {
		t.Errorf("the poison task ended as %+v", row)
	}
	b.within(60*time.Second, "all others completed", b.allAre(ids, statusCompleted))
	close(stop)
	<-supervisor
	for _, m := range members {
		m.waitReady()
	}
	b.check()
}

// A task that always fails waits between its attempts without holding a worker.
func TestFault25Backoff(t *testing.T) {
	longFault(t)
	b := newBed(t, with("WORKER_CONCURRENCY", "1"))
	a := b.started("A")[0]
	id := a.submit(`{"name":"probe","payload":{"do":"fail"},"max_retries":3}`)
	begin := time.Now()
	others := a.submitMany(20, probeTask)
	b.within(30*time.Second, "others completed", b.allAre(others, statusCompleted))
	t.Logf("20 others completed after %v", time.Since(begin))
	b.within(30*time.Second, "failed", b.allAre([]uuid.UUID{id}, statusFailed))
	runs := b.probe.of(id)
	if len(runs) != 4 {
		t.Fatalf("%d runs, want 4", len(runs))
	}
	for i, base := range []time.Duration{1, 1, 2} {
		base *= 100 * time.Millisecond
		gap := runs[i+1].began.Sub(b.probe.endOf(runs[i]))
		t.Logf("gap %d: %v", i+1, gap)
		if gap < base*9/10 || gap > time.Second+slack*time.Second {
			t.Errorf("gap %d is %v, want at least %v and little more", i+1, gap, base*9/10)
		}
	}
	if row := b.row(id); row.Retry != 3 || row.Attempt != 4 || !strings.Contains(row.Error, "told to fail") {
		t.Errorf("ended as %+v", row)
	}
	b.check()
}

// A process is told to stop: what ends in time is kept, the rest goes to another.
func TestFault29GracefulStop(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	b.probe.set(holding)
	ids := a.submitMany(4, probeTask)
	b.within(20*time.Second, "A holds 4", func() bool { return len(b.probe.runningOn("A")) == 4 })
	other.start()
	a.signal(15)
	begin := time.Now()
	runs := b.probe.runningOn("A")
	kept, cut := runs[:2], runs[2:]
	for _, r := range kept {
		r.end(completing(r))
	}
	code := a.wait(slack * (faultGrace + 2*time.Second))
	took := time.Since(begin)
	t.Logf("A ended after %v", took)
	if code != 0 || took > faultGrace+2*time.Second+slack*time.Second {
		t.Errorf("A ended with code %d after %v, want 0 within %v", code, took, faultGrace+2*time.Second)
	}
	b.soon(2*time.Second, "B runs the rest", func() bool { return len(b.probe.runningOn("B")) == 2 })
	b.probe.release()
	b.within(20*time.Second, "all completed", b.allAre(ids, statusCompleted))
	for _, r := range kept {
		if row := b.row(r.task); row.Attempt != 1 || !strings.Contains(row.Result, `"A"`) {
			t.Errorf("a task that ended in time became %+v", row)
		}
	}
	for _, r := range cut {
		if row := b.row(r.task); row.Attempt != 2 || row.Retry != 0 || row.Lost != 0 {
			t.Errorf("a task that was cut short became %+v, want attempt 2 and no budget spent", row)
		}
	}
	b.check()
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
