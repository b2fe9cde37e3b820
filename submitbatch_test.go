package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// batch returns the body of a batch of these items.
func batch(items ...string) string { return `{"tasks":[` + strings.Join(items, ",") + `]}` }

// postBatch submits body as a batch, with a JSON Content-Type.
func (g *gateway) postBatch(t testing.TB, body string, header ...string) answer {
	t.Helper()
	return g.do(t, "POST", batchPath, body, append([]string{"Content-Type", "application/json"}, header...)...)
}

// A batchAnswer is the body of a 200 or 202.
type batchAnswer struct {
	Tasks []struct {
		ID       string  `json:"task_id"`
		Name     string  `json:"name"`
		Status   string  `json:"status"`
		Accepted string  `json:"accepted_at"`
		Key      *string `json:"idempotency_key"`
		Replayed bool    `json:"replayed"`
	} `json:"tasks"`
	Accepted int `json:"accepted"`
	Replayed int `json:"replayed"`
}

// batch reads the answer of a batch, which must have items.
func (a answer) batch(t testing.TB) (b batchAnswer) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), &b); err != nil || len(b.Tasks) == 0 {
		t.Fatalf("%d %.1000s, want an answer with tasks", a.status, a.body)
	}
	return b
}

// letters shows which task each item of an answer got: the first task that ids meets is A, the
// next one B; a small letter stands for a replay.
func letters(b batchAnswer, ids *[]string) string {
	var s strings.Builder
	for _, item := range b.Tasks {
		i := slices.Index(*ids, item.ID)
		if i < 0 {
			i = len(*ids)
			*ids = append(*ids, item.ID)
		}
		if item.Replayed {
			s.WriteByte('a' + byte(i))
		} else {
			s.WriteByte('A' + byte(i))
		}
	}
	return s.String()
}

func countUpper(s string) (n int) {
	for _, c := range s {
		if c <= 'Z' {
			n++
		}
	}
	return n
}

// places returns the loc of each error of a problem.
func (a answer) places(t testing.TB) string {
	t.Helper()
	var p problem
	if err := json.Unmarshal([]byte(a.body), &p); err != nil {
		t.Fatalf("%d %.1000s: %v", a.status, a.body, err)
	}
	var s []string
	for _, e := range p.Errors {
		s = append(s, strings.Trim(fmt.Sprint(e.Loc), "[]"))
	}
	return strings.Join(s, ", ")
}

