package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"nexusflow/db"
)

// Rows 1-10, 16-30, 32-34 and 39-41 of the truth table of idempotency: what one client can
// see. 11-15 and 36-38 have tests of their own, 31 is net/http's answer and is among
// the raw requests.
func TestTruthTable(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	type request struct {
		key    []string // values of the header
		body   string   // members beside the name
		name   string   // other than the row's
		status int
		want   string // of the answer: status, or the last part of the problem's type
		echo   string // idempotency_key of the answer
		set    string // SQL run on the row's tasks before the request
		before func(t *testing.T, id string)
	}
	purge := func(t *testing.T, id string) {
		got, err := db.New(g.pools.api).DeleteFinished(t.Context(), db.DeleteFinishedParams{MaxRows: 1000, AgeMS: time.Hour.Milliseconds()})
		if err != nil || got.Deleted != 1 {
			t.Fatalf("retention deleted %d tasks, %v, want one", got.Deleted, err)
		}
	}
	retry := func(t *testing.T, id string) {
		if a := g.do(t, "POST", "/tasks/"+id+"/retry", ""); a.status != 202 || a.str("attempt") != "4" {
			t.Fatalf("retry = %d %s, want 202 with the attempt kept", a.status, a.body)
		}
	}
	const (
		accepted = "accepted"
		invalid  = "idempotency-key-invalid"
		reused   = "idempotency-key-reused"
		rule     = "validation"
		first    = `,"payload":{"a":1,"b":[2, 3]}`
	)
	state := func(set, shown string) []request {
		return []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: first, status: 200, want: shown, echo: "$", set: set},
		}
	}
	long := strings.Repeat("k", 255)
	for _, row := range []struct {
		row      string
		requests []request
		tasks    int
	}{
		{"1 new key", []request{{key: []string{"$"}, status: 202, want: accepted, echo: "$"}}, 1},
		{"2 pending", state("status = 'pending'", "pending"), 1},
		{"3 same JSON, other text", []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: ` , "payload" : {"b":[2,3] , "a":1}`, status: 200, want: "pending", echo: "$"},
		}, 1},
		{"3b absent, null and empty payload", []request{
			{key: []string{"$"}, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: `,"payload":null`, status: 200, want: "pending", echo: "$"},
			{key: []string{"$"}, body: `,"payload":{}`, status: 200, want: "pending", echo: "$"},
		}, 1},
		{"4 processing", state("status = 'processing', lease_until = now()", "processing"), 1},
		{"5 completed", state("status = 'completed'", "completed"), 1},
		{"6 waiting for a retry", state("retry_count = 1, run_at = now() + interval '1 h'", "pending"), 1},
		{"7 failed", state("status = 'failed'", "failed"), 1},
		{"8 cancelled", state("status = 'cancelled'", "cancelled"), 1},
		{"9 other payload", []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: `,"payload":{"a":2}`, status: 422, want: reused},
		}, 1},
		{"10 other name", []request{
			{key: []string{"$"}, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, name: "10 other", status: 422, want: reused},
		}, 1},
		{"10b other option", []request{
			{key: []string{"$"}, body: `,"max_retries":3`, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, status: 422, want: reused},
			{key: []string{"$"}, body: `,"max_retries":4`, status: 422, want: reused},
			{key: []string{"$"}, body: `,"max_retries":3,"run_at":"2026-01-01T00:00:00Z"`, status: 422, want: reused},
			{key: []string{"$"}, body: `,"max_retries":3`, status: 200, want: "pending", echo: "$"},
		}, 1},
		{"16-17 header beats body", []request{
			{key: []string{"$"}, body: `,"idempotency_key":"$-b"`, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: `,"idempotency_key":"$-b"`, status: 200, want: "pending", echo: "$"},
			{key: []string{"$-b"}, status: 202, want: accepted, echo: "$-b"},
		}, 2},
		{"18 header and body are one namespace", []request{
			{key: []string{"$"}, status: 202, want: accepted, echo: "$"},
			{body: `,"idempotency_key":" $ "`, status: 200, want: "pending", echo: "$"},
		}, 1},
		{"19-20 quoted is bare", []request{
			{key: []string{"$"}, status: 202, want: accepted, echo: "$"},
			{key: []string{`"$"`}, status: 200, want: "pending", echo: "$"},
			{key: []string{`"$";v=1`}, status: 200, want: "pending", echo: "$"},
		}, 1},
		{"21 case matters", []request{
			{key: []string{"$-k"}, status: 202, want: accepted, echo: "$-k"},
			{key: []string{"$-K"}, status: 202, want: accepted, echo: "$-K"},
		}, 2},
		{"22 no key", []request{{status: 202, want: accepted, echo: "null"}, {status: 202, want: accepted, echo: "null"}}, 2},
		{"23 null key", []request{{body: `,"idempotency_key":null`, status: 202, want: accepted, echo: "null"}}, 1},
		{"24 blank header", []request{{key: []string{" "}, status: 400, want: invalid}, {key: []string{""}, status: 400, want: invalid}}, 0},
		{"25 blank header, body key", []request{{key: []string{""}, body: `,"idempotency_key":"$"`, status: 202, want: accepted, echo: "$"}}, 1},
		{"26 blank body key", []request{
			{body: `,"idempotency_key":""`, status: 400, want: invalid},
			{body: `,"idempotency_key":"  "`, status: 400, want: invalid},
		}, 0},
		{"27 quoted nothing", []request{{key: []string{`""`}, status: 400, want: invalid}}, 0},
		{"28 255 characters", []request{{key: []string{long}, status: 202, want: accepted, echo: long}}, 1},
		{"29 256 characters", []request{
			{key: []string{long + "k"}, status: 400, want: invalid},
			{body: `,"idempotency_key":"` + long + `k"`, status: 422, want: rule},
		}, 0},
		{"30 not ASCII", []request{
			{key: []string{"café"}, status: 400, want: invalid},
			{body: `,"idempotency_key":"café"`, status: 422, want: rule},
		}, 0},
		{"32 header twice", []request{{key: []string{"$", "$"}, status: 400, want: invalid}}, 0},
		{"33 broken quoting", []request{
			{key: []string{`"abc`}, status: 400, want: invalid},
			{key: []string{`"a"b`}, status: 400, want: invalid},
			{key: []string{`"a\n"`}, status: 400, want: invalid},
		}, 0},
		{"34 invalid body consumes no key", []request{
			{key: []string{"$"}, body: `,"payload":1`, status: 422, want: rule},
			{key: []string{"$"}, body: `,`, status: 400, want: "malformed-json"},
			{key: []string{"$"}, status: 202, want: accepted, echo: "$"},
		}, 1},
		{"39 deleted by retention", []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$", set: "status = 'completed', finished_at = now() - interval '2 h'", before: purge},
		}, 1},
		{"40 failed, then retried", []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: first, status: 200, want: "pending", echo: "$", set: "status = 'failed', attempt = 4, retry_count = 3", before: retry},
			{key: []string{"$"}, body: `,"payload":{}`, status: 422, want: reused},
		}, 1},
		{"41 no fingerprint", []request{
			{key: []string{"$"}, body: first, status: 202, want: accepted, echo: "$"},
			{key: []string{"$"}, body: `,"payload":{"z":0}`, status: 200, want: "pending", echo: "$", set: "request_hash = NULL"},
		}, 1},
	} {
		t.Run(row.row, func(t *testing.T) {
			own := "row " + row.row
			var id string
			for i, r := range row.requests {
				if r.set != "" {
					g.exec(t, "UPDATE tasks SET updated_at = now(), "+r.set+" WHERE name = $1", own)
				}
				if r.before != nil {
					r.before(t, id)
				}
				fill := func(s string) string { return strings.ReplaceAll(s, "$", strings.Fields(row.row)[0]) }
				header := []string{"Content-Type", "application/json"}
				for _, k := range r.key {
					header = append(header, "Idempotency-Key", fill(k))
				}
				name := own
				if r.name != "" {
					name = "row " + r.name
				}
				a := g.do(t, "POST", "/tasks", `{"name":"`+name+`"`+fill(r.body)+`}`, header...)
				got := a.str("status")
				if a.status >= 400 {
					got = strings.TrimPrefix(a.str("type"), problemURN)
				}
				if a.status != r.status || got != r.want || r.echo != "" && a.str("idempotency_key") != fill(r.echo) {
					t.Errorf("request %d = %d %s, want %d %s", i, a.status, a.body, r.status, r.want)
				}
				if replayed := a.header.Get("Idempotent-Replayed"); (replayed == "true") != (a.status == 200) {
					t.Errorf("request %d: status %d, Idempotent-Replayed %q", i, a.status, replayed)
				}
				switch a.status {
				case 202:
					id = a.str("task_id")
				case 200:
					if a.str("task_id") != id && row.tasks == 1 {
						t.Errorf("request %d: task %s, want %s", i, a.str("task_id"), id)
					}
				default:
					if id != "" && strings.Contains(a.body, id) {
						t.Errorf("request %d: the problem names the stored task: %s", i, a.body)
					}
				}
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name LIKE $1 || '%'", own); n != row.tasks {
				t.Errorf("%d rows, want %d", n, row.tasks)
			}
		})
	}
	// A replay publishes nothing: that is one entry for each row, no more, but for the row that
	// retention deleted and the one that was retried.
	if entries, rows := len(g.published()), g.number(t, "SELECT count(*) FROM tasks"); entries != rows+2 {
		t.Errorf("%d entries for %d rows", entries, rows)
	}
}

