package main

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// keyed returns a batch of items whose keys are the prefix and a number, in the order given.
func keyed(prefix string, numbers ...int) string {
	items := make([]string, len(numbers))
	for i, n := range numbers {
		items[i] = fmt.Sprintf(`{"name":"%s","payload":{"n":%d},"idempotency_key":"%s-%03d"}`, prefix, n, prefix, n)
	}
	return batch(items...)
}

func upTo(n int) []int {
	numbers := make([]int, n)
	for i := range numbers {
		numbers[i] = i
	}
	return numbers
}

// startBatch posts a batch and returns where its answer will be.
func (g *gateway) startBatch(t *testing.T, body string, header ...string) <-chan answer {
	done := make(chan answer, 1)
	go func() {
		a, err := g.try(context.WithoutCancel(t.Context()), "POST", batchPath, strings.NewReader(body), append([]string{"Content-Type", "application/json"}, header...)...)
		if err != nil {
			t.Errorf("POST: %v", err)
		}
		done <- a
	}()
	return done
}

// waitsForLock waits until an INSERT of the gateway's waits for a lock.
func (g *gateway) waitsForLock(t *testing.T) {
	t.Helper()
	eventually(t, "an INSERT waits for a lock", func() bool {
		return g.number(t, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'nexusflow' AND wait_event_type = 'Lock' AND query LIKE '%InsertTasks%'`) > 0
	})
}

// Identical batches at once over two gateways: one creates, all others replay.
func TestSameBatchAtOnce(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	gateways := []*gateway{startGateway(t, dsn, nil), startGateway(t, dsn, nil)}
	for round := range 5 {
		prefix := fmt.Sprint("same", round)
		body := keyed(prefix, upTo(50)...)
		var waiting []<-chan answer
		for i := range 8 {
			waiting = append(waiting, gateways[i%2].startBatch(t, body))
		}
		created := 0
		var ids []string
		for _, w := range waiting {
			a := <-w
			switch a.status {
			case 202:
				created++
			case 200:
			default:
				t.Fatalf("%d %.500s, want 202 or 200", a.status, a.body)
			}
			b := a.batch(t)
			if b.Accepted != 0 && b.Accepted != 50 {
				t.Errorf("a batch created %d of its 50 tasks", b.Accepted)
			}
			for i, item := range b.Tasks {
				if len(ids) < 50 {
					ids = append(ids, item.ID)
				}
				if item.ID != ids[i] {
					t.Errorf("item %d is task %s here and %s there", i, item.ID, ids[i])
				}
			}
		}
		if n := gateways[0].number(t, "SELECT count(*) FROM tasks WHERE name = $1", prefix); n != 50 || created != 1 {
			t.Errorf("%d rows, %d × 202, want 50 and 1", n, created)
		}
	}
	if entries := len(gateways[0].published()) + len(gateways[1].published()); entries != 250 {
		t.Errorf("%d entries, want 250", entries)
	}
}

// Batches with the same keys in opposite orders do not deadlock.
func TestBatchesInOppositeOrder(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t) // whose deadlocks are counted, and only ours
	dsn := pg.createDatabase(t, "opposite")
	g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
	for round := range 20 {
		prefix := fmt.Sprint("opposite", round)
		numbers := upTo(300)
		forth := keyed(prefix, numbers...)
		slices.Reverse(numbers)
		back := keyed(prefix, numbers...)
		waiting := []<-chan answer{g.startBatch(t, forth), other.startBatch(t, back), g.startBatch(t, back), other.startBatch(t, forth)}
		created := 0
		for _, w := range waiting {
			a := <-w
			if a.status != 202 && a.status != 200 {
				t.Fatalf("%d %.500s, want 202 or 200", a.status, a.body)
			}
			created += a.batch(t).Accepted
		}
		if created != 300 {
			t.Errorf("%d tasks created, want 300", created)
		}
	}
	g.exec(t, "SELECT pg_stat_force_next_flush()")
	if n := g.number(t, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

// A batch meets single requests for its keys: every key has one task, whoever made it.
func TestBatchRacesSingles(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	g, other := startGateway(t, dsn, nil), startGateway(t, dsn, nil)
	for round := range 10 {
		prefix := fmt.Sprint("race", round)
		var mu sync.Mutex
		ids := map[string]string{} // by key
		created := 0
		meet := func(key, id string, isNew bool) {
			mu.Lock()
			defer mu.Unlock()
			if isNew {
				created++
			}
			if known, ok := ids[key]; ok && known != id {
				t.Errorf("key %s is of task %s and of %s", key, known, id)
			}
			ids[key] = id
		}
		waiting := []<-chan answer{g.startBatch(t, keyed(prefix, upTo(40)...)), other.startBatch(t, keyed(prefix, upTo(40)...))}
		var wg sync.WaitGroup
		for n := range 40 {
			wg.Go(func() {
				item := strings.TrimSuffix(strings.TrimPrefix(keyed(prefix, n), `{"tasks":[`), `]}`)
				a, err := []*gateway{g, other}[n%2].try(t.Context(), "POST", "/tasks", strings.NewReader(item), "Content-Type", "application/json")
				if err != nil || a.status != 202 && a.status != 200 {
					t.Errorf("single: %d %s, %v", a.status, a.body, err)
					return
				}
				meet(a.str("idempotency_key"), a.str("task_id"), a.status == 202)
			})
		}
		for _, w := range waiting {
			a := <-w
			if a.status != 202 && a.status != 200 {
				t.Fatalf("batch: %d %.500s", a.status, a.body)
			}
			for _, item := range a.batch(t).Tasks {
				meet(*item.Key, item.ID, !item.Replayed)
			}
		}
		wg.Wait()
		if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = $1", prefix); n != 40 || created != 40 || len(ids) != 40 {
			t.Errorf("%d rows, %d created, %d keys: want 40 each", n, created, len(ids))
		}
	}
}

// A transaction of somebody else holds one of a batch's keys: commits, rolls back, or takes
// longer than a request may. Until then nothing of the batch is there, and other requests
// do not wait.
func TestBatchBehindRival(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, end string
		status    int
		accepted  int
	}{
		{"commits", "COMMIT", 202, 2},
		{"rolls back", "ROLLBACK", 202, 3},
		{"takes too long", "", 503, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			g := startGateway(t, newDatabase(t), nil)
			end := rivalInsert(t, g, "b-001")
			waiting := g.startBatch(t, keyed("b", 2, 1, 0))
			g.waitsForLock(t)
			for i := range 20 {
				start := time.Now()
				g.submitted(t, `{"name":"other"}`, "Idempotency-Key", fmt.Sprint("free", i))
				if took := time.Since(start); took > 2*time.Second {
					t.Errorf("a single request took %v beside the batch that waits", took)
				}
			}
			if a := g.postBatch(t, keyed("free", 1, 2)); a.status != 202 {
				t.Errorf("another batch = %d %s, want 202", a.status, a.body)
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = 'b'"); n != 0 {
				t.Errorf("%d rows of a batch that waits", n)
			}
			if test.end != "" {
				end(test.end)
			}
			a := <-waiting
			if a.status != test.status {
				t.Fatalf("%d %s, want %d", a.status, a.body, test.status)
			}
			if test.status == 503 {
				if a.header.Get("Retry-After") == "" {
					t.Error("503 without Retry-After")
				}
				end("ROLLBACK")
				g.isIdle(t)
			} else if b := a.batch(t); b.Accepted != test.accepted || b.Tasks[1].Replayed != (test.end == "COMMIT") {
				t.Errorf("%s, want %d accepted", a.body, test.accepted)
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = 'b'"); n != test.accepted {
				t.Errorf("%d rows, want %d", n, test.accepted)
			}
			want := 200
			if test.status == 503 {
				want = 202
			}
			if a := g.postBatch(t, keyed("b", 2, 1, 0)); a.status != want {
				t.Errorf("sent again: %d %s, want %d", a.status, a.body, want)
			}
		})
	}
}

// isIdle waits until no statement of the gateway's is at work any more.
func (g *gateway) isIdle(t *testing.T) {
	t.Helper()
	eventually(t, "the gateway's connections are idle", func() bool {
		return g.number(t, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'nexusflow' AND state <> 'idle'`) == 0
	})
}