// Section 5.3 of http.md. A $ in a key is replaced so that rows do not meet.
func TestBatchTruthTable(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	type request struct {
		header []string // values of Idempotency-Key
		items  []string // names and keys: "name" or "name key"
		status int
		want   string // letters, or the last part of the problem's type and the places
	}
	const (
		reused  = "idempotency-key-reused: "
		invalid = "idempotency-key-invalid: "
	)
	long := strings.Repeat("h", maxBatchKeyLen)
	for n, row := range []struct {
		row      string
		requests []request
		tasks    int
	}{
		{"all new", []request{{nil, []string{"x 1$", "y 2$", "z 3$"}, 202, "ABC"}}, 3},
		{"repeated", []request{
			{nil, []string{"x 3$", "y 1$", "z 2$"}, 202, "ABC"},
			{nil, []string{"x 3$", "y 1$", "z 2$"}, 200, "abc"},
		}, 3},
		{"some known", []request{
			{nil, []string{"x 1$", "y 2$"}, 202, "AB"},
			{nil, []string{"y 2$", "z 3$", "x 1$"}, 202, "bCa"},
		}, 3},
		{"another fingerprint", []request{
			{nil, []string{"x 1$"}, 202, "A"},
			{nil, []string{"y 2$", "other 1$", "z"}, 422, reused + "body tasks 1 idempotency_key"},
			{nil, []string{"y 2$"}, 202, "B"},
		}, 2},
		{"other fingerprints", []request{
			{nil, []string{"x 1$", "y 2$"}, 202, "AB"},
			{nil, []string{"o 2$", "new", "o 1$", "o 2$"}, 422, reused + "body tasks 0 idempotency_key, body tasks 2 idempotency_key, body tasks 3 idempotency_key"},
		}, 2},
		{"twice inside, same", []request{
			{nil, []string{"x 2$", "y 1$", "x 2$", "x 2$"}, 202, "ABaa"},
			{nil, []string{"x 2$", "x 2$"}, 200, "aa"},
		}, 2},
		{"twice inside, different", []request{
			{nil, []string{"x 1$", "y 1$", "x 1$", "z 1$", "new"}, 422, reused + "body tasks 1 idempotency_key, body tasks 3 idempotency_key"},
		}, 0},
		{"no key", []request{{nil, []string{"x", "x"}, 202, "AB"}, {nil, []string{"x", "x"}, 202, "CD"}}, 4},
		{"header", []request{
			{[]string{"$"}, []string{"x", "x", "y 9$"}, 202, "ABC"},
			{[]string{"$"}, []string{"x", "x", "y 9$"}, 200, "abc"},
			{[]string{`"$";v=1`}, []string{"x", "x", "y 9$"}, 200, "abc"},
			{nil, []string{"x $[1]", "x $[0]"}, 200, "ba"},
		}, 3},
		{"header, re-ordered", []request{
			{[]string{"$"}, []string{"x", "y", "z"}, 202, "ABC"},
			{[]string{"$"}, []string{"y", "x", "z"}, 422, reused + "body tasks 0 idempotency_key, body tasks 1 idempotency_key"},
			{[]string{"$"}, []string{"y", "z"}, 422, reused + "body tasks 0 idempotency_key, body tasks 1 idempotency_key"},
			{[]string{"$"}, []string{"x", "y", "z", "more"}, 202, "abcD"},
		}, 4},
		{"header and keys inside, re-ordered", []request{
			{[]string{"$"}, []string{"x", "x 1$", "y"}, 202, "ABC"},
			{[]string{"$"}, []string{"x 1$", "x", "y"}, 422, reused + "body tasks 0 idempotency_key"},
			{[]string{"$"}, []string{"x", "y", "x 1$", "more"}, 422, reused + "body tasks 2 idempotency_key"},
			{[]string{"$"}, []string{"x 2$", "x 1$", "y"}, 422, reused + "body tasks 0 idempotency_key"},
			{[]string{"$"}, []string{"x", "x 1$", "y", "more"}, 202, "abcD"},
		}, 4},
		{"header meets its own key inside", []request{
			{[]string{"$"}, []string{"x $[0]", "x $[2]", "y"}, 422, reused + "body tasks 2 idempotency_key"},
			{[]string{"$"}, []string{"x $[0]", "y $[2]", "y"}, 202, "ABb"},
			{[]string{"$"}, []string{"x", "y 1$", "y"}, 202, "aCb"},
		}, 3},
		{"header meets a key inside", []request{{[]string{"$"}, []string{"x $[1]", "y"}, 422, reused + "body tasks 1 idempotency_key"}}, 0},
		{"header of 240", []request{{[]string{long}, []string{"x"}, 202, "A"}, {[]string{long}, []string{"x"}, 200, "a"}}, 1},
		{"header of 241", []request{{[]string{"+" + long}, []string{"x 1$"}, 400, invalid}}, 0},
		{"header twice", []request{{[]string{"$", "$"}, []string{"x"}, 400, invalid}}, 0},
		{"blank header", []request{
			{[]string{""}, []string{"x 1$", "y", "z"}, 400, invalid + "body tasks 1 idempotency_key, body tasks 2 idempotency_key"},
			{[]string{""}, []string{"x 1$"}, 202, "A"},
		}, 1},
		{"blank key", []request{
			{nil, []string{"x 1$", "y  ", "z"}, 400, invalid + "body tasks 1 idempotency_key"},
			{[]string{"$"}, []string{"x 1$", "y  "}, 202, "AB"},
			{[]string{"$"}, []string{"x 1$", "y"}, 200, "ab"},
		}, 2},
	} {
		t.Run(row.row, func(t *testing.T) {
			own := "-" + strconv.Itoa(n)
			var ids []string
			for i, r := range row.requests {
				var header, items []string
				for _, h := range r.header {
					header = append(header, "Idempotency-Key", strings.ReplaceAll(h, "$", own))
				}
				for _, item := range r.items {
					name, key, given := strings.Cut(strings.ReplaceAll(item, "$", own), " ")
					if given {
						key = `,"idempotency_key":"` + key + `"`
					}
					items = append(items, `{"name":"`+name+own+`"`+key+`}`)
				}
				a := g.postBatch(t, batch(items...), header...)
				got := ""
				if a.status >= 400 {
					got = strings.TrimPrefix(a.str("type"), problemURN) + ": " + a.places(t)
				} else {
					b := a.batch(t)
					got = letters(b, &ids)
					if n := countUpper(got); b.Accepted != n || b.Replayed != len(got)-n {
						t.Errorf("request %d: accepted %d, replayed %d for %s", i, b.Accepted, b.Replayed, got)
					}
				}
				if a.status != r.status || got != r.want {
					t.Errorf("request %d = %d %s, want %d %s: %s", i, a.status, got, r.status, r.want, a.body)
				}
				if replayed := a.header.Get("Idempotent-Replayed"); (replayed == "true") != (a.status == 200) {
					t.Errorf("request %d: status %d, Idempotent-Replayed %q", i, a.status, replayed)
				}
				if again := a.header.Get("Retry-After"); (again == "1") != (a.status == 202) {
					t.Errorf("request %d: status %d, Retry-After %q", i, a.status, again)
				}
			}
			if n := g.number(t, "SELECT count(*) FROM tasks WHERE name LIKE '%' || $1", own); n != row.tasks {
				t.Errorf("%d rows, want %d", n, row.tasks)
			}
		})
	}
	// A replay publishes nothing, nor does a batch that was refused.
	if entries, rows := len(g.published()), g.number(t, "SELECT count(*) FROM tasks"); entries != rows {
		t.Errorf("%d entries for %d rows", entries, rows)
	}
}

