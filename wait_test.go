package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"nexusflow/db"
)

// A pending answer is one that a request waits for.
type pendingAnswer struct {
	answer
	err   error
	begun time.Time
	ended time.Time
	done  chan struct{}
}

// begin sends a request and returns at once.
func (g *gateway) begin(ctx context.Context, method, path, body string, header ...string) *pendingAnswer {
	p := &pendingAnswer{begun: time.Now(), done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.answer, p.err = g.try(ctx, method, path, strings.NewReader(body), header...)
		p.ended = time.Now()
	}()
	return p
}

// wait returns the answer once it is there.
func (p *pendingAnswer) wait(t testing.TB) answer {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(45 * time.Second):
		t.Fatal("no answer within 45 s")
	}
	if p.err != nil {
		t.Fatal(p.err)
	}
	return p.answer
}

func (p *pendingAnswer) took() time.Duration { return p.ended.Sub(p.begun) }

func (p *pendingAnswer) answered() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// waiting waits until n places are taken and all of them have read their tasks.
func (g *gateway) waiting(t testing.TB, n int) {
	t.Helper()
	l := g.server.lobby
	eventually(t, fmt.Sprintf("%d requests wait", n), func() bool {
		if int(l.taken.Load()) != n {
			return false
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, places := range l.byTask {
			for _, p := range places {
				if p.seen == (taskState{}) {
					return false
				}
			}
		}
		return true
	}, func() any { return l.taken.Load() })
}

// move changes a task as a process elsewhere does.
func (g *gateway) move(t testing.TB, id, status string) {
	t.Helper()
	set := map[string]string{
		"processing": "lease_until = now() + interval '1 hour', attempt = attempt + 1, started_at = now()",
		"completed":  `lease_until = NULL, finished_at = now(), result = '{"ok": true}'`,
		"failed":     "lease_until = NULL, finished_at = now(), error_message = 'no luck'",
		"pending":    "lease_until = NULL, published_at = NULL",
	}[status]
	g.exec(t, "UPDATE tasks SET updated_at = clock_timestamp(), status = '"+status+"', "+set+" WHERE task_id = $1", id)
}

// What may be asked for, in the query and in Prefer, and what is refused.
func TestWaitRequests(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	g.move(t, id, "completed")
	for _, c := range []struct {
		query  string
		prefer []string
		want   string // Preference-Applied, or the members of the error
	}{
		{query: "wait=0"},
		{query: "wait=30"},
		{query: "wait=31"},
		{query: "wait=99999999999999999999999"},
		{query: "wait=-1", want: `"type":"greater_than_equal","loc":["query","wait"]`},
		{query: "wait=", want: `"type":"int_type","loc":["query","wait"]`},
		{query: "wait=1.5", want: `"type":"int_type","loc":["query","wait"]`},
		{query: "wait=+5", want: `"type":"int_type","loc":["query","wait"]`},
		{query: "wait=5s", want: `"type":"int_type","loc":["query","wait"]`},
		{query: "wait=1&wait=1", want: `"type":"value_error","loc":["query","wait"]`},
		{query: "Wait=1&x=%ff", want: `[{"type":"extra_forbidden","loc":["query","Wait"],"msg":"Extra inputs are not permitted"},{"type":"extra_forbidden","loc":["query","x"]`},
		{query: "wait=1;x", want: `"type":"value_error","loc":["query"]`},
		{query: "wait=5", prefer: []string{"wait=7"}},
		{prefer: []string{"wait=7"}, want: "wait=7"},
		{prefer: []string{"wait=0"}, want: "wait=0"},
		{prefer: []string{"wait=700"}, want: "wait=30"},
		{prefer: []string{`respond-async, WAIT = "9" ; x=1`}, want: "wait=9"},
		{prefer: []string{`foo="a, wait=5\", wait=6"`, "wait=8, wait=9"}, want: "wait=8"},
		{prefer: []string{"wait=x, wait=5"}},
		{prefer: []string{"wait=-5"}},
		{prefer: []string{"wait"}},
		{prefer: []string{`wait="5"`}, want: "wait=5"},
		{prefer: []string{`wait="5`}},
		{prefer: []string{`wait="`}},
		{prefer: []string{"x; wait=5"}},
		{prefer: []string{"waiting=5", ",,=;\"\\"}},
	} {
		var header []string
		for _, p := range c.prefer {
			header = append(header, "Prefer", p)
		}
		a := g.do(t, "GET", "/tasks/"+id+"?"+c.query, "", header...)
		if strings.HasPrefix(c.want, `"`) || strings.HasPrefix(c.want, "[") {
			if a.status != 422 || !strings.Contains(a.body, c.want) || !strings.Contains(a.body, `"detail":"The query is invalid: see errors."`) {
				t.Errorf("%s = %d %s, want 422 with %s", c.query, a.status, a.body, c.want)
			}
			continue
		}
		if applied := a.header.Get("Preference-Applied"); a.status != 200 || applied != c.want {
			t.Errorf("query %q, Prefer %q = %d, applied %q, want 200, %q", c.query, c.prefer, a.status, applied, c.want)
		}
	}
	if a := g.do(t, "GET", "/tasks/"+uuid.NewString()+"?wait=30", ""); a.status != 404 {
		t.Errorf("wait for an unknown task = %d, want 404 at once", a.status)
	}
}

// A wait lasts until the task has ended, however often it changes before, or until its time is over.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	long := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "")
	head := g.begin(t.Context(), "HEAD", "/tasks/"+id, "", "Prefer", "wait=30")
	short := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=1", "")
	g.waiting(t, 3)
	g.move(t, id, "processing")
	a := short.wait(t)
	if a.status != 200 || a.str("status") != "processing" || a.header.Get("Retry-After") != "1" || short.took() < time.Second {
		t.Errorf("wait of 1 s = %d %s after %v, Retry-After %q", a.status, a.str("status"), short.took(), a.header.Get("Retry-After"))
	}
	g.move(t, id, "pending")
	g.exec(t, "UPDATE tasks SET run_at = now() + interval '20 s' WHERE task_id = $1", id)
	if a := g.do(t, "GET", "/tasks/"+id+"?wait=1", ""); a.header.Get("Retry-After") != "1" {
		t.Errorf("Retry-After at the end of a wait = %q, want 1", a.header.Get("Retry-After"))
	}
	if long.answered() {
		t.Fatal("the wait ended before the task did")
	}
	done := time.Now()
	g.move(t, id, "completed")
	a = long.wait(t)
	t.Logf("seen %v after the change", long.ended.Sub(done))
	if a.status != 200 || a.str("status") != "completed" || a.str("result") != `{"ok":true}` || a.header.Get("Retry-After") != "" {
		t.Errorf("wait = %d %s", a.status, a.body)
	}
	if h := head.wait(t); h.status != 200 || h.header.Get("Etag") != a.header.Get("Etag") || h.header.Get("Preference-Applied") != "wait=30" {
		t.Errorf("HEAD = %d %v", h.status, h.header)
	}
	g.waiting(t, 0)
}

