package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
)

func TestTranscripts(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	key := []string{"Idempotency-Key", "demo-key-001"}
	const video = `{"name": "process_video", "payload": {"file": "clip.mp4"}}`

	golden(t, "accepted.txt", transcript(g.post(t, video, key...)))
	golden(t, "replayed_pending.txt", transcript(g.post(t, video, key...)))
	id := g.post(t, video, key...).str("task_id")
	golden(t, "pending.txt", transcript(g.do(t, "GET", "/tasks/"+id, "")))

	g.exec(t, `UPDATE tasks SET status = 'completed', attempt = 1, started_at = now(), finished_at = now(), updated_at = now(),
		result = '{"processed": true, "name": "process_video"}' WHERE task_id = $1`, id)
	golden(t, "replayed_completed.txt", transcript(g.post(t, video, key...)))
	completed := g.do(t, "GET", "/tasks/"+id, "")
	golden(t, "completed.txt", transcript(completed))
	golden(t, "not_modified.txt", transcript(g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", completed.header.Get("Etag"))))

	golden(t, "key_reused.txt", transcript(g.post(t, `{"name":"process_video","payload":{"file":"OTHER.mp4"}}`, key...)))
	golden(t, "validation.txt", transcript(g.post(t, `{"payload":[1],"max_retries":"x"}`)))
	golden(t, "malformed.txt", transcript(g.post(t, `{"name":"a",}`)))
	golden(t, "media_type.txt", transcript(g.do(t, "POST", "/tasks", `{"name":"a"}`, "Content-Type", "application/x-www-form-urlencoded")))
	golden(t, "method.txt", transcript(g.do(t, "PUT", "/tasks", "")))
	golden(t, "no_uuid.txt", transcript(g.do(t, "GET", "/tasks/not-a-uuid", "")))
	golden(t, "no_path.txt", transcript(g.do(t, "GET", "/nothing", "")))
	golden(t, "key_invalid.txt", transcript(g.post(t, video, "Idempotency-Key", `"open`)))
	golden(t, "unknown_field.txt", transcript(g.post(t, `{"name":"a","max_retires":9}`)))

	g.exec(t, `UPDATE tasks SET status = 'pending', attempt = 2, retry_count = 1, result = NULL, finished_at = NULL, published_at = NULL,
		updated_at = now(), run_at = now() + interval '20 s', error_message = E'line one\n"two" <b>',
		attempts = task_ledger(attempts, 2, 'host-1-abc', started_at, 'failed', 'no "luck"') WHERE task_id = $1`, id)
	waiting := g.do(t, "GET", "/tasks/"+id, "")
	if s := waiting.header.Get("Retry-After"); s != "20" {
		t.Errorf("Retry-After of a task due in 20 s = %s, want 20", s)
	}
	golden(t, "waiting.txt", transcript(waiting))
}

// The time a task was accepted is one text wherever it is shown.
func TestAcceptedAtIsCreatedAt(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	first := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
	again := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
	shown := g.do(t, "GET", first.header.Get("Location"), "")
	if at := first.str("accepted_at"); again.str("accepted_at") != at || shown.str("created_at") != at {
		t.Errorf("accepted_at %s, replayed %s, created_at %s: want them equal", at, again.str("accepted_at"), shown.str("created_at"))
	}
}

func TestShowTask(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","payload":{"id":12345678901234567890,"y":1.00,"s":"<&>\u2028\ud83d\ude00","n":{"e":[]}}}`)
	shown := g.do(t, "GET", "/tasks/"+id, "")
	if want := `{"n":{"e":[]},"s":"<&>` + "\u2028" + `😀","y":1.00,"id":12345678901234567890}`; shown.str("payload") != want {
		t.Errorf("payload = %s, want %s", shown.str("payload"), want)
	}
	if upper := g.do(t, "GET", "/tasks/"+strings.ToUpper(id), ""); upper.body != shown.body {
		t.Errorf("GET by upper-case id = %d %s", upper.status, upper.body)
	}
	head := g.do(t, "HEAD", "/tasks/"+id, "")
	if head.status != 200 || head.body != "" || head.header.Get("Content-Length") != fmt.Sprint(len(shown.body)) || head.header.Get("Etag") != shown.header.Get("Etag") {
		t.Errorf("HEAD = %d %v %q", head.status, head.header, head.body)
	}
	if s := shown.header.Get("Retry-After"); s != "1" {
		t.Errorf("Retry-After of a pending task = %q, want 1", s)
	}
	for _, bad := range []string{
		uuid.NewString(), "a%00b", "a%2Fb", "%ff", "{" + id + "}", strings.ReplaceAll(id, "-", ""), "urn:uuid:" + id, id[:35] + "g", strings.Repeat("x", 5000),
	} {
		a := g.do(t, "GET", "/tasks/"+bad, "")
		if a.status != 404 || !strings.HasPrefix(a.str("detail"), "Task '") || len(a.body) > 1500 {
			t.Errorf("GET /tasks/%.50s = %d %s, want 404", bad, a.status, a.body)
		}
	}
}

func TestETag(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	tag := g.do(t, "GET", "/tasks/"+id, "").header.Get("Etag")
	for value, want := range map[string]int{
		tag: 304, "W/" + tag: 304, "*": 304, `"x", ` + tag: 304, `"x"`: 200, strings.Trim(tag, `"`): 200, "": 200,
	} {
		if a := g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", value); a.status != want || want == 304 && (a.body != "" || a.header.Get("Etag") != tag) {
			t.Errorf("If-None-Match: %s = %d %q, want %d", value, a.status, a.body, want)
		}
	}
	seen := map[string]string{tag: "submitted"}
	for _, set := range []string{
		"status = 'processing', lease_until = now()", "cancel_requested = true",
		"status = 'pending', lease_until = NULL, retry_count = 1", "status = 'failed'",
	} {
		g.exec(t, "UPDATE tasks SET updated_at = now(), "+set+" WHERE task_id = $1", id)
		a := g.do(t, "GET", "/tasks/"+id, "", "If-None-Match", tag)
		tag = a.header.Get("Etag")
		if before, old := seen[tag]; a.status != 200 || old {
			t.Errorf("after %s: %d, tag %s (as %s)", set, a.status, tag, before)
		}
		seen[tag] = set
	}
}

func TestNextRetry(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a","delay_ms":60000}`)
	check := func(what string, waits bool) {
		t.Helper()
		a := g.do(t, "GET", "/tasks/"+id, "")
		if got := a.str("next_retry_at"); (got != "null") != waits || waits && got != a.str("run_at") {
			t.Errorf("%s: next_retry_at = %s, run_at %s", what, got, a.str("run_at"))
		}
	}
	check("delayed, never tried", false)
	g.exec(t, "UPDATE tasks SET retry_count = 1, updated_at = now(), run_at = now() + interval '1 s' WHERE task_id = $1", id)
	check("waits after a failure", true)
	g.exec(t, "UPDATE tasks SET updated_at = now(), run_at = now() WHERE task_id = $1", id)
	check("given back by a worker that stopped", false)
	g.exec(t, "UPDATE tasks SET status = 'processing', lease_until = now(), updated_at = now() WHERE task_id = $1", id)
	check("runs again", false)
}
