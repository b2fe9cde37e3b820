//go:build linux

package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// TestSoak lets random faults fall on three processes under load for as long as SOAK says,
// then heals everything and checks every promise. SOAK_SEED repeats the choices of a run; their
// exact timing is the machine's.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("SOAK"))
	if err != nil {
		t.Skip("runs with SOAK=15m or another duration")
	}
	seed := uint64(time.Now().UnixNano())
	if given := os.Getenv("SOAK_SEED"); given != "" {
		if seed, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatalf("SOAK_SEED: %v", err)
		}
	}
	s := newSoak(t, seed)
	fmt.Printf("soak of %v, SOAK_SEED=%d\n", length, seed)
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var faults, load sync.WaitGroup
	for i := range uint64(2) {
		faults.Go(func() { s.injure(ctx, rand.New(rand.NewPCG(seed, i))) })
	}
	for i := range uint64(4) {
		load.Go(func() { s.load(ctx, rand.New(rand.NewPCG(seed, 100+i))) })
	}
	load.Go(func() { s.report(ctx) })
	faults.Wait()
	load.Wait()
	fmt.Printf("faults are off; %s\n", s.figures())
	s.check()
	s.checkFailures()
	fmt.Printf("soak ended, SOAK_SEED=%d: %s\nfaults by kind: %v\n", seed, s.figures(), s.counts)
}

// A soak is a bed under random faults.
type soak struct {
	*bed
	members []*instance
	pgLock  sync.Mutex // one fault of a server at a time
	rdLock  sync.Mutex
	locks   map[*instance]*sync.Mutex // and of a process

	mu     sync.Mutex
	counts map[string]int
	ids    []uuid.UUID

	unanswered atomic.Int64 // submissions that had to be repeated
}

func newSoak(t *testing.T, seed uint64) *soak {
	b := newBed(t, ownPostgres, with("WORKER_CONCURRENCY", "8"))
	s := &soak{bed: b, members: b.started("A", "B", "C"), locks: make(map[*instance]*sync.Mutex), counts: make(map[string]int)}
	for _, m := range s.members {
		s.locks[m] = new(sync.Mutex)
	}
	return s
}

// load submits tasks until ctx ends, each under a key of its own and again until it is accepted.
func (s *soak) load(ctx context.Context, rng *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		payload, retries := soakPayload(rng)
		key := strconv.FormatUint(rng.Uint64(), 36) + "-" + strconv.Itoa(n)
		body := fmt.Sprintf(`{"name":"probe","payload":%s,"max_retries":%d}`, payload, retries)
		var id uuid.UUID
		for ctx.Err() == nil {
			a := s.members[rng.IntN(len(s.members))].post(body, "Idempotency-Key", key)
			if a.code == http.StatusAccepted || a.code == http.StatusOK {
				id = a.id
				break
			}
			if a.code != 0 && a.code != http.StatusServiceUnavailable {
				s.t.Errorf("POST = %d %s", a.code, a.body)
			}
			s.unanswered.Add(1)
			sleep(ctx, 100*time.Millisecond)
		}
		if id == uuid.Nil {
			return
		}
		s.mu.Lock()
		s.ids = append(s.ids, id)
		s.mu.Unlock()
		sleep(ctx, time.Duration(rng.IntN(300))*time.Millisecond)
	}
}

func soakPayload(rng *rand.Rand) (string, int) {
	switch n := rng.IntN(100); {
	case n < 70:
		return fmt.Sprintf(`{"ms":%d}`, rng.IntN(200)), 3
	case n < 80:
		return fmt.Sprintf(`{"ms":%d}`, 1000+rng.IntN(5000)), 3
	case n < 90:
		return `{"do":"fail once"}`, 3
	case n < 95:
		return `{"do":"fail"}`, rng.IntN(4)
	default:
		return `{"do":"refuse"}`, 3
	}
}

// A fault is one kind of damage; do returns when it is repaired.
type fault struct {
	name string
	do   func(s *soak, m *instance, rng *rand.Rand, ctx context.Context)
}

// between waits for a random time from low to high milliseconds, or until the soak ends.
func between(ctx context.Context, rng *rand.Rand, low, high int) {
	sleep(ctx, time.Duration(low+rng.IntN(high-low))*time.Millisecond)
}