func TestWaitIfNoneMatch(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	tag := g.do(t, "GET", "/tasks/"+id, "").header.Get("Etag")
	over := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=1", "", "If-None-Match", tag)
	if a := over.wait(t); a.status != 304 || a.body != "" || a.header.Get("Etag") != tag || over.took() < time.Second {
		t.Errorf("unchanged = %d %q %v after %v, want 304 after 1 s", a.status, a.body, a.header, over.took())
	}
	changed := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "", "If-None-Match", tag)
	g.waiting(t, 1)
	g.move(t, id, "processing")
	a := changed.wait(t)
	if a.status != 200 || a.str("status") != "processing" || a.header.Get("Etag") == tag {
		t.Errorf("changed = %d %s", a.status, a.body)
	}
	// A state that differs already, and the end, are no reason to wait.
	for _, known := range []string{tag, a.header.Get("Etag")} {
		old := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "", "If-None-Match", known)
		if known != tag {
			g.waiting(t, 1)
			g.move(t, id, "completed")
		}
		if a := old.wait(t); a.status != 200 {
			t.Errorf("If-None-Match %s = %d, want 200", known, a.status)
		}
	}
	tag = g.do(t, "GET", "/tasks/"+id, "").header.Get("Etag")
	if a := g.do(t, "GET", "/tasks/"+id+"?wait=30", "", "If-None-Match", tag); a.status != 304 {
		t.Errorf("known end = %d, want 304 at once", a.status)
	}
}