// Row 37: without the stream a task is accepted all the same, and marked as one that the
// dispatcher has to publish.
func TestStreamDown(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.up.Store(false)
	id := g.submitted(t, `{"name":"a"}`, "Idempotency-Key", "k")
	if n := g.number(t, "SELECT count(*) FROM tasks WHERE task_id = $1 AND published_at IS NULL", id); n != 1 || len(g.published()) != 0 {
		t.Errorf("%d unpublished rows and %d entries, want 1 and 0", n, len(g.published()))
	}
	if a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k"); a.status != 200 || a.str("status") != "pending" {
		t.Errorf("replay = %d %s, want 200 pending", a.status, a.body)
	}
}

// What is due is published, and with the queue it belongs in; what is not waits in the table.
func TestPublished(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	now := g.submitted(t, `{"name":"now"}`)
	past := g.submitted(t, `{"name":"past","run_at":"2020-01-01T00:00:00Z","queue":"critical"}`)
	g.submitted(t, `{"name":"later","delay_ms":60000}`)
	g.submitted(t, `{"name":"at","run_at":"`+time.Now().Add(time.Hour).Format(time.RFC3339)+`"}`)
	eventually(t, "two entries are published", func() bool { return len(g.published()) == 2 })
	for i, want := range []string{now + " default", past + " critical"} {
		if e := g.published()[i]; e.id.String()+" "+e.queue != want {
			t.Errorf("entry %d is %s %s, want %s", i, e.id, e.queue, want)
		}
	}
	for name, want := range map[string]int{"now": 0, "past": 0, "later": 60, "at": 3600} {
		if wait := g.number(t, "SELECT round(extract(epoch FROM run_at - created_at))::int FROM tasks WHERE name = $1", name); wait < want-2 || wait > want {
			t.Errorf("%s is due %d s after its submission, want %d", name, wait, want)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","max_retries":0,"timeout_ms":1500,"queue":"critical"}`, "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	a := g.do(t, "GET", "/tasks/"+id, "")
	for member, want := range map[string]string{"max_retries": "0", "timeout_ms": "1500", "queue": "critical"} {
		if got := a.str(member); got != want {
			t.Errorf("%s = %s, want %s", member, got, want)
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks WHERE traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'"); n != 1 {
		t.Error("the trace context is not stored")
	}
	id = g.submitted(t, `{"name":"a"}`, "Traceparent", "00-00000000000000000000000000000000-b7ad6b7169203331-01")
	a = g.do(t, "GET", "/tasks/"+id, "")
	for member, want := range map[string]string{"max_retries": "3", "timeout_ms": "null", "queue": "default"} {
		if got := a.str(member); got != want {
			t.Errorf("%s = %s, want %s", member, got, want)
		}
	}
	for _, bad := range []string{`"queue":"nowhere"`, `"max_retries":101`, `"timeout_ms":0`, `"delay_ms":1,"run_at":"2030-01-01T00:00:00Z"`} {
		if a := g.post(t, `{"name":"a",`+bad+`}`); a.status != 422 {
			t.Errorf("%s = %d %s, want 422", bad, a.status, a.body)
		}
	}
}

func TestTraceparent(t *testing.T) {
	t.Parallel()
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for text, want := range map[string]string{
		good: good, "": "", good + "-x": "", good[:54]: "", "ff" + good[2:]: "", strings.ToUpper(good): "",
		"00-00000000000000000000000000000000-b7ad6b7169203331-01": "", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01": "",
		strings.Replace(good, "-b", "_b", 1): "", strings.Replace(good, "0a", "\x00a", 1): "",
	} {
		if got := traceparent(text); got != want {
			t.Errorf("traceparent(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestUnknownTask(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	delete(g.server.handlers.byName, anyName)
	a := g.post(t, `{"name":"typo"}`)
	if want := `[{"type":"unknown_task","loc":["body","name"],"msg":"There is no such task; known names: fail_task"}]`; a.status != 422 || a.str("errors") != want {
		t.Errorf("POST = %d %s, want 422 with errors %s", a.status, a.body, want)
	}
}

func TestBacklog(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.MaxBacklogAge = 10 * time.Second })
	g.submitted(t, `{"name":"fresh"}`)
	g.submitted(t, `{"name":"later","delay_ms":60000}`)
	for _, published := range []string{"now()", "NULL"} {
		id := g.submitted(t, `{"name":"old"}`)
		g.exec(t, "UPDATE tasks SET run_at = now() - interval '11 s', published_at = "+published+" WHERE task_id = $1", id)
		g.exec(t, "UPDATE tasks SET published_at = now() WHERE name = 'fresh'")
		eventually(t, "submissions are refused", func() bool {
			a := g.post(t, `{"name":"x"}`, "Idempotency-Key", "k"+published)
			return a.status == 429 && a.header.Get("Retry-After") != "" && a.str("type") == problemURN+"rate-limited"
		})
		g.exec(t, "UPDATE tasks SET status = 'completed' WHERE task_id = $1", id)
		eventually(t, "submissions are accepted", func() bool { return g.post(t, `{"name":"x"}`).status == 202 })
	}
}

// Row 35: whatever is refused leaves the key free.
func TestRefusalConsumesNoKey(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	const body = `{"name":"a"}`
	post := func(want int, body, authorization string, header ...string) answer {
		t.Helper()
		a := g.do(t, "POST", "/tasks", body, append([]string{"Authorization", authorization, "Idempotency-Key", "k"}, header...)...)
		if a.status != want {
			t.Errorf("%d %s, want %d", a.status, a.body, want)
		}
		return a
	}
	media := []string{"Content-Type", "application/json"}
	post(401, body, "Bearer wrong", media...)
	post(403, body, "Bearer secret", append(media, "Sec-Fetch-Site", "cross-site")...)
	post(415, body, "Bearer secret")
	post(413, body+strings.Repeat(" ", maxBodyBytes), "Bearer secret", media...)
	post(422, `{"name":"a","x":1}`, "Bearer secret", media...)
	g.server.backlogged.Store(true)
	post(429, body, "Bearer secret", media...)
	g.server.backlogged.Store(false)
	post(202, body, "Bearer secret", media...)
	post(200, body, "Bearer secret", media...)
}

// The order of checks: each request breaks this rule and all that follow.
func TestCheckOrder(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	large := fmt.Sprint("Content-Length: ", maxBodyBytes+1)
	lines := []string{"Authorization: Bearer wrong", "Sec-Fetch-Site: cross-site", "Content-Type: text/plain", large, `Idempotency-Key: "open`}
	right := []string{"Authorization: Bearer secret", "Sec-Fetch-Site: same-origin", "Content-Type: application/json", "Content-Length: 99", "Idempotency-Key;"}
	send := func(target string, body string, lines ...string) answer {
		var b strings.Builder
		fmt.Fprintf(&b, "%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", target)
		for _, line := range lines {
			if line == "Content-Length: 99" {
				line = fmt.Sprint("Content-Length: ", len(body))
			}
			if line == "Idempotency-Key;" {
				line = "Idempotency-Key:"
			}
			b.WriteString(line + "\r\n")
		}
		return g.raw(t, b.String()+"\r\n"+body)
	}
	fixed := func(n int) []string { return append(slices.Clone(right[:n]), lines[n:]...) }
	for _, check := range []struct {
		what   string
		a      answer
		status int
	}{
		{"path", send("POST /task", "", lines...), 404},
		{"method", send("PUT /tasks", "", lines...), 405},
		{"API key", send("POST /tasks", "", lines...), 401},
		{"origin", send("POST /tasks", "", fixed(1)...), 403},
		{"media type", send("POST /tasks", "", fixed(2)...), 415},
		{"declared length", send("POST /tasks", "", fixed(3)...), 413},
		{"key syntax", send("POST /tasks", `{`, fixed(4)...), 400},
		{"syntax", send("POST /tasks", `{"name":1,"idempotency_key":"",}`, right...), 400},
		{"fields", send("POST /tasks", `{"name":1,"idempotency_key":""}`, right...), 422},
		{"blank key", send("POST /tasks", `{"name":"a","idempotency_key":""}`, right...), 400},
		{"store", send("POST /tasks", `{"name":"a","idempotency_key":"k"}`, right...), 202},
	} {
		kind := strings.TrimPrefix(check.a.str("type"), problemURN)
		if want := map[string]string{"key syntax": "idempotency-key-invalid", "syntax": "malformed-json", "blank key": "idempotency-key-invalid"}[check.what]; check.a.status != check.status || want != "" && kind != want {
			t.Errorf("%s: %d %s, want %d %s", check.what, check.a.status, check.a.body, check.status, want)
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}

func TestMediaTypes(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for _, test := range []struct {
		status int
		header []string
	}{
		{202, []string{"Content-Type", "application/json"}},
		{202, []string{"Content-Type", "APPLICATION/JSON"}},
		{202, []string{"Content-Type", "application/json; charset=utf-8"}},
		{202, []string{"Content-Type", `application/json;charset="UTF-8"`}},
		{202, []string{"Content-Type", "application/vnd.api+json"}},
		{202, []string{"Content-Type", "application/json", "Content-Encoding", "identity"}},
		{415, nil},
		{415, []string{"Content-Type", ""}},
		{415, []string{"Content-Type", "text/plain"}},
		{415, []string{"Content-Type", "text/json"}},
		{415, []string{"Content-Type", "application/x-www-form-urlencoded"}},
		{415, []string{"Content-Type", "multipart/form-data; boundary=x"}},
		{415, []string{"Content-Type", "application/json; charset=latin1"}},
		{415, []string{"Content-Type", "application/json, text/plain"}},
		{415, []string{"Content-Type", "application/json", "Content-Type", "text/plain"}},
		{415, []string{"Content-Type", "application/jsonx"}},
		{415, []string{"Content-Type", "application/json;;;=\xff"}},
		{415, []string{"Content-Type", "application/json", "Content-Encoding", "gzip"}},
	} {
		a := g.do(t, "POST", "/tasks", `{"name":"a"}`, test.header...)
		if a.status != test.status {
			t.Errorf("%q = %d %s, want %d", test.header, a.status, a.body, test.status)
		}
		wanted := "Accept-Post"
		if slices.Contains(test.header, "gzip") {
			wanted = "Accept-Encoding"
		}
		if a.status == 415 && a.header.Get(wanted) == "" {
			t.Errorf("%q: 415 without %s", test.header, wanted)
		}
	}
}

// Bodies at and above the limit, with their length declared and without.
func TestBodyLimit(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	body := func(size int) string {
		const head, tail = `{"name":"a","payload":{"s":"`, `"}}`
		return head + strings.Repeat("x", size-len(head)-len(tail)) + tail
	}
	// A reader of an unknown type makes the client send chunks.
	chunked := func(s string) io.Reader { return io.MultiReader(strings.NewReader(s)) }
	for _, size := range []int{maxBodyBytes, maxBodyBytes + 1, 10 << 20} {
		want := 413
		if size == maxBodyBytes {
			want = 202
		}
		for how, r := range map[string]io.Reader{"declared": strings.NewReader(body(size)), "chunked": chunked(body(size))} {
			a, err := g.try(t.Context(), "POST", "/tasks", r, "Content-Type", "application/json")
			if err != nil && want == 413 {
				// The server hung up while the client still wrote: which of both the
				// client notices first is up to the network.
				continue
			}
			if err != nil || a.status != want {
				t.Errorf("%d bytes, %s = %d %.200s, %v, want %d", size, how, a.status, a.body, err, want)
			}
			if a.status == 202 {
				if shown := g.do(t, "GET", "/tasks/"+a.str("task_id"), ""); len(shown.body) < size || shown.header.Get("Content-Length") != fmt.Sprint(len(shown.body)) {
					t.Errorf("GET = %d, %d bytes", shown.status, len(shown.body))
				}
			}
		}
	}
	// Seen without a client in between: refused before any of it is read, and hung up on.
	a := g.raw(t, "POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 1048577\r\n\r\n")
	if a.status != 413 || a.str("type") != problemURN+"body-too-large" || a.header.Get("Connection") != "close" {
		t.Errorf("declared 1 MiB + 1 = %d %v %s, want 413", a.status, a.header, a.body)
	}
	a = g.raw(t, "POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"+
		fmt.Sprintf("%x\r\n%s\r\n", maxBodyBytes+1, strings.Repeat(" ", maxBodyBytes+1)))
	if a.status != 413 || a.header.Get("Connection") != "close" {
		t.Errorf("chunked 1 MiB + 1 = %d %v %s, want 413", a.status, a.header, a.body)
	}
	a = g.raw(t, "POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
	if a.status != 400 {
		t.Errorf("broken chunk = %d %s, want 400", a.status, a.body)
	}
}

// Section I of the field cases and the storable table of http.md 4.1, end to end: nothing is
// stored that cannot be, and nothing is a 5xx.
func TestStorable(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	deep := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	stored := 0
	for _, test := range []struct {
		body   string
		status int
	}{
		{`{"name":"a","payload":{"a":"x\u0000y"}}`, 422},
		{`{"name":"a","payload":{"x\u0000y":1}}`, 422},
		{`{"name":"a","payload":{"a":"\ud800"}}`, 422},
		{`{"name":"a","payload":{"a":"\udc00x"}}`, 422},
		{`{"name":"a","payload":{"a":"\ud83d\ude00"}}`, 202},
		{"{\"name\":\"a\",\"payload\":{\"a\":\"\xff\"}}", 400},
		{`{"name":"a","payload":{"a":1e131072}}`, 422},
		{`{"name":"a","payload":{"a":1e-20000}}`, 422},
		{`{"name":"a","payload":{"a":1e400}}`, 202},
		{`{"name":"a","payload":{"a":[` + strings.TrimSuffix(strings.Repeat("1e100000,", 900), ",") + `]}}`, 422},
		{`{"name":"a","payload":{"a":[` + strings.TrimSuffix(strings.Repeat("1e400,", 9000), ",") + `]}}`, 422},
		{`{"name":"a","payload":` + deep(100) + `}`, 202},
		{`{"name":"a","payload":` + deep(101) + `}`, 422},
		{`{"name":"a","payload":` + deep(9_990) + `}`, 422},
		{`{"name":"a","payload":` + deep(20_000) + `}`, 422},
		{`{"name":"a","payload":` + strings.Repeat("[", 1_000_000) + `}`, 400},
		{`{"name":"a"} x`, 400},
		{`{"name":"a"}{"name":"b"}`, 400},
		{"{\"name\":\"a\"}\n", 202},
		{``, 400},
		{`[]`, 422},
		{`{}`, 422},
		{`null`, 422},
		{`{"name":"a","NAME":"b"}`, 422},
		{`{"PAYLOAD":{"x":1},"name":"a"}`, 422},
		{`{"name":"a\nb"}`, 422},
		{`{"name":"\u001b[31m"}`, 422},
		{`{"name":"a\u0000"}`, 422},
		{`{"name":" "}`, 422},
		{`{"name":"` + strings.Repeat("é", 128) + `"}`, 202},
		{`{"name":"` + strings.Repeat("é", 129) + `"}`, 422},
	} {
		a := g.post(t, test.body)
		if a.status != test.status {
			t.Errorf("%.80q = %d %.200s, want %d", test.body, a.status, a.body, test.status)
		}
		if a.status == 202 {
			stored++
			if shown := g.do(t, "GET", "/tasks/"+a.str("task_id"), ""); shown.status != 200 || !json.Valid([]byte(shown.body)) {
				t.Errorf("GET after %.80q = %d %.200s", test.body, shown.status, shown.body)
			}
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != stored {
		t.Errorf("%d rows, want %d", n, stored)
	}
}

// FuzzPost sends arbitrary bytes through the whole handler to a real database: whatever
// comes, the answer is one of those that are promised, and errors are problems.
func FuzzPost(f *testing.F) {
	g := startGatewayLog(f, newDatabase(f), nil, discardLog())
	h := g.server.handler()
	for _, seed := range []string{
		`{"name":"a"}`, `{"name":"a","payload":{"x":[1e5,"\u0000"]},"idempotency_key":"k"}`, `{"name":"a","max_retries":1,"delay_ms":5}`,
		`{"name":"a","run_at":"2026-01-01T00:00:00Z","queue":"critical","timeout_ms":1}`, `{`, `[1]`, "\xff", `{"name":"\ud800"}`, ``,
	} {
		f.Add([]byte(seed), "application/json", "key", "id", "")
	}
	f.Add([]byte(`{"name":"a"}`), "text/plain", `"quoted";a=1`, "\x00", "gzip")
	f.Fuzz(func(t *testing.T, body []byte, media, key, id, coding string) {
		r := httptest.NewRequest("POST", "/tasks", strings.NewReader(string(body)))
		r.Header.Set("Content-Type", media)
		r.Header.Set("Idempotency-Key", key)
		r.Header.Set("X-Request-Id", id)
		r.Header.Set("Traceparent", id)
		r.Header.Set("Content-Encoding", coding)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		switch w.Code {
		case 200, 202:
			if !json.Valid(w.Body.Bytes()) {
				t.Errorf("%d with %q", w.Code, w.Body)
			}
		case 400, 413, 415, 422:
			var p problem
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Status != w.Code || p.Type == "" || p.Title == "" || p.Detail == "" {
				t.Errorf("%d with %q: %v", w.Code, w.Body, err)
			}
			if w.Header().Get("Content-Type") != "application/problem+json" {
				t.Errorf("%d as %s", w.Code, w.Header().Get("Content-Type"))
			}
		default:
			t.Errorf("%q %q %q = %d %s", body, media, key, w.Code, w.Body)
		}
	})
}