func TestBatchTranscripts(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	body := batch(`{"name":"process_video","payload":{"file":"clip.mp4"}}`, `{"name":"send \"mail\"","idempotency_key":"mail-7"}`)
	key := []string{"Idempotency-Key", "import-42"}
	golden(t, "batch_accepted.txt", transcript(g.postBatch(t, body, key...)))
	g.exec(t, "UPDATE tasks SET status = 'completed', updated_at = now() WHERE name = 'process_video'")
	golden(t, "batch_replayed.txt", transcript(g.postBatch(t, body, key...)))
	golden(t, "batch_key_reused.txt", transcript(g.postBatch(t, batch(`{"name":"new"}`, `{"name":"other","idempotency_key":"mail-7"}`))))
	golden(t, "batch_validation.txt", transcript(g.postBatch(t, `{"tasks":[{"name":"a"},7,{"payload":[1],"max_retires":9},{"name":"a","queue":"no"}],"more":1}`)))
	golden(t, "batch_key_invalid.txt", transcript(g.postBatch(t, batch(`{"name":"a"}`, `{"name":"a","idempotency_key":""}`))))
	golden(t, "batch_method.txt", transcript(g.do(t, "GET", batchPath, "")))
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
}

// An item is checked as a single task is, and its error is the same but for the place.
func TestBatchItemsAsSingles(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	items := []string{
		`{"name":"a"}`, `{}`, `[]`, `null`, `"a"`, `{"name":null}`, `{"name":""}`, `{"name":" "}`, `{"name":"a\nb"}`, `{"name":"a\ud800"}`,
		`{"name":"a","NAME":"b","x":1}`, `{"name":"a","payload":[]}`, `{"name":"a","payload":{"a":"\u0000\ud800","b":1e500}}`,
		`{"name":"a","payload":` + strings.Repeat(`{"a":`, 101) + `1` + strings.Repeat(`}`, 101) + `}`,
		`{"name":"a","payload":{"a":[` + strings.Repeat("1e400,", 6000) + `1]}}`,
		`{"name":"a","max_retries":101,"timeout_ms":0,"delay_ms":-1,"run_at":"soon","queue":"nowhere"}`,
		`{"name":"a","idempotency_key":"` + strings.Repeat("k", 256) + `"}`, `{"name":"a","idempotency_key":"é"}`,
		`{"name":"a","name":1}`, `{"n\u0061me":"a","payload":null,"run_at":"2020-01-01T00:00:00Z"}`,
	}
	type errors struct{ Errors []fieldError }
	var want []fieldError
	for i, item := range items {
		a := g.post(t, item)
		var e errors
		if err := json.Unmarshal([]byte(a.body), &e); err != nil || (a.status != 202) != (len(e.Errors) > 0) {
			t.Fatalf("%.100s alone = %d %.500s: %v", item, a.status, a.body, err)
		}
		for _, one := range e.Errors {
			one.Loc = append([]any{"body", "tasks", float64(i)}, one.Loc[1:]...)
			want = append(want, one)
		}
	}
	before := g.number(t, "SELECT count(*) FROM tasks")
	a := g.postBatch(t, batch(items...))
	var got errors
	if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 422 {
		t.Fatalf("batch = %d %.500s: %v", a.status, a.body, err)
	}
	if diff := cmp.Diff(want, got.Errors); diff != "" {
		t.Errorf("errors differ from those of the items alone (-want +got):\n%s", diff)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != before {
		t.Errorf("%d rows were created", n-before)
	}
}

func TestBatchBodies(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	many := func(n int) string { return batch(slices.Repeat([]string{`{"name":"a"}`}, n)...) }
	large := func(n int) string { return `{"name":"a","payload":{"s":"` + strings.Repeat("x", n-8) + `"}}` }
	stored := 0
	for _, test := range []struct {
		body   string
		status int
		errors string // type and place of each
	}{
		{many(1), 202, ""},
		{many(maxBatchTasks), 202, ""},
		{many(maxBatchTasks + 1), 422, "too_long body tasks"},
		{many(600_000), 422, "too_long body tasks"},
		{`{"tasks":[]}`, 422, "too_short body tasks"},
		{`{"tasks":[],"a":[1],"b":{}}`, 422, "too_short body tasks, extra_forbidden body a, extra_forbidden body b"},
		{`{}`, 422, "missing body tasks"},
		{`{"Tasks":[]}`, 422, "missing body tasks, extra_forbidden body Tasks"},
		{`{"tasks":null}`, 422, "list_type body tasks"},
		{`{"tasks":{"name":"a"}}`, 422, "list_type body tasks"},
		{`{"tasks":[{"name":"a"}],"idempotency_key":"k"}`, 422, "extra_forbidden body idempotency_key"},
		{`[{"name":"a"}]`, 422, "model_attributes_type body"},
		{`"tasks"`, 422, "model_attributes_type body"},
		{`{"tasks":7,"tasks":[{"name":"a"}]}`, 202, ""},
		{`{"t\u0061sks":[{"name":"a"}]}`, 202, ""},
		{`{"tasks":[{"name":"a"}],"tasks":[]}`, 422, "too_short body tasks"},
		{`{"tasks":[{"name":"a"},[{"name":"a"}],7]}`, 422, "model_attributes_type body tasks 1, model_attributes_type body tasks 2"},
		{batch(large(maxBodyBytes), large(maxBodyBytes), large(maxBodyBytes)), 202, ""},
		{batch(large(maxBodyBytes), large(maxBodyBytes+1)), 422, "json_unstorable body tasks 1 payload"},
		{strings.Repeat(" ", 2<<20) + batch(`{"name":"a","payload":{"n":1e9}}`), 202, ""},
		{``, 400, "json_invalid body 0"},
		{`{"tasks":[{"name":"a"},]}`, 400, "json_invalid body 24"},
		{`{"tasks":[{"name":"a"}`, 400, "json_invalid body 22"},
		{`{"tasks":[{"name":"a"}}`, 400, "json_invalid body 23"},
		{`{"tasks":[{"name":"a"}]`, 400, "json_invalid body 23"},
		{`{"tasks":[{"name":"a"}]} x`, 400, "json_invalid body 26"},
		{`{"tasks":[{"name":1},{"name":"a"]}`, 400, "json_invalid body 33"},
		{"{\"tasks\":[{\"name\":\"\xff\"}]}", 400, "json_invalid body 20"},
		{many(maxBatchTasks) + `]`, 400, "json_invalid body " + strconv.Itoa(len(many(maxBatchTasks))+1)},
		{`{"tasks":` + strings.Repeat("[", 100_000), 400, "json_invalid body 100009"},
	} {
		a := g.postBatch(t, test.body)
		var p problem
		if err := json.Unmarshal([]byte(a.body), &p); err != nil {
			t.Fatalf("%.80q = %d %.500s: %v", test.body, a.status, a.body, err)
		}
		var got []string
		for _, e := range p.Errors {
			got = append(got, e.Type+" "+strings.Trim(fmt.Sprint(e.Loc), "[]"))
		}
		if a.status != test.status || strings.Join(got, ", ") != test.errors && test.status != 202 {
			t.Errorf("%.80q = %d %.500s, want %d %s", test.body, a.status, a.body, test.status, test.errors)
		}
		if a.status == 202 {
			stored += len(a.batch(t).Tasks)
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != stored {
		t.Errorf("%d rows, want %d", n, stored)
	}
	if msg := g.postBatch(t, many(maxBatchTasks+1)).body; !strings.Contains(msg, "at most 500 items, not 501") {
		t.Errorf("the limit is not named: %s", msg)
	}
	if msg := g.postBatch(t, batch(large(maxBodyBytes+1))).body; !strings.Contains(msg, "larger than 1048576 bytes") {
		t.Errorf("the limit is not named: %s", msg)
	}
}

// Whatever a batch breaks, the answer stays readable and says how much it leaves out.
func TestBatchManyErrors(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for _, test := range []struct {
		items, each, listed int
		says                string
	}{{50, 2, 100, ""}, {51, 2, 100, "They are 102, of which the first 100 are listed."}, {500, 2, 100, "They are 1000,"}} {
		a := g.postBatch(t, batch(slices.Repeat([]string{`{"name":7,"x":1}`}, test.items)...))
		listed := strings.Count(a.body, `"loc":`)
		if detail := a.str("detail"); a.status != 422 || listed != test.listed || !strings.Contains(detail, test.says) || strings.Contains(detail, "They") != (test.says != "") {
			t.Errorf("%d items = %d, %d errors, %s; want %d and %q", test.items, a.status, listed, detail, test.listed, test.says)
		}
	}
}

// A declared and an undeclared body at and above the limit.
func TestBatchBodyLimit(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	body := batch(`{"name":"a"}`)
	exact := body + strings.Repeat(" ", maxBatchBytes-len(body))
	for how, r := range map[string]io.Reader{"declared": strings.NewReader(exact), "chunked": io.MultiReader(strings.NewReader(exact))} {
		if a, err := g.try(t.Context(), "POST", batchPath, r, "Content-Type", "application/json"); err != nil || a.status != 202 {
			t.Errorf("8 MiB, %s = %d %s, %v, want 202", how, a.status, a.body, err)
		}
	}
	const head = "POST /tasks/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	for how, a := range map[string]answer{
		"declared": g.raw(t, head+"Expect: 100-continue\r\nContent-Length: 8388609\r\n\r\n"),
		"chunked":  g.raw(t, head+"Transfer-Encoding: chunked\r\n\r\n"+fmt.Sprintf("%x\r\n%s\r\n", maxBatchBytes+1, exact+" ")),
	} {
		if a.status != 413 || a.str("type") != problemURN+"body-too-large" || !strings.Contains(a.str("detail"), "8388608") || a.header.Get("Connection") != "close" {
			t.Errorf("8 MiB + 1, %s = %d %v %s, want 413", how, a.status, a.header, a.body)
		}
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 2 {
		t.Errorf("%d rows, want 2", n)
	}
}

// The order of checks, and that what is refused leaves the keys free: each request breaks
// this rule and all that follow.
func TestBatchCheckOrder(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys, c.ReadAPIKeys = []string{"secret"}, []string{"reader"} })
	good := batch(`{"name":"a"}`, `{"name":"b","idempotency_key":"k"}`)
	lines := []string{"Authorization: Bearer wrong", "Sec-Fetch-Site: cross-site", "Content-Type: text/plain", "Content-Length: 8388609", `Idempotency-Key: "open`}
	right := []string{"Authorization: Bearer secret", "Sec-Fetch-Site: same-origin", "Content-Type: application/json", "", "Idempotency-Key: h"}
	send := func(target, body string, n int) answer {
		head := append(slices.Clone(right[:n]), lines[n:]...)
		if n > 3 {
			head[3] = fmt.Sprint("Content-Length: ", len(body))
		}
		return g.raw(t, target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"+strings.Join(head, "\r\n")+"\r\n\r\n"+body)
	}
	g.server.backlogged.Store(true)
	for _, check := range []struct {
		what   string
		target string
		body   string
		right  int
		status int
		kind   string
	}{
		{"method", "PUT /tasks/batch", "", 0, 405, "about:blank"},
		{"API key", "POST /tasks/batch", "", 0, 401, "about:blank"},
		{"origin", "POST /tasks/batch", "", 1, 403, "cross-origin"},
		{"media type", "POST /tasks/batch", "", 2, 415, "unsupported-media-type"},
		{"declared length", "POST /tasks/batch", "", 3, 413, "body-too-large"},
		{"key syntax", "POST /tasks/batch", "{", 4, 400, "idempotency-key-invalid"},
		{"syntax", "POST /tasks/batch", `{"tasks":[{},]}`, 5, 400, "malformed-json"},
		{"fields", "POST /tasks/batch", `{"tasks":[{}]}`, 5, 422, "validation"},
		{"backlog", "POST /tasks/batch", good, 5, 429, "rate-limited"},
	} {
		a := send(check.target, check.body, check.right)
		if kind := strings.TrimPrefix(a.str("type"), problemURN); a.status != check.status || kind != check.kind {
			t.Errorf("%s: %d %s, want %d %s", check.what, a.status, a.body, check.status, check.kind)
		}
	}
	g.server.backlogged.Store(false)
	if a := g.postBatch(t, good, "Authorization", "Bearer reader"); a.status != 403 {
		t.Errorf("with a key that may only read: %d %s, want 403", a.status, a.body)
	}
	for _, want := range []int{202, 200} {
		if a := g.postBatch(t, good, "Authorization", "Bearer secret", "Idempotency-Key", "h"); a.status != want {
			t.Errorf("in the end: %d %s, want %d", a.status, a.body, want)
		}
	}
}

// GET finds no task named batch: the path is there, and takes POST only.
func TestBatchMethods(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	for _, method := range []string{"GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "FOO"} {
		if a := g.do(t, method, batchPath, ""); a.status != 405 || a.header.Get("Allow") != "POST" {
			t.Errorf("%s = %d, Allow %q, want 405 and POST", method, a.status, a.header.Get("Allow"))
		}
	}
	if a := g.do(t, "PUT", "/tasks/"+strings.Repeat("b", 36), ""); a.status != 405 || a.header.Get("Allow") != "GET, HEAD" {
		t.Errorf("PUT of a task = %d, Allow %q, want 405 and GET, HEAD", a.status, a.header.Get("Allow"))
	}
	worker := startGateway(t, g.dsn, func(c *config) { c.Gateway = false })
	for _, method := range []string{"GET", "POST"} {
		if a := worker.do(t, method, batchPath, ""); a.status != 404 {
			t.Errorf("%s of a worker = %d, want 404", method, a.status)
		}
	}
}

func TestBatchUnknownTask(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	delete(g.server.handlers.byName, anyName)
	a := g.postBatch(t, batch(`{"name":"typo"}`, `{"name":"fail_task"}`, `{"name":"typo","payload":1}`, `{"name":""}`))
	want := "body tasks 0 name, body tasks 2 payload, body tasks 2 name, body tasks 3 name"
	if got := a.places(t); a.status != 422 || got != want || strings.Count(a.body, "known names: fail_task") != 2 {
		t.Errorf("POST = %d %s, want 422 with errors at %s", a.status, a.body, want)
	}
}

// What is due is published once it is committed, with its queue; the options of each item
// are its own.
func TestBatchStored(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	b := g.postBatch(t, batch(
		`{"name":"now","payload":{"id":12345678901234567890,"s":"☃"},"idempotency_key":"z"}`,
		`{"name":"past","run_at":"2020-01-01T00:00:00Z","queue":"critical","idempotency_key":"a"}`,
		`{"name":"later","delay_ms":60000,"max_retries":0,"timeout_ms":1500}`,
	), "Traceparent", trace).batch(t)
	got := map[string]bool{}
	for _, e := range g.published() {
		got[e.id.String()+" "+e.queue] = true
	}
	if want := map[string]bool{b.Tasks[0].ID + " default": true, b.Tasks[1].ID + " critical": true}; !cmp.Equal(got, want) {
		t.Errorf("entries %v, want %v", got, want)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks WHERE published_at IS NULL AND name = 'later'"); n != 1 {
		t.Error("what is not due is marked as published")
	}
	if n := g.number(t, "SELECT count(*) FROM tasks WHERE traceparent = $1", trace); n != 3 {
		t.Errorf("%d rows have the trace context, want 3", n)
	}
	for i, want := range []map[string]string{
		{"payload": `{"s":"☃","id":12345678901234567890}`, "max_retries": "3", "queue": "default", "idempotency_key": "z"},
		{"payload": `{}`, "queue": "critical", "idempotency_key": "a"},
		{"max_retries": "0", "timeout_ms": "1500", "idempotency_key": "null"},
	} {
		a := g.do(t, "GET", "/tasks/"+b.Tasks[i].ID, "")
		for member, value := range want {
			if a.str(member) != value {
				t.Errorf("task %d: %s = %s, want %s", i, member, a.str(member), value)
			}
		}
		if a.str("created_at") != b.Tasks[i].Accepted || a.str("name") != b.Tasks[i].Name {
			t.Errorf("task %d is %s, its receipt %+v", i, a.body, b.Tasks[i])
		}
	}
	g.up.Store(false)
	if a := g.postBatch(t, batch(`{"name":"down"}`, `{"name":"down"}`)); a.status != 202 {
		t.Errorf("without the stream: %d %s, want 202", a.status, a.body)
	}
	if n := g.number(t, "SELECT count(*) FROM tasks WHERE published_at IS NULL AND name = 'down'"); n != 2 || len(g.published()) != 2 {
		t.Errorf("without the stream: %d unpublished rows and %d entries, want 2 and 2", n, len(g.published()))
	}
}

func TestBatchBacklog(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.MaxBacklogAge = 10 * time.Second })
	id := g.submitted(t, `{"name":"old"}`)
	g.exec(t, "UPDATE tasks SET run_at = now() - interval '11 s' WHERE task_id = $1", id)
	eventually(t, "batches are refused", func() bool {
		a := g.postBatch(t, batch(`{"name":"x"}`))
		return a.status == 429 && a.header.Get("Retry-After") != ""
	})
	g.exec(t, "UPDATE tasks SET status = 'completed' WHERE task_id = $1", id)
	eventually(t, "batches are accepted", func() bool { return g.postBatch(t, batch(`{"name":"x"}`)).status == 202 })
}