// onProcess are the faults of one process and its links.
var onProcess = []fault{
	{"kill", func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		m.kill()
		between(ctx, rng, 0, 3000)
		m.launch()
	}},
	{"graceful restart", func(s *soak, m *instance, _ *rand.Rand, _ context.Context) {
		serving := m.address() != ""
		m.disturb()
		m.signal(syscall.SIGTERM)
		select {
		case <-m.process().done:
			if code := m.process().cmd.ProcessState.ExitCode(); serving && code != 0 {
				s.t.Errorf("%s ended with code %d after SIGTERM", m.name, code)
			}
		case <-time.After(slack * (faultGrace + 2*time.Second)):
			s.t.Errorf("%s does not end after SIGTERM", m.name)
			m.signal(syscall.SIGQUIT)
			<-m.process().done
		}
		m.calm()
		m.launch()
	}},
	{"freeze", func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		m.freeze()
		between(ctx, rng, 500, 8000)
		m.thaw()
	}},
	{"postgres black hole", onLink(func(m *instance) *link { return m.pg }, blackHole)},
	{"postgres refused", onLink(func(m *instance) *link { return m.pg }, refused)},
	{"redis black hole", onLink(func(m *instance) *link { return m.rd }, blackHole)},
	{"redis refused", onLink(func(m *instance) *link { return m.rd }, refused)},
	{"postgres slow", slowed(func(m *instance) *link { return m.pg })},
	{"redis slow", slowed(func(m *instance) *link { return m.rd })},
	{"postgres cut", func(s *soak, m *instance, _ *rand.Rand, _ context.Context) { m.disturb(); m.pg.cut(); m.calm() }},
	{"postgres reset", func(s *soak, m *instance, _ *rand.Rand, _ context.Context) { m.disturb(); m.pg.reset(); m.calm() }},
	{"redis cut", func(s *soak, m *instance, _ *rand.Rand, _ context.Context) { m.rd.cut() }},
	{"redis reset", func(s *soak, m *instance, _ *rand.Rand, _ context.Context) { m.rd.reset() }},
	{"postgres reply lost", func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		kinds := []string{"InsertTasks", "ClaimTasks", "CompleteTasks", "FailTasks", "BeatTasks", "ReleaseTasks", "SweepUnpublished", "UnpublishTasks", "ExpireTasks"}
		m.disturb()
		m.pg.loseReply(kinds[rng.IntN(len(kinds))])
		between(ctx, rng, 500, 2000)
		m.pg.loseReply("")
		m.calm()
	}},
	{"redis reply lost", func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		kinds := []string{"xadd", "xreadgroup", "xack", "xclaim", "xpending"}
		m.rd.loseReply(kinds[rng.IntN(len(kinds))])
		between(ctx, rng, 500, 2000)
		m.rd.loseReply("")
	}},
}

func onLink(which func(*instance) *link, mode linkMode) func(*soak, *instance, *rand.Rand, context.Context) {
	return func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		l := which(m)
		if l == m.pg {
			m.disturb()
			defer m.calm()
		}
		l.set(mode)
		between(ctx, rng, 300, 8000)
		l.set(pass)
	}
}

func slowed(which func(*instance) *link) func(*soak, *instance, *rand.Rand, context.Context) {
	return func(s *soak, m *instance, rng *rand.Rand, ctx context.Context) {
		l := which(m)
		if l == m.pg {
			m.disturb()
			defer m.calm()
		}
		l.setSlow(time.Duration(5+rng.IntN(300)) * time.Millisecond)
		between(ctx, rng, 1000, 6000)
		l.set(pass)
	}
}

// onRedis are the faults of Redis itself.
var onRedis = []fault{
	{"redis wiped", func(s *soak, _ *instance, _ *rand.Rand, ctx context.Context) { s.redis.FlushAll(ctx) }},
	{"group destroyed", func(s *soak, _ *instance, _ *rand.Rand, ctx context.Context) {
		s.redis.XGroupDestroy(ctx, "tasks", "workers")
	}},
	{"redis killed", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.rd.stop()
		between(ctx, rng, 100, 6000)
		if err := s.rd.start(); err != nil {
			s.t.Error(err)
		}
	}},
	{"redis frozen", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.rd.proc.signal(syscall.SIGSTOP)
		between(ctx, rng, 300, 5000)
		s.rd.proc.signal(syscall.SIGCONT)
	}},
	{"redis full", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.redis.ConfigSet(ctx, "maxmemory", "1")
		between(ctx, rng, 500, 6000)
		s.redis.ConfigSet(context.WithoutCancel(ctx), "maxmemory", "0")
	}},
	{"redis read-only", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.redis.Do(ctx, "REPLICAOF", "127.0.0.1", "1")
		between(ctx, rng, 500, 6000)
		s.redis.Do(context.WithoutCancel(ctx), "REPLICAOF", "NO", "ONE")
	}},
	{"copies", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.mu.Lock()
		ids := slices.Clone(s.ids[max(0, len(s.ids)-50):])
		s.mu.Unlock()
		for _, id := range ids {
			s.redis.Do(ctx, "XADD", "tasks", "*", "task_id", id.String())
		}
	}},
	{"ghost", func(s *soak, _ *instance, _ *rand.Rand, ctx context.Context) {
		s.redis.Do(ctx, "XREADGROUP", "GROUP", "workers", "ghost", "COUNT", "20", "STREAMS", "tasks", ">")
	}},
}

