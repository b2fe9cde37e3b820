//go:build linux

package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
)

// Bodies that are much too large cost neither memory nor the time of others.
func TestCase65LargeBodies(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	ids := a.submitMany(20, probeTask)
	before := a.rss(t)
	body := strings.Repeat(" ", 10<<20)
	stop := make(chan struct{})
	var most, slowest int
	var refused atomic.Int32
	var watch, wg sync.WaitGroup
	watch.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				begin := time.Now()
				if code, text := a.get("/tasks/" + ids[0].String()); code != http.StatusOK {
					t.Errorf("GET meanwhile = %d %s", code, text)
				}
				slowest = max(slowest, int(time.Since(begin).Milliseconds()))
				most = max(most, a.rss(t))
			}
		}
	})
	for i := range 20 {
		wg.Go(func() {
			var r io.Reader = strings.NewReader(body)
			if i%2 == 0 {
				r = io.MultiReader(r) // of no known length: sent in chunks
			}
			resp, err := b.http.Post("http://"+a.address()+"/tasks", "application/json", r)
			if err != nil {
				return // the server hung up before the client had sent all of it
			}
			defer resp.Body.Close()
			refused.Add(1)
			if resp.StatusCode != http.StatusRequestEntityTooLarge {
				t.Errorf("POST of 10 MB = %d, want 413", resp.StatusCode)
			}
		})
	}
	wg.Wait()
	close(stop)
	watch.Wait()
	if refused.Load() == 0 {
		t.Error("no client got an answer")
	}
	t.Logf("rss %d -> %d kB, slowest GET %d ms", before, most, slowest)
	if most > before+100<<10 {
		t.Errorf("the process uses %d kB, %d before", most, before)
	}
	if slowest > slack*1000 {
		t.Errorf("a GET took %d ms", slowest)
	}
	b.check()
}

// A task with many retries and a small cap has them all, and no more.
func TestCase83ManyRetries(t *testing.T) {
	longFault(t)
	b := newBed(t, with("REQUEUE_BASE_DELAY_MS", "1", "REQUEUE_MAX_DELAY_MS", "5"))
	a := b.started("A")[0]
	id := a.submit(`{"name":"probe","payload":{"do":"fail"},"max_retries":80}`)
	b.within(120*time.Second, "failed", b.allAre([]uuid.UUID{id}, statusFailed), b.openTasks)
	if n := len(b.probe.of(id)); n != 81 {
		t.Errorf("%d runs, want 81", n)
	}
	if row := b.row(id); row.Retry != 80 || row.Attempt != 81 {
		t.Errorf("ended as %+v", row)
	}
	b.check()
}

// A client sees that a worker was lost, until the next attempt succeeds.
func TestCase117LostWorkerShows(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	b.probe.set(holding)
	id := a.submit(probeTask)
	b.within(20*time.Second, "held", func() bool { return len(b.probe.running()) == 1 })
	a.kill()
	a.start()
	b.within(slack*(faultLease+2*time.Second), "runs again", func() bool { return len(b.probe.of(id)) == 2 })
	type shown struct {
		Status  string
		Message *string `json:"error_message"`
		Retries int     `json:"retry_count"`
		Attempt int
		Lost    int `json:"lost_count"`
	}
	get := func() (s shown) {
		t.Helper()
		code, body := a.get("/tasks/" + id.String())
		if err := json.Unmarshal([]byte(body), &s); err != nil || code != http.StatusOK {
			t.Fatalf("GET = %d %s", code, body)
		}
		return s
	}
	if s := get(); s.Status != statusProcessing || s.Retries != 0 || s.Attempt != 2 || s.Lost != 1 || s.Message == nil || *s.Message != "worker lost during attempt 1" {
		t.Errorf("GET during the second attempt shows %+v", s)
	}
	b.probe.release()
	b.check()
	if s := get(); s.Status != statusCompleted || s.Retries != 0 || s.Attempt != 2 || s.Lost != 1 || s.Message != nil {
		t.Errorf("GET after the second attempt shows %+v", s)
	}
}

// However many paths are asked for, the metrics stay as few as the routes.
func TestCase134PathAsLabel(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	lines := func() int {
		code, text := a.get("/metrics")
		if code != http.StatusOK {
			t.Fatalf("GET /metrics = %d %s", code, text)
		}
		return strings.Count(text, "\n")
	}
	before := lines()
	for range 1000 {
		for _, path := range []string{"/tasks/" + uuid.NewString(), "/" + uuid.NewString()} {
			if code, text := a.get(path); code != http.StatusNotFound {
				t.Fatalf("GET %s = %d %s, want 404", path, code, text)
			}
		}
	}
	if growth := lines() - before; growth >= 50 {
		t.Errorf("the metrics grew from %d lines by %d", before, growth)
	}
	b.check()
}

// Tasks of one moment come once each, page by page, while they are run.
func TestCase119ListTies(t *testing.T) {
	longFault(t)
	b := newBed(t)
	a := b.started("A")[0]
	ids := b.insert(30, `{"ms":50}`)
	if n := b.number("SELECT count(DISTINCT created_at) FROM tasks"); n != 1 {
		t.Fatalf("%d different created_at, want 1", n)
	}
	seen := map[uuid.UUID]int{}
	cursor, pages := "", 0
	for {
		var page struct {
			Tasks []struct {
				ID uuid.UUID `json:"task_id"`
			}
			Next string `json:"next_cursor"`
		}
		code, body := a.get("/tasks?limit=7" + cursor)
		if err := json.Unmarshal([]byte(body), &page); err != nil || code != http.StatusOK {
			t.Fatalf("GET = %d %s", code, body)
		}
		for _, task := range page.Tasks {
			seen[task.ID]++
		}
		if pages++; page.Next == "" {
			break
		}
		cursor = "&cursor=" + page.Next
	}
	for _, id := range ids {
		if seen[id] != 1 {
			t.Errorf("task %s is on %d pages", id, seen[id])
		}
	}
	if len(seen) != 30 || pages != 5 {
		t.Errorf("%d tasks on %d pages, want 30 on 5", len(seen), pages)
	}
	b.check()
}
