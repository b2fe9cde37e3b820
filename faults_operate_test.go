//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

// operate sends a POST without a body and returns status and answer; 0 when there was none.
func (m *instance) operate(path string) (int, string) {
	resp, err := m.bed.http.Post("http://"+m.address()+path, "", nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(body)
}

// A process is killed in the middle of a bulk retry: what it committed stays, the rest is retried by
// the same request at another process, and every task is retried and run once.
func TestFaultBulkRetryKilled(t *testing.T) {
	t.Parallel()
	b := newBed(t, with("WORKER_CONCURRENCY", "16"))
	a, other := b.member("A", "ROLES", "gateway"), b.member("B")
	a.start()
	const n = 3 * bulkBatch
	b.exec(`INSERT INTO tasks (name, status, finished_at, attempt, retry_count, error_message)
		SELECT 'probe', 'failed', now(), 4, 3, 'old error' FROM generate_series(1, $1)`, n)
	// Each row of the second batch takes a moment, so that the kill falls into it.
	b.exec(`CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF OLD.status = 'failed' AND (SELECT count(*) FROM audit) >= 250 THEN PERFORM pg_sleep(0.01); END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER dawdle BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION dawdle()`)
	answered := make(chan int, 1)
	go func() {
		code, _ := a.operate("/tasks/retry?status=failed")
		answered <- code
	}()
	retried := func() int { return b.number("SELECT count(*) FROM audit WHERE was = 'failed' AND \"is\" = 'pending'") }
	b.within(30*time.Second, "the first batch is committed", func() bool { return retried() > 0 })
	a.kill()
	if code := <-answered; code != 0 {
		t.Fatalf("the request was answered with %d before the kill", code)
	}
	b.exec("DROP TRIGGER dawdle ON tasks")
	first := retried()
	if first == n {
		t.Fatal("the kill came too late")
	}
	other.start()
	again := 0
	b.within(60*time.Second, "the rest is retried", func() bool {
		code, body := other.operate("/tasks/retry?status=failed")
		var got struct {
			Retried int
			Next    *string `json:"next_cursor"`
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil || code != http.StatusOK {
			t.Fatalf("retry = %d %s, %v", code, body, err)
		}
		again += got.Retried
		return got.Retried == 0
	})
	t.Logf("%d tasks were retried before the kill, %d after it", first, again)
	b.settle(60 * time.Second)
	for what, query := range map[string]string{
		"retries": `SELECT count(*) FROM audit WHERE was = 'failed' AND "is" = 'pending' AND retry_is = 0 AND attempt_is = attempt_was`,
		"claims":  `SELECT count(*) FROM audit WHERE was = 'pending' AND "is" = 'processing' AND attempt_is = 5`,
		"ends":    `SELECT count(*) FROM audit WHERE "is" IN ('completed', 'failed', 'cancelled')`,
		"tasks":   `SELECT count(*) FROM tasks WHERE status = 'completed' AND attempt = 5 AND retry_count = 0`,
	} {
		if got := b.number(query); got != n {
			t.Errorf("%d %s, want %d", got, what, n)
		}
	}
	if runs := b.probe.count(); runs != n {
		t.Errorf("%d runs, want %d", runs, n)
	}
	b.checkRest()
}

// Redis is wiped while a queue is paused: nothing runs, and all of it after the resumption.
func TestFaultPauseFlushResume(t *testing.T) {
	t.Parallel()
	// With a lease that no load outlasts: a task that is given back would wait for the resumption.
	b := newBed(t, with("LEASE", "30s", "PEL_IDLE_THRESHOLD_MS", "30000"))
	members := b.started("A", "B")
	b.probe.set(holding)
	held := members[0].submitMany(2, probeTask)
	b.within(20*time.Second, "2 held", func() bool { return len(b.probe.running()) == 2 })
	if code, body := members[1].operate("/queues/default/pause"); code != http.StatusOK {
		t.Fatalf("pause = %d %s", code, body)
	}
	queued := append(members[0].submitMany(50, probeTask), b.insert(20, "{}")...)
	b.redisDo("FLUSHALL")
	b.probe.release()
	b.within(20*time.Second, "what ran is completed", b.allAre(held, statusCompleted))
	b.during(faultRepublish+time.Second, "nothing begins, and nothing is added", func() bool {
		return b.probe.count() == len(held) && b.entries() <= 0 && b.countOf(queued, statusPending) == len(queued)
	})
	if code, body := members[0].operate("/queues/default/resume"); code != http.StatusOK {
		t.Fatalf("resume = %d %s", code, body)
	}
	b.soon(2*time.Second+time.Second, "all completed", b.allAre(queued, statusCompleted), b.openTasks)
	b.check()
	if n := b.probe.count(); n != len(held)+len(queued) {
		t.Errorf("%d runs, want %d", n, len(held)+len(queued))
	}
}

// Cancels race with claims and outcomes: a task ends once, whichever wins, and one that was answered
// as cancelled never runs.
func TestCancelRaces(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.DatabaseURL = newDatabase(t)
	conn := connect(t, cfg.DatabaseURL)
	execute(t, conn, audit)
	a := startService(t, cfg, map[string]handlerFunc{"short": func(ctx context.Context, _ task) (any, error) {
		if !sleep(ctx, time.Duration(rand.IntN(10))*time.Millisecond) {
			return nil, context.Cause(ctx)
		}
		return nil, nil
	}})
	b := startService(t, cfg, map[string]handlerFunc{"short": noop})
	var wg sync.WaitGroup
	answers := make(chan string, 200)
	for range 8 {
		wg.Go(func() {
			for range 25 {
				_, task := postTask(t, a.url, "", `{"name":"short","max_retries":0}`)
				id := fmt.Sprint(task["task_id"])
				sleep(t.Context(), time.Duration(rand.IntN(8))*time.Millisecond)
				resp, err := http.Post(b.url+"/tasks/"+id+"/cancel", "", nil)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				answers <- fmt.Sprint(resp.StatusCode, " ", id)
			}
		})
	}
	wg.Wait()
	close(answers)
	counts := make(map[string]int)
	for answer := range answers {
		code, text, _ := strings.Cut(answer, " ")
		id := uuid.MustParse(text)
		eventually(t, "task ended", func() bool { return terminal(a.task(id).Status) })
		row := a.task(id)
		counts[code+" "+row.Status]++
		switch {
		case code == "200" && row.Status == statusCancelled && row.Attempt == 0:
		case code == "202" && (row.Status == statusCancelled || row.Status == statusCompleted || row.Status == statusFailed) && row.Attempt == 1:
		case code == "409" && row.Status == statusCompleted && row.Attempt == 1 && !row.CancelRequested:
		default:
			t.Errorf("answered %s, and the task is %s", code, describe(row))
		}
	}
	t.Logf("answers and what became of the tasks: %v", counts)
	ends := column[int](t, conn, `SELECT count(*)::int FROM audit WHERE "is" IN ('completed', 'failed', 'cancelled') GROUP BY task_id HAVING count(*) <> 1`)
	late := column[int](t, conn, `SELECT count(*)::int FROM audit WHERE was IN ('completed', 'failed', 'cancelled')`)
	if len(ends) > 0 || late[0] > 0 {
		t.Errorf("%d tasks ended more than once, %d changes after the end", len(ends), late[0])
	}
	if n := column[int](t, conn, `SELECT count(DISTINCT task_id)::int FROM audit WHERE "is" IN ('completed', 'failed', 'cancelled')`); n[0] != 200 {
		t.Errorf("%d tasks ended, want 200", n[0])
	}
}
