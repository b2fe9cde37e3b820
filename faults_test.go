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

// insert submits tasks by SQL, as any program may.
func (b *bed) insert(n int, payload string) []uuid.UUID {
	b.t.Helper()
	rows, err := b.db.Query(b.t.Context(), "INSERT INTO tasks (name, payload) SELECT 'probe', $2::text::jsonb FROM generate_series(1, $1) RETURNING task_id", n, payload)
	if err != nil {
		b.t.Fatal(err)
	}
	defer rows.Close()
	var ids []uuid.UUID
	for rows.Next() {
		var id uuid.UUID
		if err := rows.Scan(&id); err != nil {
			b.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
	return ids
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
