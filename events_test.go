package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

// An event is one message of a stream, as an EventSource would dispatch it.
type event struct{ id, name, data string }

// A streamReader reads server-sent events as a browser does.
type streamReader struct {
	resp     *http.Response
	events   chan event
	retry    string // the last that was told; read it after an event
	lastID   string
	comments chan string   // the last few
	began    chan struct{} // closed after the first block, whether it made an event or not
	ended    chan error    // nil when the server ended the stream properly
}

// stream connects to a gateway; header holds names and values in turn.
func (g *gateway) stream(t testing.TB, path string, header ...string) *streamReader {
	t.Helper()
	return readStream(t, g.URL+path, header...)
}

func readStream(t testing.TB, url string, header ...string) *streamReader {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	client := &http.Client{Transport: new(http.Transport)}
	t.Cleanup(client.CloseIdleConnections)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if media := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || media != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("GET %s = %d %s %s", url, resp.StatusCode, media, b)
	}
	s := &streamReader{resp: resp, events: make(chan event, 10000), comments: make(chan string, 8), began: make(chan struct{}), ended: make(chan error, 1)}
	go s.read()
	return s
}

func (s *streamReader) read() {
	defer close(s.events)
	lines := bufio.NewReader(s.resp.Body)
	began := sync.OnceFunc(func() { close(s.began) })
	var e event
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if err == io.EOF {
				err = nil
			}
			s.ended <- err
			return
		}
		line = strings.TrimSuffix(line, "\n")
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch field {
		case "id":
			s.lastID = value
		case "event":
			e.name = value
		case "data":
			e.data += value
		case "retry":
			s.retry = value
		case "":
			if line != "" {
				select {
				case s.comments <- value:
				default:
				}
				continue
			}
			if e.data != "" {
				e.id = s.lastID
				s.events <- e
			}
			e = event{}
			began()
		}
	}
}

// next returns the next event, which must have that name.
func (s *streamReader) next(t testing.TB, name string) event {
	t.Helper()
	select {
	case e, open := <-s.events:
		if !open || e.name != name {
			t.Fatalf("next event is %q (open: %v) %s, want %s", e.name, open, e.data, name)
		}
		return e
	case <-time.After(30 * time.Second):
		t.Fatalf("no event %s within 30 s", name)
	}
	return event{}
}