func TestWaitForDeleted(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	p := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "")
	g.waiting(t, 1)
	g.exec(t, "DELETE FROM tasks WHERE task_id = $1", id)
	if a := p.wait(t); a.status != 404 {
		t.Errorf("deleted while waiting = %d, want 404", a.status)
	}
}

// A submit that waits answers with what came of the task, and with the same code as one that does not.
func TestWaitSubmit(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	post := func(wait string, key string) *pendingAnswer {
		return g.begin(t.Context(), "POST", "/tasks", `{"name":"a"}`, "Content-Type", "application/json", "Prefer", wait, "Idempotency-Key", key)
	}
	over := post("wait=1", "k")
	a := over.wait(t)
	id := a.str("task_id")
	if a.status != 202 || a.str("status") != "pending" || a.header.Get("Preference-Applied") != "wait=1" || a.header.Get("Retry-After") != "1" || over.took() < time.Second || strings.Contains(a.body, "result") {
		t.Errorf("wait of 1 s = %d %s %v after %v", a.status, a.body, a.header, over.took())
	}
	replay := post("wait=30", "k")
	g.waiting(t, 1)
	g.move(t, id, "completed")
	a = replay.wait(t)
	want := fmt.Sprintf(`{"task_id":"%s","name":"a","status":"completed","accepted_at":"%s","idempotency_key":"k","result":{"ok":true},"error_message":null}`, id, a.str("accepted_at"))
	if a.status != 200 || a.body != want || a.header.Get("Idempotent-Replayed") != "true" || a.header.Get("Preference-Applied") != "wait=30" {
		t.Errorf("replay = %d %s\nwant 200 %s", a.status, a.body, want)
	}
	fresh := post("wait=30", "k2")
	g.waiting(t, 1)
	g.exec(t, "UPDATE tasks SET status = 'failed', finished_at = now(), updated_at = clock_timestamp(), error_message = 'no luck' WHERE idempotency_key = 'k2'")
	a = fresh.wait(t)
	if a.status != 202 || a.str("status") != "failed" || a.str("error_message") != "no luck" || a.str("result") != "null" || a.header.Get("Retry-After") != "" {
		t.Errorf("new = %d %s %v", a.status, a.body, a.header)
	}
	if a := post("wait=soon", "k3").wait(t); a.status != 202 || a.str("status") != "accepted" || a.header.Get("Preference-Applied") != "" {
		t.Errorf("malformed preference = %d %s %v", a.status, a.body, a.header)
	}
}

// post submits a task to a service and waits for its end; it returns the body.
func (s *testService) postAndWait(name string) answer {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), "POST", s.url+"/tasks", strings.NewReader(`{"name":"`+name+`"}`))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Prefer", "wait=30")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(b)}
}

// The end of a task is seen in the process that ran it and in another.
func TestWaitAcrossProcesses(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	ended := make(chan time.Time, 1)
	handlers := map[string]handlerFunc{"quick": func(context.Context, task) (any, error) {
		ended <- time.Now()
		return "fine", nil
	}}
	cfg.Gateway = false
	worker := startService(t, cfg, handlers)
	cfg = worker.cfg
	cfg.Gateway, cfg.Worker = true, false
	gateway := startService(t, cfg, handlers)
	check := func(s *testService, where string) {
		for range 5 {
			a := s.postAndWait("quick")
			t.Logf("%s: answered %v after the handler", where, time.Since(<-ended))
			if a.status != 202 || a.str("status") != "completed" || a.str("result") != "fine" {
				t.Errorf("%s: %d %s", where, a.status, a.body)
			}
		}
	}
	check(gateway, "another process")
	if err := worker.stop(); err != nil {
		t.Fatal(err)
	}
	cfg.Worker = true
	check(startService(t, cfg, handlers), "the same process")
}