// The table is locked: batches are answered with 503 in time, and nothing of them is stored
// when the lock is gone.
func TestBatchBehindTableLock(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for _, mode := range []string{"SHARE", "ACCESS EXCLUSIVE"} {
		rival := connect(t, g.dsn)
		execute(t, rival, "BEGIN; LOCK TABLE tasks IN "+mode+" MODE")
		start := time.Now()
		var waiting []<-chan answer
		for i := range 6 { // some of them get no connection
			waiting = append(waiting, g.startBatch(t, batch(`{"name":"a"}`, fmt.Sprintf(`{"name":"a","idempotency_key":"k%d"}`, i))))
		}
		for _, w := range waiting {
			if a := <-w; a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("%s: %d %s, want 503", mode, a.status, a.body)
			}
		}
		if took := time.Since(start); took > submitLimit+2*time.Second {
			t.Errorf("%s: 503 after %v", mode, took)
		}
		execute(t, rival, "COMMIT")
		g.isIdle(t)
		if n := g.number(t, "SELECT count(*) FROM tasks"); n != 0 || len(g.published()) != 0 {
			t.Errorf("%s: %d rows and %d entries after 503", mode, n, len(g.published()))
		}
	}
	if a := g.postBatch(t, batch(`{"name":"a"}`, `{"name":"a","idempotency_key":"k0"}`)); a.status != 202 || a.batch(t).Accepted != 2 {
		t.Errorf("without the lock: %d %s, want 202 and 2 new", a.status, a.body)
	}
}