// end waits for the end of the stream, which must come without further events.
func (s *streamReader) end(t testing.TB) {
	t.Helper()
	select {
	case e, open := <-s.events:
		if open {
			t.Fatalf("event %s %s, want the end", e.name, e.data)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the stream has not ended within 30 s")
	}
	if err := <-s.ended; err != nil {
		t.Errorf("the stream broke: %v", err)
	}
}

// quiet reports that no event came until now.
func (s *streamReader) quiet(t testing.TB) {
	t.Helper()
	if len(s.events) > 0 {
		e := <-s.events
		t.Errorf("unexpected event %s %s", e.name, e.data)
	}
}

func (s *streamReader) close() { s.resp.Body.Close() }

func TestTaskEvents(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","payload":{"text":"two\nlines"}}`)
	path := "/tasks/" + id + "/events"
	s := g.stream(t, path)
	first := s.next(t, "pending")
	h := s.resp.Header
	if h.Get("Cache-Control") != "no-store" || h.Get("X-Accel-Buffering") != "no" || s.retry != "2000" {
		t.Errorf("headers %v, retry %s", h, s.retry)
	}
	shown := g.do(t, "GET", "/tasks/"+id, "")
	if first.data != shown.body || `"`+first.id+`"` != shown.header.Get("Etag") {
		t.Errorf("event %s %s, GET says %s %s", first.id, first.data, shown.header.Get("Etag"), shown.body)
	}
	known := g.stream(t, path, "Last-Event-ID", first.id)
	old := g.stream(t, path, "Last-Event-ID", "processing-0-0")
	old.next(t, "pending")
	g.waiting(t, 3)
	known.quiet(t)
	for _, status := range []string{"processing", "pending", "processing", "completed"} {
		g.move(t, id, status)
		for _, reader := range []*streamReader{s, known, old} {
			if e := reader.next(t, status); !strings.Contains(e.data, `"status":"`+status+`"`) {
				t.Errorf("event %s has %s", status, e.data)
			}
		}
	}
	for _, reader := range []*streamReader{s, known, old} {
		reader.end(t)
	}
	shown = g.do(t, "GET", "/tasks/"+id, "")
	end := g.stream(t, path)
	if e := end.next(t, "completed"); e.data != shown.body {
		t.Errorf("event of an ended task %s, GET says %s", e.data, shown.body)
	}
	end.end(t)
	tag := strings.Trim(shown.header.Get("Etag"), `"`)
	for _, known := range []string{tag, `"` + tag + `"`} {
		if a := g.do(t, "GET", path, "", "Last-Event-Id", known); a.status != 204 || a.body != "" {
			t.Errorf("known end = %d %q, want 204", a.status, a.body)
		}
	}
	g.waiting(t, 0)
}

func TestEventRequests(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	for path, want := range map[string]string{
		"/tasks/" + uuid.NewString() + "/events": `404`,
		"/tasks/x/events":                        `404`,
		"/tasks/" + id + "/events?wait=5":        `422 "loc":["query","wait"]`,
		"/events?limit=5":                        `422 "loc":["query","limit"]`,
		"/events?name=":                          `422 "type":"string_too_short","loc":["query","name"]`,
		"/events?name=a&name=b":                  `422 "type":"value_error","loc":["query","name"]`,
		"/events?status=done&name=":              `422 "type":"literal_error","loc":["query","status"],"msg":"Input should be one of: pending, processing, completed, failed, cancelled"`,
		"/events?status=":                        `422 "loc":["query","status"]`,
		"/events?status=failed,":                 `422 "loc":["query","status"]`,
	} {
		status, text, _ := strings.Cut(want, " ")
		if a := g.do(t, "GET", path, ""); fmt.Sprint(a.status) != status || !strings.Contains(a.body, text) {
			t.Errorf("GET %s = %d %s, want %s", path, a.status, a.body, want)
		}
	}
	for _, path := range []string{"/tasks/" + id + "/events", "/events"} {
		if a := g.do(t, "HEAD", path, ""); a.status != 200 || a.header.Get("Content-Type") != "text/event-stream" {
			t.Errorf("HEAD %s = %d %v", path, a.status, a.header)
		}
		if a := g.do(t, "POST", path, ""); a.status != 405 || a.header.Get("Allow") != "GET, HEAD" {
			t.Errorf("POST %s = %d %v", path, a.status, a.header)
		}
	}
	g.waiting(t, 0)
}

// An idle stream shows that it lives.
func TestEventHeartbeat(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	if g.server.lobby.beat != 15*time.Second {
		t.Errorf("a sign of life every %v, want 15 s", g.server.lobby.beat)
	}
	g.server.lobby.beat = 20 * time.Millisecond
	for _, path := range []string{"/tasks/" + g.submitted(t, `{"name":"a"}`) + "/events", "/events"} {
		s := g.stream(t, path)
		for range 3 {
			select {
			case <-s.comments:
			case <-time.After(15 * time.Second):
				t.Fatalf("%s: no comment within 15 s", path)
			}
		}
	}
}

// What does not pass the filter of a stream moves its position on all the same: a client that
// comes back need not be told of a gap where nothing was for it.
func TestEventHeartbeatMovesOn(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.server.lobby.beat = 20 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", g.URL+"/events?name=b", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := ""
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		id, ok := strings.CutPrefix(lines.Text(), "id: ")
		switch {
		case !ok:
		case first == "":
			first = id
			g.submitted(t, `{"name":"a"}`)
		case id != first:
			return
		}
	}
	t.Errorf("the position stays at %s", first)
}