// A worker's word reaches the one who waits without a poll of all.
func TestWaitHint(t *testing.T) {
	g := startGateway(t, newDatabase(t), nil)
	l := newLobby(g.pools.api, func(error) {})
	id := uuid.MustParse(g.submitted(t, `{"name":"a"}`))
	if n := testing.AllocsPerRun(100, func() { l.hint(id) }); n != 0 || len(l.hinted) > 0 {
		t.Errorf("a hint while nobody waits: %v allocations, %d noted", n, len(l.hinted))
	}
	p := l.join(id, true)
	l.hint(uuid.New())
	if ids := l.asked(false); len(ids) != 0 {
		t.Errorf("asked for %v after a hint at another task", ids)
	}
	l.hint(id)
	if ids := l.asked(false); len(ids) != 1 || ids[0] != id {
		t.Errorf("asked for %v after the hint, want %v", ids, id)
	}
	if err := l.poll(t.Context(), []uuid.UUID{id}); err != nil || len(p.changed) != 0 {
		t.Errorf("a pending task wakes who waits for its end: %v", err)
	}
	g.move(t, id.String(), "completed")
	if err := l.poll(t.Context(), []uuid.UUID{id}); err != nil || len(p.changed) != 1 {
		t.Errorf("the end does not wake who waits for it: %v", err)
	}
	l.leave(p)
	if len(l.byTask) != 0 || l.taken.Load() != 0 || l.asks.Load() != 0 {
		t.Errorf("left behind: %v, %d places, %d asks", l.byTask, l.taken.Load(), l.asks.Load())
	}
}

// The worker tells of a task when others can read the change, not before.
func TestWorkerTellsChanges(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.ConsumerName = "teller"
	p := testPools(t)
	stream, err := openStream(testLog(t), cfg, newRedisURL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.close()
	table := newHandlerTable(cfg)
	table.handle("quick", func(context.Context, task) (any, error) { return nil, nil })
	told := make(chan string, 9)
	changed := func(id uuid.UUID) {
		row, err := db.New(p.api).GetTask(context.Background(), id)
		if err != nil {
			t.Error(err)
		}
		told <- row.Status
	}
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	loop := func(_ string, run func(context.Context) error) { g.Go(func() error { return run(ctx) }) }
	all := parts{log: testLog(t), cfg: cfg, pools: p, stream: stream, handlers: table, metrics: newMetrics()}
	drained := all.startWorker(ctx, &g, loop, changed)
	if _, err := p.api.Exec(t.Context(), "INSERT INTO tasks (name) VALUES ('quick')"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{statusProcessing, statusCompleted} {
		select {
		case got := <-told:
			if got != want {
				t.Errorf("told while the task is %s, want %s", got, want)
			}
		case <-time.After(15 * time.Second):
			t.Errorf("not told of %s", want)
		}
	}
	cancel()
	drained(time.Now().Add(time.Second))
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// All places taken: no connection is held, others are served, and who comes later is told at once.
func TestWaitPlaces(t *testing.T) {
	g := startGateway(t, newDatabase(t), nil)
	ids := make([]string, 10)
	for i := range ids {
		ids[i] = g.submitted(t, `{"name":"a"}`)
	}
	conns := make([]net.Conn, maxPlaces)
	for i := range conns {
		conn, err := net.Dial("tcp", g.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conns[i] = conn
		path := "/tasks/" + ids[i%len(ids)] + "?wait=30"
		if i%10 == 0 {
			path = "/tasks/" + ids[i/10%len(ids)] + "/events"
		}
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path)
	}
	g.waiting(t, maxPlaces)
	eventually(t, "no connection is in use", func() bool { return g.pools.api.Stat().AcquiredConns() == 0 })
	for range 200 {
		if n := g.pools.api.Stat().AcquiredConns(); n > 1 { // the poll's own
			t.Fatalf("%d connections in use while all wait", n)
		}
		time.Sleep(time.Millisecond)
	}
	id := g.submitted(t, `{"name":"b"}`)
	late := g.begin(t.Context(), "GET", "/tasks/"+id, "", "Prefer", "wait=30")
	if a := late.wait(t); a.status != 200 || a.str("status") != "pending" || a.header.Get("Preference-Applied") != "" || late.took() > 20*time.Second {
		t.Errorf("without a place: %d after %v, Preference-Applied %q", a.status, late.took(), a.header.Get("Preference-Applied"))
	}
	if a := g.post(t, `{"name":"c"}`, "Prefer", "wait=30"); a.status != 202 || a.str("status") != "accepted" || a.header.Get("Preference-Applied") != "" {
		t.Errorf("submit without a place: %d %s", a.status, a.body)
	}
	for _, path := range []string{"/tasks/" + id + "/events", "/events"} {
		if a := g.do(t, "GET", path, ""); a.status != 503 || a.header.Get("Retry-After") == "" || a.str("type") != problemURN+"overloaded" {
			t.Errorf("%s without a place: %d %s", path, a.status, a.body)
		}
	}
	g.exec(t, `UPDATE tasks SET status = 'completed', finished_at = now(), updated_at = clock_timestamp() WHERE name = 'a'`)
	for i, conn := range conns {
		if err := conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(b), " 200 OK") || !strings.Contains(string(b), `"status":"completed"`) {
			t.Fatalf("request %d: %v %.300s", i, err, b)
		}
	}
	g.waiting(t, 0)
}

// When the process drains, all waits end with what is so at that moment, and no new ones begin.
func TestWaitDrain(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	tag := g.do(t, "GET", "/tasks/"+id, "").header.Get("Etag")
	plain := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "")
	known := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "", "If-None-Match", tag)
	one := g.stream(t, "/tasks/"+id+"/events")
	all := g.stream(t, "/events")
	g.waiting(t, 4)
	g.server.drain()
	if a := plain.wait(t); a.status != 200 || a.str("status") != "pending" || a.header.Get("Retry-After") != "1" || plain.took() > 25*time.Second {
		t.Errorf("drained: %d %s after %v", a.status, a.body, plain.took())
	}
	if a := known.wait(t); a.status != 304 {
		t.Errorf("drained with If-None-Match: %d, want 304", a.status)
	}
	one.next(t, "pending")
	one.end(t)
	all.end(t)
	late := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "")
	if a := late.wait(t); a.status != 200 || late.took() > 25*time.Second {
		t.Errorf("a wait after drain: %d after %v", a.status, late.took())
	}
	for _, path := range []string{"/tasks/" + id + "/events", "/events"} {
		if a := g.do(t, "GET", path, ""); a.status != 503 || a.header.Get("Retry-After") != "1" {
			t.Errorf("%s after drain: %d %s", path, a.status, a.body)
		}
	}
}