// A deadlock with somebody who inserts the same keys in another order costs a batch its
// transaction, not its answer.
func TestBatchSurvivesDeadlock(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	pg.restart(t, "deadlock_timeout=3s") // time for the rival to complete the circle
	g := startGateway(t, pg.createDatabase(t, "deadlock"), nil)
	// The one that looks for a deadlock first is the one that is refused.
	rival := connect(t, g.dsn)
	execute(t, rival, "SET deadlock_timeout = '1min'; BEGIN; INSERT INTO tasks (name, idempotency_key) VALUES ('rival', 'd-001')")
	waiting := g.startBatch(t, keyed("d", 2, 1, 0))
	g.waitsForLock(t)
	execute(t, rival, "INSERT INTO tasks (name, idempotency_key) VALUES ('rival', 'd-000')")
	execute(t, rival, "COMMIT")
	a := <-waiting
	if a.status != 202 || a.batch(t).Accepted != 1 || a.batch(t).Replayed != 2 {
		t.Errorf("%d %s, want 202 with 1 new task", a.status, a.body)
	}
	execute(t, rival, "SELECT pg_stat_force_next_flush()")
	eventually(t, "the deadlock is counted", func() bool {
		return g.number(t, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 1
	})
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 3 {
		t.Errorf("%d rows, want 3", n)
	}
}

// S2: the reply of the INSERT or of the COMMIT is lost with the connection, or late. The rows
// are there once, and the request is answered as if nothing had happened.
func TestBatchLostReply(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		kind string
		late time.Duration
	}{{"begin", 0}, {"InsertTasks", 0}, {"TasksByKey", 0}, {"commit", 0}, {"commit", submitLimit}} {
		t.Run(fmt.Sprint(test.kind, " ", test.late), func(t *testing.T) {
			t.Parallel()
			dsn := newDatabase(t)
			l := newLink(t, "127.0.0.1:0", testPostgres(t).socket)
			g := startGateway(t, l.dsn(connect(t, dsn).Config().Database), nil)
			g.dsn = dsn
			g.postBatch(t, keyed("warm", 0)).batch(t)
			g.postBatch(t, keyed("warm", 0, 1)).batch(t)
			if test.late > 0 {
				l.delayReply(test.kind, test.late)
			} else {
				l.loseReply(test.kind)
			}
			a := g.postBatch(t, batch(`{"name":"a"}`, `{"name":"a","idempotency_key":"k"}`, `{"name":"warm","payload":{"n":0},"idempotency_key":"warm-000"}`, `{"name":"a","idempotency_key":"k"}`))
			var ids []string
			if got := letters(a.batch(t), &ids); a.status != 202 || got != "ABcb" {
				t.Errorf("%d %s, want 202 ABcb: %s", a.status, got, a.body)
			}
			for _, id := range ids[:2] {
				if n := g.number(t, "SELECT count(*) FROM tasks WHERE task_id = $1", id); n != 1 {
					t.Errorf("%d rows with the answered id, want 1", n)
				}
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name = 'a'"); n != 2 {
				t.Errorf("%d rows, want 2", n)
			}
			if n := len(g.published()); n != 4 {
				t.Errorf("%d entries, want 4", n)
			}
			if l.repliesLost() != 1 {
				t.Errorf("%d replies were lost or late, want 1", l.repliesLost())
			}
		})
	}
}