// The feed shows each state of each task that passes the filter, without payload and result.
func TestAllEvents(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	before := g.submitted(t, `{"name":"a","idempotency_key":"before"}`)
	all := g.stream(t, "/events")
	named := g.stream(t, "/events?name=b")
	ends := g.stream(t, "/events?status=failed&status=completed,cancelled")
	a := g.submitted(t, `{"name":"a","payload":{"secret":1},"idempotency_key":"k"}`)
	e := all.next(t, "pending")
	if !strings.HasPrefix(e.data, `{"task_id":"`+a+`","name":"a","status":"pending","retry_count":0,`) || !strings.HasSuffix(e.data, `"attempts":[]}`) || strings.Contains(e.data, "payload") || strings.Contains(e.data, "result") {
		t.Errorf("event %s", e.data)
	}
	b := g.submitted(t, `{"name":"b"}`)
	all.next(t, "pending")
	named.next(t, "pending")
	for _, id := range []string{before, a, b} {
		for _, status := range []string{"processing", "completed"} {
			g.move(t, id, status)
			if e := all.next(t, status); !strings.Contains(e.data, id) {
				t.Errorf("event %s, want of %s", e.data, id)
			}
		}
		if e := ends.next(t, "completed"); !strings.Contains(e.data, id) {
			t.Errorf("event %s, want of %s", e.data, id)
		}
	}
	named.next(t, "processing")
	named.next(t, "completed")
	// A delayed task, one that SQL inserted, one that is retried, and one that is deleted.
	later := g.submitted(t, `{"name":"a","delay_ms":3600000}`)
	if e := all.next(t, "pending"); !strings.Contains(e.data, later) {
		t.Errorf("event %s, want of %s", e.data, later)
	}
	g.exec(t, "INSERT INTO tasks (name) VALUES ('sql')")
	if e := all.next(t, "pending"); !strings.Contains(e.data, `"name":"sql"`) {
		t.Errorf("event %s, want of the inserted task", e.data)
	}
	g.move(t, later, "processing")
	all.next(t, "processing")
	g.exec(t, "UPDATE tasks SET status = 'pending', lease_until = NULL, retry_count = 1, updated_at = clock_timestamp(), published_at = NULL, run_at = now() + interval '1 day' WHERE task_id = $1", later)
	if e := all.next(t, "pending"); !strings.Contains(e.data, `"retry_count":1`) {
		t.Errorf("event of a retry: %s", e.data)
	}
	g.exec(t, "DELETE FROM tasks WHERE task_id = $1", before)
	all.quiet(t)
}

// Changes at a high rate, out of a backlog, are all seen: 1,000 tasks in a second of which each ends
// in the moment it begins.
func TestAllEventsBacklog(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	const tasks, step = 1000, 50
	g.exec(t, `INSERT INTO tasks (name, published_at, created_at, updated_at)
		SELECT 'a', now() - interval '1 hour' + n * interval '1 ms', now() - interval '1 hour', now() - interval '1 hour' FROM generate_series(1, $1) n`, 2*tasks)
	s := g.stream(t, "/events?status=completed")
	conn := connect(t, g.dsn)
	tick := time.NewTicker(time.Second / (tasks / step))
	defer tick.Stop()
	for range tasks / step {
		<-tick.C
		if _, err := conn.Exec(t.Context(), `UPDATE tasks SET status = 'completed', finished_at = now(), updated_at = now() WHERE task_id IN
			(SELECT task_id FROM tasks WHERE status = 'pending' ORDER BY published_at LIMIT $1)`, step); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]bool{}
	for range tasks {
		e := s.next(t, "completed")
		id := e.data[:60]
		if seen[id] {
			t.Fatalf("seen twice: %s", e.data)
		}
		seen[id] = true
	}
	s.quiet(t)
}

// Running tasks are seen to end also when there are more than one look takes.
func TestAllEventsRunning(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	const tasks = 9 * feedRows
	g.exec(t, `INSERT INTO tasks (name, status, lease_until, created_at, updated_at)
		SELECT 'a', 'processing', now() + interval '1 hour' + n * interval '1 ms', now() - interval '1 hour', now() - interval '1 hour' FROM generate_series(1, $1) n`, tasks)
	s := g.stream(t, "/events")
	<-s.began
	// The heartbeats of the rest bring them forward, and thereby others out of sight.
	g.exec(t, "UPDATE tasks SET lease_until = lease_until + interval '1 hour' WHERE task_id IN (SELECT task_id FROM tasks ORDER BY lease_until LIMIT $1)", feedRows)
	g.submitted(t, `{"name":"b"}`)
	if e := s.next(t, "pending"); !strings.Contains(e.data, `"name":"b"`) { // so there was a look
		t.Errorf("event %s", e.data)
	}
	s.quiet(t)
	g.exec(t, "UPDATE tasks SET status = 'completed', lease_until = NULL, updated_at = now(), finished_at = now() WHERE name = 'a'")
	for range tasks {
		s.next(t, "completed")
	}
	s.quiet(t)
}

// What the workers of this process do is seen however fast it is.
func TestAllEventsLocal(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.WorkerConcurrency = 64
	svc := startService(t, cfg, map[string]handlerFunc{"quick": func(context.Context, task) (any, error) { return nil, nil }})
	s := readStream(t, svc.url+"/events?status=completed")
	// None of them is young or at the head of its queue for long.
	if _, err := svc.pool.Exec(t.Context(), `INSERT INTO tasks (name, created_at) SELECT 'quick', now() - interval '1 hour' FROM generate_series(1, 3000)`); err != nil {
		t.Fatal(err)
	}
	for range 3000 {
		s.next(t, "completed")
	}
}