// FuzzPostBatch sends arbitrary bytes as a batch through the whole handler to a real
// database: the answer is one of those that are promised, and has a receipt for each
// item if it is not a problem.
func FuzzPostBatch(f *testing.F) {
	g := startGatewayLog(f, newDatabase(f), nil, discardLog())
	h := g.server.handler()
	for _, seed := range []string{
		batch(`{"name":"a"}`), batch(`{"name":"a","idempotency_key":"k"}`, `{"name":"a","idempotency_key":"k"}`, `{"name":"b","idempotency_key":"k"}`),
		batch(`{"name":"a","payload":{"x":[1e5,"\u0000"]},"max_retries":1,"delay_ms":5}`, `[]`, `7`), `{"tasks":null,"x":{}}`, `{"tasks":[{},{}],"tasks":[{"name":"a"}]}`,
		`{"t\u0061sks":[ {"name":"\ud800"} , ]}`, `{`, `[1]`, "\xff", ``,
	} {
		f.Add([]byte(seed), "key", false)
		f.Add([]byte(seed), "", true)
	}
	f.Fuzz(func(t *testing.T, body []byte, key string, keyed bool) {
		r := httptest.NewRequest("POST", batchPath, strings.NewReader(string(body)))
		r.Header.Set("Content-Type", "application/json")
		if keyed {
			r.Header.Set("Idempotency-Key", key)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		switch w.Code {
		case 200, 202:
			var sent struct{ Tasks []json.RawMessage }
			var got batchAnswer
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatalf("%d with %q: %v", w.Code, w.Body, err)
			}
			// encoding/json takes Tasks for tasks, which a valid body cannot hold.
			if err := json.Unmarshal(body, &sent); err != nil || len(got.Tasks) != len(sent.Tasks) || got.Accepted+got.Replayed != len(sent.Tasks) || (got.Accepted > 0) != (w.Code == 202) {
				t.Errorf("%q = %d %s: %v", body, w.Code, w.Body, err)
			}
		case 400, 422:
			var p problem
			if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Status != w.Code || p.Type == "" || p.Title == "" || p.Detail == "" || len(p.Errors) > maxErrors {
				t.Errorf("%d with %q: %v", w.Code, w.Body, err)
			}
			if p.Type == problemURN+"malformed-json" && json.Valid(body) && strings.ToValidUTF8(string(body), "") == string(body) {
				t.Errorf("%q = %s, but encoding/json takes it", body, w.Body)
			}
		default:
			t.Errorf("%q %q = %d %s", body, key, w.Code, w.Body)
		}
	})
}

// BenchmarkSubmitBatch is BenchmarkSubmit in batches of 100; an operation is one task.
func BenchmarkSubmitBatch(b *testing.B) {
	g := startGatewayLog(b, newDatabase(b), nil, discardLog())
	body := batch(slices.Repeat([]string{`{"name":"a","payload":{"file":"clip.mp4"}}`}, 100)...)
	b.ResetTimer()
	for done := 0; done < b.N; done += 100 {
		if a := g.postBatch(b, body); a.status != 202 {
			b.Fatalf("%d %s", a.status, a.body)
		}
	}
}