// A COMMIT that takes effect only after the question what became of it: the next round finds
// the rows by their ids.
func TestBatchLateCommit(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", `,"idempotency_key":"k"`} {
		t.Run("key "+key, func(t *testing.T) {
			t.Parallel()
			g := startGateway(t, newDatabase(t), nil)
			in := g.server.intake
			ws := []*waiter{newWaiter("", `{}`), newWaiter("", `{}`)}
			entries := 0 // the rival's rows say that they have none, which only recall reads
			if key != "" {
				ws[0].sub.Key, ws[1].sub.Key, entries = "k", "l", 2
			}
			rival := connect(t, g.dsn) // plays the connection on which COMMIT is still to come
			execute(t, rival, "BEGIN")
			for _, w := range ws {
				if _, err := rival.Exec(t.Context(), "INSERT INTO tasks (task_id, name, idempotency_key, request_hash) VALUES ($1, 'a', NULLIF($2, ''), $3)", w.id, w.sub.Key, w.sub.Hash[:]); err != nil {
					t.Fatal(err)
				}
			}
			done := make(chan []receipt, 1)
			go func() {
				receipts, err := submitAll(t, in, ws)
				if err != nil {
					t.Error(err)
				}
				done <- receipts
			}()
			g.waitsForLock(t)
			execute(t, rival, "COMMIT")
			for i, o := range <-done {
				if o.id != ws[i].id || o.replayed || o.err != nil {
					t.Errorf("receipt %d is %+v, want the new task %s", i, o, ws[i].id)
				}
			}
			if n := g.number(t, "SELECT count(*) FROM tasks"); n != 2 || len(g.published()) != entries {
				t.Errorf("%d rows and %d entries, want 2 and %d", n, len(g.published()), entries)
			}
		})
	}
}

// PostgreSQL restarts or is away: no 500, and what is answered is what is stored.
func TestBatchPostgresAway(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	g := startGateway(t, pg.createDatabase(t, "away"), nil)
	if a := g.postBatch(t, keyed("a", 0, 1)); a.status != 202 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	pg.restart(t)
	if a := g.postBatch(t, keyed("a", 1, 2)); a.status != 202 || a.batch(t).Accepted != 1 {
		t.Errorf("after a restart: %d %s, want 202", a.status, a.body)
	}
	pg.stop()
	if a := g.postBatch(t, keyed("a", 3)); a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("without PostgreSQL: %d %s, want 503", a.status, a.body)
	}
	if err := pg.start(); err != nil {
		t.Fatal(err)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 3 {
		t.Errorf("%d rows, want 3", n)
	}
	if a := g.postBatch(t, keyed("a", 3, 2)); a.status != 202 || a.batch(t).Accepted != 1 {
		t.Errorf("sent again: %d %s, want 202", a.status, a.body)
	}
}

// If PostgreSQL refuses one row that the checks let through, nothing is stored.
func TestBatchUnstorableRow(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	ws := []*waiter{newWaiter("a", `{}`), newWaiter("b", `{"a":"\u0000"}`), newWaiter("", `{}`)}
	if _, err := submitAll(t, g.server.intake, ws); err == nil || err.Error() != errUnstorable.Error() {
		t.Errorf("error %v, want %v", err, errUnstorable)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 0 || len(g.published()) != 0 {
		t.Errorf("%d rows, %d entries, want none", n, len(g.published()))
	}
}

// A batch that waits when the server is told to stop is answered before it has stopped, and
// one whose client hung up is stored.
func TestBatchDrain(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	end := rivalInsert(t, g, "b-000")
	waiting := g.startBatch(t, keyed("b", 0, 1))
	conn, err := net.Dial("tcp", g.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	body := keyed("b", 0, 2)
	if _, err := fmt.Fprintf(conn, "POST /tasks/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both wait", func() bool { return len(g.server.intake.slots) == 2 })
	conn.Close()
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
	if a := <-waiting; a.status != 202 && a.status != 200 {
		t.Errorf("POST = %d %s, want 202", a.status, a.body)
	}
	if err := <-stopped; err != nil {
		t.Errorf("shutdown: %v", err)
	}
	eventually(t, "both batches are stored", func() bool { return g.number(t, "SELECT count(*) FROM tasks WHERE name = 'b'") == 3 })
}

func submitAll(t *testing.T, in *intake, ws []*waiter) ([]receipt, error) {
	ctx, cancel := context.WithTimeout(t.Context(), submitLimit)
	defer cancel()
	return in.submitAll(ctx, ws)
}
