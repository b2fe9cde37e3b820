package main

import (
	"context"
	"fmt"
	"net"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

// burst posts bodies at once, spread over the gateways, and returns the answers.
func burst(t *testing.T, key string, bodies []string, gateways ...*gateway) []answer {
	t.Helper()
	answers := make([]answer, len(bodies))
	var wg sync.WaitGroup
	for i, body := range bodies {
		wg.Go(func() {
			var err error
			answers[i], err = gateways[i%len(gateways)].try(t.Context(), "POST", "/tasks", strings.NewReader(body),
				"Content-Type", "application/json", "Idempotency-Key", key)
			if err != nil {
				t.Errorf("POST: %v", err)
			}
		})
	}
	wg.Wait()
	return answers
}

// Row 14: one row, one 202 and the same id for everybody, also when two gateways share
// the work.
func TestSameKeyAtOnce(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
	for round := range 10 {
		n := 40
		if round == 0 {
			n = 200
		}
		key := fmt.Sprint("same-", round)
		var ids []string
		created := 0
		for _, a := range burst(t, key, slices.Repeat([]string{`{"name":"` + key + `"}`}, n), g, other) {
			switch a.status {
			case 202:
				created++
			case 200:
			default:
				t.Errorf("%d %s, want 202 or 200", a.status, a.body)
			}
			ids = append(ids, a.str("task_id"))
		}
		if rows := g.number(t, "SELECT count(*) FROM tasks WHERE name = $1", key); created != 1 || rows != 1 || len(slices.Compact(ids)) != 1 {
			t.Errorf("%d × 202, %d rows, ids %v: want one", created, rows, slices.Compact(ids))
		}
	}
}

// Row 15: as row 14, with two contents. Everybody who gets 2xx asked for what is stored.
func TestSameKeyAtOnceOtherContent(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
	for round := range 10 {
		key := fmt.Sprint("mixed-", round)
		bodies := make([]string, 40)
		for i := range bodies {
			bodies[i] = fmt.Sprintf(`{"name":"%s","payload":{"i":%d}}`, key, i/2%2)
		}
		created := 0
		answers := burst(t, key, bodies, g, other)
		stored := g.number(t, "SELECT (payload->>'i')::int FROM tasks WHERE name = $1", key)
		for i, a := range answers {
			if a.status == 202 {
				created++
			}
			if mine := i/2%2 == stored; mine != (a.status == 200 || a.status == 202) || !mine && a.str("type") != problemURN+"idempotency-key-reused" {
				t.Errorf("payload %d where %d is stored: %d %s", i/2%2, stored, a.status, a.body)
			}
		}
		if created != 1 {
			t.Errorf("%d × 202, want 1", created)
		}
	}
}

// Many different keys in opposite orders through two gateways: no deadlock shows.
func TestManyKeysAtOnce(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[int]int{}
	for client := range 32 {
		wg.Go(func() {
			for i := range 20 {
				key, to := i, g
				if client%2 == 1 {
					key, to = 19-i, other
				}
				a, err := to.try(t.Context(), "POST", "/tasks", strings.NewReader(`{"name":"a"}`),
					"Content-Type", "application/json", "Idempotency-Key", fmt.Sprint("k", key))
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				count[a.status]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if count[202] != 20 || count[200] != 32*20-20 {
		t.Errorf("answers by status: %v, want 20 × 202 and 620 × 200", count)
	}
}

// rivalInsert opens a transaction that holds key, as another program's would.
func rivalInsert(t *testing.T, g *gateway, key string) (end func(sql string)) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	rival := connect(t, g.dsn)
	for _, sql := range []string{"BEGIN", "INSERT INTO tasks (name, idempotency_key) VALUES ('rival', '" + key + "')"} {
		if _, err := rival.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	return func(sql string) {
		t.Helper()
		if _, err := rival.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
}

// Rows 11, 12 and 13: an insert of the same key is under way elsewhere and commits, rolls
// back, or takes longer than a request may. Nobody else has to wait for it.
func TestRivalInsert(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		row, end string
		status   int
		rows     int
	}{
		{"11 commits", "COMMIT", 200, 1},
		{"12 rolls back", "ROLLBACK", 202, 1},
		{"13 takes too long", "", 503, 0},
	} {
		t.Run(test.row, func(t *testing.T) {
			t.Parallel()
			dsn := newDatabase(t)
			g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
			end := rivalInsert(t, g, "held")
			done := make(chan answer, 2)
			for _, to := range []*gateway{g, other} {
				go func() {
					a, err := to.try(context.WithoutCancel(t.Context()), "POST", "/tasks", strings.NewReader(`{"name":"rival"}`),
						"Content-Type", "application/json", "Idempotency-Key", "held")
					if err != nil {
						t.Error(err)
					}
					done <- a
				}()
			}
			eventually(t, "both wait beside the batches", func() bool {
				return g.server.intake.waiting.Load() == 1 && other.server.intake.waiting.Load() == 1
			})
			for i := range 20 {
				start := time.Now()
				g.submitted(t, `{"name":"other"}`, "Idempotency-Key", fmt.Sprint("free", i))
				if took := time.Since(start); took > 2*time.Second {
					t.Errorf("another key took %v beside the one that waits", took)
				}
			}
			if test.end != "" {
				end(test.end)
			}
			a, b := <-done, <-done
			if a.status > b.status {
				a, b = b, a
			}
			want := []int{200, test.status}
			if test.status == 503 {
				want = []int{503, 503}
			}
			if a.status != want[0] || b.status != want[1] {
				t.Errorf("%d %s, %d %s: want %v", a.status, a.body, b.status, b.body, want)
			}
			if test.status == 503 {
				if a.header.Get("Retry-After") == "" {
					t.Error("503 without Retry-After")
				}
				end("ROLLBACK")
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = 'rival'"); n != test.rows {
				t.Errorf("%d rows, want %d", n, test.rows)
			}
			if test.status == 503 {
				g.submitted(t, `{"name":"rival"}`, "Idempotency-Key", "held")
			}
		})
	}
}

// A key that is held does not hold the rows up that came in one batch with it, and those
// who ask for it again do not stop the batches.
func TestRivalInsertBesideBatches(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	end := rivalInsert(t, g, "held")
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			key := fmt.Sprint("free", i)
			if i%20 == 0 {
				key = "held"
			}
			start := time.Now()
			a, err := g.try(context.WithoutCancel(t.Context()), "POST", "/tasks", strings.NewReader(`{"name":"a"}`),
				"Content-Type", "application/json", "Idempotency-Key", key)
			if want := map[bool]int{true: 503, false: 202}[key == "held"]; err != nil || a.status != want {
				t.Errorf("key %s: %d %s, %v, want %d", key, a.status, a.body, err, want)
			}
			if took := time.Since(start); key != "held" && took > 4*time.Second || took > 8*time.Second {
				t.Errorf("key %s took %v", key, took)
			}
		})
	}
	wg.Wait()
	end("COMMIT")
	if a := g.post(t, `{"name":"rival"}`, "Idempotency-Key", "held"); a.status != 200 {
		t.Errorf("after the commit: %d %s, want 200", a.status, a.body)
	}
}

// Row 36: the client hangs up while its task is being stored.
func TestClientGone(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	end := rivalInsert(t, g, "gone")
	conn, err := net.Dial("tcp", g.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"name":"a"}`
	if _, err := fmt.Fprintf(conn, "POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: gone\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the request waits", func() bool { return g.server.intake.waiting.Load() == 1 })
	conn.Close()
	end("ROLLBACK")
	eventually(t, "the task is stored", func() bool { return g.number(t, "SELECT count(*) FROM tasks") == 1 })
	if a := g.post(t, body, "Idempotency-Key", "gone"); a.status != 200 || a.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("POST again = %d %s, want 200", a.status, a.body)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}

// If PostgreSQL refuses what the checks let through, the bad row alone is refused.
func TestUnstorableRowInBatch(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	in := g.server.intake
	ws := make([]*waiter, 20)
	for i := range ws {
		ws[i] = newWaiter(fmt.Sprint("k", i), `{}`)
		if i%7 == 3 {
			ws[i].sub.Payload = `{"a":"\u0000"}`
		}
	}
	in.flush(t.Context(), slices.Clone(ws))
	for i, w := range ws {
		o := <-w.done
		if bad := i%7 == 3; (o.err != nil) != bad {
			t.Errorf("row %d: %v", i, o.err)
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 17 {
		t.Errorf("%d rows, want 17", n)
	}
}

// Row 15 inside one batch, where the two meet in one statement.
func TestSameKeyInBatch(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	first, same, other := newWaiter("k", `{"a":1}`), newWaiter("k", `{"a":1}`), newWaiter("k", `{"a":2}`)
	other.sub.Hash[0]++
	g.server.intake.flush(t.Context(), []*waiter{first, same, other})
	a, b, c := <-first.done, <-same.done, <-other.done
	if a.err != nil || a.replayed || a.id != first.id {
		t.Errorf("first = %+v, want a new task", a)
	}
	if b.err != nil || !b.replayed || b.id != first.id {
		t.Errorf("same = %+v, want a replay of %s", b, first.id)
	}
	if c.err != errKeyReused {
		t.Errorf("other = %+v, want %v", c, errKeyReused)
	}
}

func newWaiter(key, payload string) *waiter {
	return &waiter{
		until: time.Now().Add(submitLimit),
		id:    uuid.Must(uuid.NewV7()),
		sub:   submission{Name: "a", Payload: payload, Key: key},
		queue: defaultQueue,
		done:  make(chan receipt, 1),
	}
}

// S2: PostgreSQL stores the batch, and the reply is lost with the connection. The row is
// there once and its request is answered as if nothing had happened.
func TestLostReply(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "k"} {
		t.Run("key "+key, func(t *testing.T) {
			t.Parallel()
			dsn := newDatabase(t)
			l := newLink(t, "127.0.0.1:0", testPostgres(t).socket)
			g := startGateway(t, l.dsn(connect(t, dsn).Config().Database), nil)
			g.dsn = dsn
			g.submitted(t, `{"name":"warm"}`)
			for range 3 {
				l.loseReply("InsertTasks")
				var header []string
				if key != "" {
					header = []string{"Idempotency-Key", key}
					key += "k"
				}
				id := g.submitted(t, `{"name":"a"}`, header...)
				if n := g.number(t, "SELECT count(*) FROM tasks WHERE task_id = $1", id); n != 1 {
					t.Errorf("%d rows with the answered id, want 1", n)
				}
			}
			if l.repliesLost() != 3 {
				t.Errorf("%d replies were swallowed, want 3", l.repliesLost())
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = 'a'"); n != 3 {
				t.Errorf("%d rows, want 3", n)
			}
			if n := len(g.published()); n != 4 {
				t.Errorf("%d entries, want 4", n)
			}
		})
	}
}

// Requests that wait when the server is told to stop are answered before it has stopped.
func TestDrain(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	end := rivalInsert(t, g, "held")
	done := make(chan answer, 1)
	go func() {
		a, err := g.try(context.WithoutCancel(t.Context()), "POST", "/tasks", strings.NewReader(`{"name":"a"}`),
			"Content-Type", "application/json", "Idempotency-Key", "held")
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	eventually(t, "the request waits", func() bool { return g.server.intake.waiting.Load() == 1 })
	g.server.drain()
	stopped := make(chan error, 1)
	go func() { stopped <- g.Config.Shutdown(context.WithoutCancel(t.Context())) }()
	eventually(t, "nobody new is let in", func() bool {
		conn, err := net.Dial("tcp", g.Listener.Addr().String())
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	end("ROLLBACK")
	if a := <-done; a.status != 202 {
		t.Errorf("POST = %d %s, want 202", a.status, a.body)
	}
	if err := <-stopped; err != nil {
		t.Errorf("shutdown: %v", err)
	}
}

// What was added before the end is stored, although nobody waits for it any more.
func TestRunStoresWhatIsLeft(t *testing.T) {
	t.Parallel()
	p := testPools(t)
	in := newIntake(discardLog(), p, hints{publish: func([]entry) {}, up: func() bool { return true }}, newMetrics())
	ws := make([]*waiter, 700)
	for i := range ws {
		ws[i] = newWaiter("", `{}`)
		if err := in.batch.add(t.Context(), ws[i]); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := in.run(ctx); err != nil {
		t.Fatal(err)
	}
	for i, w := range ws {
		if o := <-w.done; o.err != nil || o.id != w.id {
			t.Fatalf("task %d: %+v", i, o)
		}
	}
}

func BenchmarkSubmit(b *testing.B) {
	g := startGatewayLog(b, newDatabase(b), nil, discardLog())
	h := g.server.handler()
	b.SetParallelism(32)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			r := httptest.NewRequest("POST", "/tasks", strings.NewReader(`{"name":"a","payload":{"file":"clip.mp4"}}`))
			r.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != 202 {
				b.Errorf("%d %s", w.Code, w.Body)
			}
		}
	})
}