// A signal ends the waits of the whole program before it ends the handlers.
func TestWaitShutdown(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), map[string]handlerFunc{"held": func(ctx context.Context, _ task) (any, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}})
	id := s.insert("held")
	s.await(id, statusProcessing)
	one := readStream(t, s.url+"/tasks/"+id.String()+"/events")
	all := readStream(t, s.url+"/events")
	one.next(t, "processing")
	var submitted answer
	done := make(chan struct{})
	go func() {
		defer close(done)
		submitted = s.postAndWait("held")
	}()
	if e := all.next(t, "processing"); e.data == "" {
		t.Error("no event of the submitted task")
	}
	if err := s.stop(); err != nil {
		t.Error(err)
	}
	<-done
	if submitted.status != 202 || submitted.str("status") != "processing" {
		t.Errorf("POST = %d %s, want 202 and processing", submitted.status, submitted.body)
	}
	one.end(t)
}

// Neither time limit of the HTTP server ends a wait or a stream.
func TestWaitOutlastsTimeouts(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	const limit = 300 * time.Millisecond
	impatient := httptest.NewUnstartedServer(nil)
	impatient.Config = g.server.httpServer()
	impatient.Config.ReadTimeout, impatient.Config.WriteTimeout = limit, limit
	impatient.Start()
	defer impatient.Close()
	g.server.lobby.beat = 50 * time.Millisecond
	id := g.submitted(t, `{"name":"a"}`)
	begin := time.Now()
	var group sync.WaitGroup
	get := func(path, want string) {
		group.Go(func() {
			resp, err := impatient.Client().Get(impatient.URL + path)
			if err != nil {
				t.Errorf("%s after %v: %v", path, time.Since(begin), err)
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != 200 || !strings.Contains(string(b), want) {
				t.Errorf("%s after %v = %d %v %s", path, time.Since(begin), resp.StatusCode, err, b)
			}
		})
	}
	get("/tasks/"+id+"?wait=30", `"status":"completed"`)
	get("/tasks/"+id+"?wait=1", `"status":"pending"`)
	get("/tasks/"+id+"/events", "event: completed\n")
	time.Sleep(4 * limit)
	g.move(t, id, "completed")
	group.Wait()
}

// While PostgreSQL is away those who wait go on waiting, and the log has one line.
func TestWaitPostgresAway(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	var lines lineLog
	g := startGatewayLog(t, pg.createDatabase(t, "gateway"), nil, lines.logger())
	id := g.submitted(t, `{"name":"a"}`)
	long := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=30", "")
	short := g.begin(t.Context(), "GET", "/tasks/"+id+"?wait=4", "")
	submit := g.begin(t.Context(), "POST", "/tasks", `{"name":"b"}`, "Content-Type", "application/json", "Prefer", "wait=4")
	stream := g.stream(t, "/tasks/"+id+"/events")
	stream.next(t, "pending")
	all := g.stream(t, "/events")
	<-all.began
	g.waiting(t, 5)
	pg.stop()
	a := short.wait(t)
	if a.status != 503 || a.header.Get("Retry-After") != "1" || short.took() < 4*time.Second {
		t.Errorf("at the end of a wait without PostgreSQL = %d after %v, want 503 after 4 s", a.status, short.took())
	}
	if a := submit.wait(t); a.status != 202 || a.str("status") != "accepted" {
		t.Errorf("a stored task is answered with %d %s, want 202", a.status, a.body)
	}
	if err := pg.start(); err != nil {
		t.Fatal(err)
	}
	g.move(t, id, "completed")
	if a := long.wait(t); a.status != 200 || a.str("status") != "completed" {
		t.Errorf("after the outage = %d %s", a.status, a.body)
	}
	stream.next(t, "completed")
	// After a long outage the feed owns that it may have missed something.
	eventually(t, "the end or a gap in the stream of all", func() bool {
		for {
			select {
			case e := <-all.events:
				if e.name == "gap" || e.name == "completed" && strings.Contains(e.data, id) {
					return true
				}
			default:
				return false
			}
		}
	})
	if away, back := lines.count("postgres does not serve"), lines.count("postgres is back"); away != 1 || back != 1 {
		t.Errorf("%d lines say that PostgreSQL went and %d that it is back, want one of each", away, back)
	}
}

// Clients that break off leave nothing behind, whatever they waited for.
func TestWaitBrokenClients(t *testing.T) {
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	before := runtime.NumGoroutine()
	var conns []net.Conn
	for i := range 200 {
		conn, err := net.Dial("tcp", g.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		switch i % 4 {
		case 0:
			fmt.Fprintf(conn, "GET /tasks/%s?wait=30 HTTP/1.1\r\nHost: x\r\n\r\n", id)
		case 1:
			fmt.Fprintf(conn, "GET /tasks/%s/events HTTP/1.1\r\nHost: x\r\n\r\n", id)
		case 2:
			fmt.Fprintf(conn, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
		case 3:
			const body = `{"name":"b"}`
			fmt.Fprintf(conn, "POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nPrefer: wait=30\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
		if i%4 == 1 || i%4 == 2 {
			if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
				t.Fatalf("stream: %q %v", line, err)
			}
		}
	}
	g.waiting(t, 200)
	for i, conn := range conns {
		if tcp := conn.(*net.TCPConn); i%2 == 0 {
			tcp.SetLinger(0) // a reset
		}
		conn.Close()
	}
	g.waiting(t, 0)
	eventually(t, "goroutines back to their number", func() bool { return runtime.NumGoroutine() <= before+2 },
		func() any { return fmt.Sprintf("%d, %d before", runtime.NumGoroutine(), before) })
	if f := g.server.feed; f.followers != 0 {
		t.Errorf("%d followers are left", f.followers)
	}
}

// A request whose client is gone is not answered, so it is not logged as failed.
func TestWaitClientGoneLog(t *testing.T) {
	t.Parallel()
	var lines lineLog
	g := startGatewayLog(t, newDatabase(t), nil, lines.logger())
	id := g.submitted(t, `{"name":"a"}`)
	ctx, cancel := context.WithCancel(t.Context())
	p := g.begin(ctx, "GET", "/tasks/"+id+"?wait=30", "")
	g.waiting(t, 1)
	cancel()
	<-p.done
	if !errors.Is(p.err, context.Canceled) {
		t.Errorf("answer %d, error %v", p.status, p.err)
	}
	eventually(t, "the request is logged", func() bool { return lines.count(`"route":"/tasks/{task_id}"`) == 1 })
	if lines.count(`"status":503`) > 0 {
		t.Errorf("logged as 503: %v", lines.all())
	}
}