// onPostgres are the faults of PostgreSQL itself.
var onPostgres = []fault{
	{"postgres crash", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.pg.crash()
		between(ctx, rng, 100, 4000)
		if err := s.pg.start(); err != nil {
			s.t.Error(err)
		}
	}},
	{"backends terminated", func(s *soak, _ *instance, _ *rand.Rand, _ context.Context) { s.pg.exec(s.t, terminate) }},
	{"postgres read-only", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		s.pg.exec(s.t, "ALTER DATABASE fault SET default_transaction_read_only = on; "+terminate)
		between(ctx, rng, 500, 5000)
		s.pg.exec(s.t, "ALTER DATABASE fault RESET default_transaction_read_only; "+terminate)
	}},
	{"table locked", func(s *soak, _ *instance, rng *rand.Rand, ctx context.Context) {
		conn, err := pgx.Connect(ctx, s.pg.dsn("fault"))
		if err != nil {
			return
		}
		defer conn.Close(context.WithoutCancel(ctx))
		if _, err := conn.Exec(ctx, "BEGIN; SET LOCAL lock_timeout = '2s'; LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE"); err == nil {
			between(ctx, rng, 300, 4000)
		}
	}},
}

// terminate ends the connections of the service's processes.
const terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'nexusflow'"

// injure does one damage after another until ctx ends.
func (s *soak) injure(ctx context.Context, rng *rand.Rand) {
	for sleep(ctx, time.Duration(200+rng.IntN(2500))*time.Millisecond) {
		switch n := rng.IntN(10); {
		case n < 6:
			m := s.members[rng.IntN(len(s.members))]
			f := onProcess[rng.IntN(len(onProcess))]
			s.locks[m].Lock()
			s.do(ctx, f, m, rng)
			s.locks[m].Unlock()
		case n < 8:
			f := onRedis[rng.IntN(len(onRedis))]
			s.rdLock.Lock()
			s.do(ctx, f, nil, rng)
			s.rdLock.Unlock()
		default:
			f := onPostgres[rng.IntN(len(onPostgres))]
			s.pgLock.Lock()
			for _, m := range s.members {
				m.disturb()
			}
			s.do(ctx, f, nil, rng)
			for _, m := range s.members {
				m.calm()
			}
			s.pgLock.Unlock()
		}
	}
}

func (s *soak) do(ctx context.Context, f fault, m *instance, rng *rand.Rand) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	s.counts[f.name]++
	s.mu.Unlock()
	f.do(s, m, rng, ctx)
	for _, m := range s.members {
		if s.locks[m].TryLock() {
			if !m.alive() {
				s.t.Errorf("%s ended by itself during %s", m.name, f.name)
				m.launch()
			}
			s.locks[m].Unlock()
		}
	}
}

// figures is how things stand.
func (s *soak) figures() string {
	s.mu.Lock()
	faults := 0
	for _, n := range s.counts {
		faults += n
	}
	s.mu.Unlock()
	s.bed.mu.Lock()
	accepted := len(s.accepted)
	s.bed.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 2*time.Second)
	defer cancel()
	open, changed := "unknown", "unknown"
	s.db.QueryRow(ctx, "SELECT count(*)::text FROM tasks WHERE status IN ('pending', 'processing')").Scan(&open)
	s.db.QueryRow(ctx, "SELECT count(*)::text FROM audit WHERE was IN ('completed', 'failed', 'cancelled')").Scan(&changed)
	return fmt.Sprintf("%d faults, %d tasks accepted, %d submissions repeated, %d runs, %s open, %s changes of ended rows",
		faults, accepted, s.unanswered.Load(), s.probe.count(), open, changed)
}

func (s *soak) report(ctx context.Context) {
	begin := time.Now()
	for sleep(ctx, 10*time.Second) {
		fmt.Printf("%v: %s\n", time.Since(begin).Round(time.Second), s.figures())
	}
}

// checkFailures: no task failed for another reason than its own or the death of its workers.
func (s *soak) checkFailures() {
	rows, err := s.db.Query(s.t.Context(), "SELECT task_id, retry_count, max_retries, lost_count, payload->>'do', error_message FROM tasks WHERE status = 'failed'")
	if err != nil {
		s.t.Fatal(err)
	}
	defer rows.Close()
	reasons := make(map[string]int)
	for rows.Next() {
		var id uuid.UUID
		var retries, most, lost int
		var do *string
		var text string
		if err := rows.Scan(&id, &retries, &most, &lost, &do, &text); err != nil {
			s.t.Fatal(err)
		}
		switch {
		case do != nil && *do == "refuse" && strings.Contains(text, "told to refuse"),
			do != nil && *do == "fail" && retries == most && strings.Contains(text, "told to fail"),
			lost == faultMaxLost && strings.HasPrefix(text, "worker lost during attempt"):
			reasons[strings.TrimRight(text, "0123456789")]++
		default:
			s.t.Errorf("task %s failed without reason: retry %d of %d, lost %d, %q", id, retries, most, lost, text)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		fmt.Printf("%d failed with %q\n", reasons[reason], reason)
	}
}
