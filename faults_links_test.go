//go:build linux

package main

import (
	"math/rand/v2"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
)

// A worker that is cut off from PostgreSQL alone stops its handlers before another may begin them.
func TestFaultCutOffFromPostgres(t *testing.T) {
	longFault(t)
	for name, mode := range map[string]linkMode{"silent": blackHole, "refused": refused} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			a, other := b.member("A"), b.member("B")
			a.start()
			b.probe.set(holding)
			ids := a.submitMany(4, probeTask)
			b.within(20*time.Second, "A holds 4", func() bool { return len(b.probe.runningOn("A")) == 4 })
			cut := b.probe.runningOn("A")
			other.start()
			// A is not noted as disturbed: nothing excuses an overlap.
			a.pg.set(mode)
			b.within(slack*3*faultLease, "B runs them", func() bool { return len(b.probe.runningOn("B")) == 4 })
			for _, r := range cut {
				heir := b.probe.of(r.task)[1]
				lead := heir.began.Sub(b.probe.endOf(r))
				t.Logf("the first run ended %v before the second began", lead)
				if lead <= 0 {
					t.Errorf("task %s ran twice at once", r.task)
				}
			}
			a.pg.set(pass)
			b.probe.release()
			b.within(30*time.Second, "completed", b.allAre(ids, statusCompleted))
			b.check()
		})
	}
}

// A worker that is cut off from Redis alone keeps its tasks.
func TestFaultCutOffFromRedis(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a, other := b.member("A"), b.member("B")
	a.start()
	b.probe.set(holding)
	ids := a.submitMany(4, probeTask)
	b.within(20*time.Second, "A holds 4", func() bool { return len(b.probe.runningOn("A")) == 4 })
	other.start()
	a.rd.set(blackHole)
	b.during(2*(faultIdle+faultScan), "nobody else runs them", func() bool { return b.probe.count() == 4 })
	b.probe.release()
	b.within(30*time.Second, "completed while Redis is silent", b.allAre(ids, statusCompleted))
	a.rd.set(pass)
	b.check()
	if n := b.number("SELECT count(*) FROM tasks WHERE attempt <> 1 OR lost_count <> 0"); n != 0 {
		t.Errorf("%d tasks paid for it", n)
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

// A process that is told to stop while a server is silent or away ends in time all the same.
func TestFaultStopDuringOutage(t *testing.T) {
	longFault(t)
	for _, c := range []struct {
		name string
		link func(*instance) *link
		mode linkMode
	}{
		{"postgres silent", func(m *instance) *link { return m.pg }, blackHole},
		{"postgres away", func(m *instance) *link { return m.pg }, refused},
		{"redis silent", func(m *instance) *link { return m.rd }, blackHole},
		{"redis away", func(m *instance) *link { return m.rd }, refused},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			a := b.started("A")[0]
			ids := a.submitMany(3, `{"name":"probe","payload":{"do":"hold"}}`)
			b.within(20*time.Second, "3 held", func() bool { return len(b.probe.running()) == 3 })
			a.disturb()
			c.link(a).set(c.mode)
			for range 4 {
				go a.post(probeTask)
			}
			b.pause(500 * time.Millisecond)
			took, code := a.stop()
			t.Logf("ended with code %d after %v", code, took)
			if code != 0 || took > faultGrace+2*time.Second+time.Second {
				t.Errorf("ended with code %d after %v, want 0 within %v", code, took, faultGrace+2*time.Second)
			}
			c.link(a).set(pass)
			a.calm()
			b.probe.release()
			a.start()
			b.within(30*time.Second, "completed", b.allAre(ids, statusCompleted), b.openTasks)
			b.check()
		})
	}
}