// A client that comes back gets what it missed, or is told that something may be missing.
func TestAllEventsResume(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	s := g.stream(t, "/events")
	a := g.submitted(t, `{"name":"a"}`)
	last := s.next(t, "pending").id
	s.close()
	g.waiting(t, 0)
	g.move(t, a, "processing")
	watch := g.stream(t, "/events", "Last-Event-ID", last)
	if e := watch.next(t, "processing"); !strings.Contains(e.data, a) || e.id == last {
		t.Errorf("event after coming back: %+v", e)
	}
	watch.quiet(t)
	// An id is told before there is an event.
	idle := g.stream(t, "/events")
	<-idle.began
	idle.close()
	<-idle.ended
	g.move(t, a, "pending")
	watch.next(t, "pending")
	g.stream(t, "/events", "Last-Event-ID", idle.lastID).next(t, "pending")
	// Another process' id, and one of before a break.
	for _, unknown := range []string{"XXXXXXXX-1", "nonsense", g.server.feed.life + "-0"} {
		lost := g.stream(t, "/events", "Last-Event-ID", unknown)
		if e := lost.next(t, "gap"); e.data != "{}" {
			t.Errorf("gap has %q", e.data)
		}
	}
	b := g.submitted(t, `{"name":"b"}`)
	if e := watch.next(t, "pending"); !strings.Contains(e.data, b) {
		t.Errorf("event %s, want of %s", e.data, b)
	}
}

// A client that does not read is cut off, and holds up nobody.
func TestEventsUnread(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.server.lobby.patience = 500 * time.Millisecond
	deaf, err := net.Dial("tcp", g.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	if err := deaf.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(deaf, "GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
	g.waiting(t, 1)
	s := g.stream(t, "/events?name=end")
	g.waiting(t, 2)
	large := []byte(`"` + strings.Repeat("x", 1<<20) + `"`)
	eventually(t, "who does not read is cut off", func() bool {
		g.server.feed.publish([]change{{"a", "pending", large}, {"end", "pending", []byte("1")}})
		s.next(t, "pending")
		return g.server.lobby.taken.Load() == 1
	})
}

// The feed keeps the latest events only, and tells who is behind.
func TestFeedKeeps(t *testing.T) {
	t.Parallel()
	f := newFeed(nil, nil)
	f.begin(nil, time.Now())
	first := f.newest()
	for i := range 2*feedEvents + 7 {
		f.publish([]change{{"a", "pending", fmt.Append(nil, i)}})
	}
	if n := len(f.events); n > feedEvents || n < feedEvents/2 {
		t.Errorf("%d events are kept, want about %d", n, feedEvents)
	}
	if p := f.after(first, 10); !p.gap || len(p.changes) != 10 || string(p.changes[0].data) != fmt.Sprint(2*feedEvents+7-len(f.events)) {
		t.Errorf("after the first: gap %v, %d changes", p.gap, len(p.changes))
	}
	p := f.after(f.newest()-3, 10)
	if p.gap || len(p.changes) != 3 || p.last != f.newest() {
		t.Errorf("after the last but 3: %+v", p)
	}
	if p = f.after(p.last, 10); p.gap || len(p.changes) != 0 {
		t.Errorf("after the last: %+v", p)
	}
	for range 10 {
		f.publish([]change{{"a", "pending", make([]byte, feedBytes/2)}})
	}
	if len(f.events) > 2 || f.size > feedBytes {
		t.Errorf("%d events of %d bytes are kept", len(f.events), f.size)
	}
	before := f.newest()
	f.begin(nil, time.Now())
	if p := f.after(before, 10); !p.gap || len(p.changes) != 0 || p.last != f.newest() {
		t.Errorf("after a break: %+v", p)
	}
	if n, ours := f.number(f.eventID(5)); !ours || n != 5 {
		t.Errorf("number of an id = %d %v", n, ours)
	}
	for _, id := range []string{"", "x-5", f.life, f.life + "-", f.life + "-x", f.life + "--1"} {
		if n, ours := f.number(id); ours {
			t.Errorf("number(%q) = %d", id, n)
		}
	}
}

// An id that is made between two moments lies between their first ids.
func TestFirstID(t *testing.T) {
	t.Parallel()
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	low, high := firstID(time.Now().Add(-time.Second)), firstID(time.Now().Add(time.Second))
	if slices.Compare(low[:], id[:]) >= 0 || slices.Compare(id[:], high[:]) >= 0 {
		t.Errorf("%v is not between %v and %v", id, low, high)
	}
}
