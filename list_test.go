package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// A listItem is what the tests look at of an item of a list.
type listItem struct {
	ID      string `json:"task_id"`
	Name    string
	Status  string
	Created string `json:"created_at"`
}

// list returns one page, which must be a 200, and the path of the next as the Link
// header gives it, "" at the end.
func (g *gateway) list(t testing.TB, path string) (items []listItem, next string) {
	t.Helper()
	a := g.do(t, "GET", path, "")
	var page struct {
		Tasks []listItem
		Next  *string `json:"next_cursor"`
	}
	if err := json.Unmarshal([]byte(a.body), &page); err != nil || a.status != 200 || page.Tasks == nil {
		t.Fatalf("GET %s = %d %s: %v", path, a.status, a.body, err)
	}
	if link := a.header.Get("Link"); link != "" {
		m := regexp.MustCompile(`^<(/tasks\?[!-;=?-~]+)>; rel="next"$`).FindStringSubmatch(link)
		if m == nil {
			t.Fatalf("GET %s: Link: %s", path, link)
		}
		next = m[1]
	}
	target, err := url.Parse(next)
	if err != nil {
		t.Fatal(err)
	}
	if cursor := target.Query().Get("cursor"); (page.Next == nil) != (next == "") || page.Next != nil && *page.Next != cursor {
		t.Errorf("GET %s: Link %s, next_cursor %v", path, next, page.Next)
	}
	return page.Tasks, next
}

// walk follows the Link headers to the end and returns all items. It calls between,
// if not nil, before each request but the first.
func (g *gateway) walk(t testing.TB, path string, between func()) (items []listItem) {
	t.Helper()
	for {
		page, next := g.list(t, path)
		if items = append(items, page...); next == "" {
			return items
		}
		if len(page) == 0 || len(items) > 50_000 {
			t.Fatalf("GET %s: %d items on the page, %d in all, and more to come", path, len(page), len(items))
		}
		if path = next; between != nil {
			between()
		}
	}
}

// A listRow is a task that a test puts into the table.
type listRow struct {
	id      uuid.UUID
	name    string
	status  string
	created time.Time
}

func insertRows(t testing.TB, conn *pgx.Conn, rows []listRow) {
	t.Helper()
	var b pgx.Batch
	for _, r := range rows {
		b.Queue(`INSERT INTO tasks (task_id, name, status, created_at, lease_until) VALUES ($1, $2, $3, $4, CASE WHEN $3 = 'processing' THEN now() END)`,
			r.id, r.name, r.status, r.created)
	}
	if err := conn.SendBatch(t.Context(), &b).Close(); err != nil {
		t.Fatal(err)
	}
}

// newestFirst returns what a list of the rows says.
func newestFirst(rows []listRow) []listItem {
	rows = slices.SortedFunc(slices.Values(rows), func(a, b listRow) int {
		if c := b.created.Compare(a.created); c != 0 {
			return c
		}
		return strings.Compare(b.id.String(), a.id.String())
	})
	items := []listItem{}
	for _, r := range rows {
		items = append(items, listItem{r.id.String(), r.name, r.status, r.created.UTC().Format(timeLayout)})
	}
	return items
}

// Every combination of filters gives the rows that match, newest first, on pages
// that a client finds by the links alone. Many rows are as old as others, and the
// names are such as SQL may insert.
func TestListFilters(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	begin := time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)
	long := strings.Repeat("ü", 128)
	names := []string{"a", "A", `q"\/<>`, "100%&=+#?;", "a b\n\x01", "ünïcødé ☃😀", long, long + "x", long + strings.Repeat("y", 2000), " ", "'; DROP TABLE tasks; --"}
	var rows []listRow
	for i := range 330 {
		rows = append(rows, listRow{uuid.New(), names[i%len(names)], statuses[i/2%len(statuses)], begin.Add(time.Duration(i/25) * time.Second)})
	}
	insertRows(t, connect(t, g.dsn), rows)

	at := func(seconds int, layout string) string {
		return begin.Add(time.Duration(seconds) * time.Second).In(time.FixedZone("", 2*60*60)).Format(layout)
	}
	type span struct {
		after, before string
		in            func(seconds int) bool
	}
	spans := []span{
		{"", "", func(int) bool { return true }},
		{at(3, time.RFC3339Nano), "", func(n int) bool { return n >= 3 }},
		{"", at(9, time.RFC3339Nano), func(n int) bool { return n < 9 }},
		{at(3, "2006-01-02T15:04:05.000000000Z07:00"), at(4, time.RFC3339Nano), func(n int) bool { return n == 3 }},
		// A nanosecond later begins the next microsecond.
		{strings.ToLower(begin.Add(3*time.Second + 1).Format(time.RFC3339Nano)), begin.Add(9*time.Second + 1).Format(time.RFC3339Nano), func(n int) bool { return n > 3 && n <= 9 }},
		{at(9, time.RFC3339), at(3, time.RFC3339), func(int) bool { return false }},
	}
	sets := [][]string{nil, {"failed"}, {"processing"}, {"pending,processing"}, {"completed", "cancelled"}, {"failed,pending", "failed"}, {strings.Join(statuses, ",")}}
	for _, set := range sets {
		asked := strings.Split(strings.Join(set, ","), ",")
		for j, name := range append(names, "", "ab", "%") {
			for i, span := range spans {
				if name != "" && i != j%len(spans) && set != nil {
					continue // a sample of the names will do
				}
				q := url.Values{}
				for key, value := range map[string]string{"name": name, "created_after": span.after, "created_before": span.before} {
					if value != "" {
						q.Set(key, value)
					}
				}
				if set != nil {
					q["status"] = set
				}
				q.Set("limit", fmt.Sprint(1+i*7))
				if name == "" {
					q.Set("limit", "50")
				}
				want := newestFirst(slices.DeleteFunc(slices.Clone(rows), func(r listRow) bool {
					return set != nil && !slices.Contains(asked, r.status) || name != "" && r.name != name || !span.in(int(r.created.Sub(begin)/time.Second))
				}))
				got := g.walk(t, "/tasks?"+q.Encode(), nil)
				if diff := cmp.Diff(want, append([]listItem{}, got...)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", q.Encode(), diff)
				}
			}
		}
	}
}

// A list is merged from groups, whatever they are like: more of them than a page has rows, or
// few; names next to each other in the order of the index, and such as begin alike; names
// of which nothing is new, and states of which there is nothing; ties across groups.
func TestListGroups(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	conn := connect(t, g.dsn)
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	long := strings.Repeat("x", 128)
	odd := []string{"", " ", "!", "a", "a ", "a!", "\x01", "~", "\u007f", "ÿ", "\U0010FFFF", long, long + "1", long + "2", strings.Repeat("ü", 128), strings.Repeat("ü", 129)}
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 0))
		names := slices.Clone(odd)
		for i := range rng.IntN(80) {
			names = append(names, fmt.Sprint("name ", i))
		}
		rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		names = names[:1+rng.IntN(len(names))]
		states := slices.Clone(statuses)
		rng.Shuffle(len(states), func(i, j int) { states[i], states[j] = states[j], states[i] })
		states = states[:1+rng.IntN(len(states))]
		moments := 1 + rng.IntN(100) // the fewer, the more ties
		var rows []listRow
		for range rng.IntN(500) {
			n := rng.IntN(len(names))
			if n%2 == 0 {
				n = rng.IntN(n + 1) // some names have more tasks than others
			}
			status := states[rng.IntN(len(states))]
			// Each group ends at a time of its own.
			last := 1 + (n*7+len(status)*13+int(seed))%moments
			rows = append(rows, listRow{uuid.New(), names[n], status, begin.Add(time.Duration(rng.IntN(last)) * time.Second)})
		}
		execute(t, conn, "TRUNCATE tasks")
		insertRows(t, conn, rows)
		for _, limit := range []int{1, 2, 3, 10, 50, 200} {
			q := url.Values{"limit": {fmt.Sprint(limit)}}
			in := func(r listRow) bool { return true }
			switch rng.IntN(4) {
			case 0:
				status := statuses[rng.IntN(len(statuses))]
				q.Set("status", status)
				in = func(r listRow) bool { return r.status == status }
			case 1:
				if name := names[rng.IntN(len(names))]; name != "" {
					q.Set("name", name)
					in = func(r listRow) bool { return r.name == name }
				}
			case 2:
				after, before := begin.Add(time.Duration(rng.IntN(moments))*time.Second), begin.Add(time.Duration(rng.IntN(moments+1))*time.Second)
				q.Set("created_after", after.Format(time.RFC3339))
				q.Set("created_before", before.Format(time.RFC3339))
				in = func(r listRow) bool { return !r.created.Before(after) && r.created.Before(before) }
			}
			want := newestFirst(slices.DeleteFunc(slices.Clone(rows), func(r listRow) bool { return !in(r) }))
			got := g.walk(t, "/tasks?"+q.Encode(), nil)
			if diff := cmp.Diff(want, append([]listItem{}, got...)); diff != "" {
				t.Errorf("seed %d, %d names, states %v: %s (-want +got):\n%s", seed, len(names), states, q.Encode(), diff)
			}
		}
	}
}

// An item is the task as GET shows it, without payload and result.
func TestListItems(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	if a := g.do(t, "GET", "/tasks", ""); a.status != 200 || a.body != `{"tasks":[],"next_cursor":null}` || a.header.Get("Link") != "" || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("GET of no tasks = %d %v %s", a.status, a.header, a.body)
	}
	var ids []string
	for i, set := range []string{
		"updated_at = now()",
		"status = 'processing', lease_until = now(), started_at = now(), cancel_requested = true, attempt = 1",
		"retry_count = 1, run_at = now() + interval '1 hour', error_message = E'no\n\"luck\"', attempts = task_ledger(attempts, 1, 'w', now(), 'failed', 'no'), lost_count = 2",
		"status = 'completed', result = '{\"secret\": 1}', finished_at = now(), started_at = now()",
		"status = 'failed', finished_at = now()",
		"status = 'cancelled', finished_at = now()",
	} {
		id := g.submitted(t, `{"name":"a","payload":{"secret":1},"timeout_ms":1000}`, "Idempotency-Key", fmt.Sprint("key ", i))
		g.exec(t, "UPDATE tasks SET "+set+" WHERE task_id = $1", id)
		ids = append(ids, id)
	}
	var want []string
	for _, id := range slices.Backward(ids) {
		body := g.do(t, "GET", "/tasks/"+id, "").body
		item := regexp.MustCompile(`"payload":\{"secret":1\},"result":(null|\{"secret":1\}),`).ReplaceAllString(body, "")
		if strings.Contains(item, "secret") || len(item) == len(body) {
			t.Fatalf("GET = %s", body)
		}
		want = append(want, item)
	}
	a := g.do(t, "GET", "/tasks", "")
	if diff := cmp.Diff(`{"tasks":[`+strings.Join(want, ",")+`],"next_cursor":null}`, a.body); diff != "" {
		t.Errorf("GET /tasks (-want +got):\n%s", diff)
	}
	page := g.do(t, "GET", "/tasks?limit=2&status=pending,failed,completed", "")
	head := g.do(t, "HEAD", "/tasks?limit=2&status=pending,failed,completed", "")
	if head.status != 200 || head.body != "" || head.header.Get("Content-Length") != fmt.Sprint(len(page.body)) || head.header.Get("Link") != page.header.Get("Link") || page.header.Get("Link") == "" {
		t.Errorf("HEAD = %d %v %q, GET %v", head.status, head.header, head.body, page.header)
	}
}

func TestListLimit(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.exec(t, "INSERT INTO tasks (name) SELECT 'a' FROM generate_series(1, 200)")
	for limit, want := range map[string]int{
		"": 50, "limit=0": 50, "limit=-0": 50, "limit=1": 1, "limit=007": 7, "limit=199": 199, "limit=200": 200, "limit=201": 200, "limit=99999999999999999999": 200,
	} {
		items, next := g.list(t, "/tasks?"+limit)
		if len(items) != want || (next == "") != (want == 200) {
			t.Errorf("%s: %d items, next %q, want %d items", limit, len(items), next, want)
		}
		// A client may change its mind about the size of the page.
		if next != "" {
			if rest, last := g.list(t, regexp.MustCompile(`limit=[-0-9]+&`).ReplaceAllString(next+"&", "")+"limit=200"); len(rest) != 200-want || last != "" {
				t.Errorf("%s: %d items follow, want %d", limit, len(rest), 200-want)
			}
		}
	}
	g.exec(t, "INSERT INTO tasks (name) VALUES ('a')")
	if items, next := g.list(t, "/tasks?limit=1000"); len(items) != 200 || next == "" {
		t.Errorf("limit=1000 of 201: %d items, next %q", len(items), next)
	}
}

// While a client pages through lists, tasks are inserted everywhere in them and change
// their state. Each that is there and matches all the while is seen exactly once,
// and none twice.
func TestListWhileTasksChange(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	conn := connect(t, g.dsn)
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	var rows []listRow
	for i := range 400 {
		rows = append(rows, listRow{uuid.New(), []string{"stays", "stays", fmt.Sprint("stays ", i%17)}[i%3], statuses[i%len(statuses)], begin.Add(time.Duration(i/40) * time.Second)})
	}
	insertRows(t, conn, rows)
	execute(t, conn, `CREATE TABLE round (n int); INSERT INTO round VALUES (0)`)
	// Open tasks start or are given back, half of the terminal ones are run again or end.
	change := func() {
		execute(t, conn, `BEGIN; UPDATE round SET n = n + 1;
			INSERT INTO tasks (name, created_at) SELECT 'comes ' || (SELECT n FROM round), '2026-03-01 12:00:00+00'::timestamptz + n * interval '100 ms' FROM generate_series(-5, 150, 12) n;
			UPDATE tasks SET status = 'processing', lease_until = now() WHERE status = 'pending' AND hashtext(task_id::text || (SELECT n FROM round)) % 2 = 0;
			UPDATE tasks SET status = 'pending', lease_until = NULL WHERE status = 'processing' AND hashtext(task_id::text || (SELECT n + 1 FROM round)) % 2 = 0;
			UPDATE tasks SET status = CASE status WHEN 'completed' THEN 'failed' ELSE 'completed' END WHERE status IN ('completed', 'failed');
			COMMIT`)
	}
	for query, matches := range map[string][]string{
		"":                                   statuses,
		"status=pending,processing":          {statusPending, statusProcessing},
		"status=failed,completed":            {statusFailed, statusCompleted},
		"name=stays":                         statuses,
		"name=stays&status=cancelled,failed": {statusCancelled},
	} {
		// The walk begins anew each time: the states have changed, but not from open to ended.
		seen := map[string]int{}
		for _, item := range g.walk(t, "/tasks?limit=61&"+query, change) {
			if seen[item.ID]++; seen[item.ID] > 1 {
				t.Errorf("%s: task %s is seen again", query, item.ID)
			}
		}
		for _, r := range rows {
			if slices.Contains(matches, r.status) && (r.name == "stays" || !strings.HasPrefix(query, "name=")) && seen[r.id.String()] != 1 {
				t.Errorf("%s: a task that was %s is seen %d times", query, r.status, seen[r.id.String()])
			}
		}
	}
}

// As TestListWhileTasksChange, with tasks that the gateway takes in and writers that
// do not wait for the reader.
func TestListBesideWriters(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.exec(t, "INSERT INTO tasks (name) SELECT 'stays' FROM generate_series(1, 500)")
	stays := map[string]bool{}
	for _, id := range column[string](t, connect(t, g.dsn), "SELECT task_id::text FROM tasks") {
		stays[id] = true
	}
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for range 2 {
		writers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					g.post(t, `{"name":"comes"}`)
				}
			}
		})
	}
	flip := connect(t, g.dsn)
	writers.Go(func() {
		for {
			for _, set := range []string{"status = 'processing', lease_until = now()", "status = 'completed', lease_until = NULL", "status = 'pending'"} {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := flip.Exec(t.Context(), "UPDATE tasks SET "+set+" WHERE name = 'stays' AND random() < 0.3"); err != nil && sqlState(err) != "23514" {
					t.Error(err)
				}
			}
		}
	})
	for range 5 {
		seen := map[string]int{}
		for _, item := range g.walk(t, "/tasks?limit=20", nil) {
			if seen[item.ID]++; seen[item.ID] > 1 {
				t.Errorf("task %s is seen again", item.ID)
			}
		}
		for id := range stays {
			if seen[id] != 1 {
				t.Errorf("task %s is seen %d times", id, seen[id])
			}
		}
	}
	close(stop)
	writers.Wait()
}

// Everything that is wrong with a query is said at once.
func TestListRefuses(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for query, want := range map[string][]string{
		"status=":                             {"literal_error status"},
		"status=done":                         {"literal_error status"},
		"status=failed,":                      {"literal_error status"},
		"status=failed&status=FAILED":         {"literal_error status"},
		"status=failed,%20pending":            {"literal_error status"},
		"name=":                               {"string_too_short name"},
		"name":                                {"string_too_short name"},
		"name=a&name=a":                       {"value_error name"},
		"name=a%00b":                          {"string_pattern_mismatch name"},
		"name=%ff":                            {"string_pattern_mismatch name"},
		"created_after=":                      {"datetime_parsing created_after"},
		"created_after=2026-01-01":            {"datetime_parsing created_after"},
		"created_after=2026-01-01T00:00:00":   {"datetime_parsing created_after"},
		"created_before=2026-13-01T00:00:00Z": {"datetime_parsing created_before"},
		"created_before=infinity":             {"datetime_parsing created_before"},
		"created_after=2026-01-01T00:00:00Z&created_after=2026-01-01T00:00:00Z": {"value_error created_after"},
		"limit=":                         {"int_type limit"},
		"limit=ten":                      {"int_type limit"},
		"limit=1.0":                      {"int_type limit"},
		"limit=-1":                       {"greater_than_equal limit"},
		"limit=-99999999999999999999":    {"greater_than_equal limit"},
		"limit=5&limit=5":                {"value_error limit"},
		"cursor=":                        {"value_error cursor"},
		"cursor=null":                    {"value_error cursor"},
		"cursor=a&cursor=a":              {"value_error cursor"},
		"Status=failed":                  {"extra_forbidden Status"},
		"offset=5&page=2":                {"extra_forbidden offset", "extra_forbidden page"},
		"%ff=1":                          {"extra_forbidden \uFFFD"},
		"=1":                             {"extra_forbidden "},
		"name=%zz":                       {"value_error"},
		"name=a;limit=5":                 {"value_error"},
		"limit=x&page=1&status=s&name=":  {"literal_error status", "string_too_short name", "int_type limit", "extra_forbidden page"},
		"created_after=x&limit=-1&%zz=1": {"value_error", "datetime_parsing created_after", "greater_than_equal limit"},
	} {
		a := g.do(t, "GET", "/tasks?"+query, "")
		var p problem
		if err := json.Unmarshal([]byte(a.body), &p); err != nil || a.status != 422 || p.Type != problemURN+"validation" || p.Detail != "The query is invalid: see errors." {
			t.Errorf("%s = %d %s, want 422", query, a.status, a.body)
			continue
		}
		var got []string
		for _, e := range p.Errors {
			if e.Loc[0] != "query" || e.Msg == "" {
				t.Errorf("%s: %v %q", query, e.Loc, e.Msg)
			}
			got = append(got, strings.Join(append([]string{e.Type}, texts(e.Loc[1:])...), " "))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", query, diff)
		}
	}
	many := url.Values{}
	for i := range 500 {
		many.Set(fmt.Sprintf("x%d%s", i, strings.Repeat("y", 20)), "1")
	}
	if _, err := parseListing(many.Encode()); len(err.(fieldErrors)) != maxUnknown {
		t.Errorf("500 unknown parameters: %d errors, want %d", len(err.(fieldErrors)), maxUnknown)
	}
}

func texts(loc []any) (texts []string) {
	for _, l := range loc {
		texts = append(texts, fmt.Sprint(l))
	}
	return texts
}

// A cursor is of use in the list that gave it, and only there.
func TestListCursorMisuse(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	g.exec(t, "INSERT INTO tasks (name, created_at) SELECT 'a', '2026-03-01T00:00:00Z'::timestamptz + n * interval '1 s' FROM generate_series(1, 9) n")
	_, next := g.list(t, "/tasks?name=a&limit=5&status=pending")
	target, err := url.Parse(next)
	if err != nil {
		t.Fatal(err)
	}
	q := target.Query()
	cursor := q.Get("cursor")
	ask := func(what string, status int, change map[string]string) {
		t.Helper()
		changed := maps.Clone(q)
		for name, value := range change {
			if changed.Set(name, value); value == "" {
				changed.Del(name)
			}
		}
		a := g.do(t, "GET", "/tasks?"+changed.Encode(), "")
		if a.status != status || status == 422 && !strings.Contains(a.body, `"loc":["query","cursor"]`) {
			t.Errorf("%s = %d %s, want %d", what, a.status, a.body, status)
		}
	}
	ask("as it was", 200, nil)
	ask("another limit", 200, map[string]string{"limit": "1"})
	ask("no limit", 200, map[string]string{"limit": ""})
	ask("same states", 200, map[string]string{"status": "pending,pending"})
	ask("another name", 422, map[string]string{"name": "b"})
	ask("no name", 422, map[string]string{"name": ""})
	ask("more states", 422, map[string]string{"status": "pending,failed"})
	ask("all states", 422, map[string]string{"status": ""})
	ask("a span", 422, map[string]string{"created_after": "2026-01-01T00:00:00Z"})
	ask("another span", 422, map[string]string{"created_before": "2027-01-01T00:00:00Z"})
	for i := range len(cursor) {
		c := byte('A')
		if cursor[i] == c {
			c = 'B'
		}
		ask(fmt.Sprint("changed at ", i), 422, map[string]string{"cursor": cursor[:i] + string(c) + cursor[i+1:]})
		ask(fmt.Sprint("cut at ", i), 422, map[string]string{"cursor": cursor[:max(i, 1)]})
	}
	for _, bad := range []string{cursor + "=", cursor + "A", cursor + "\n", " " + cursor, strings.ToLower(cursor), "\x00", "\xff", strings.Repeat("A", 10_000)} {
		ask(fmt.Sprintf("%.60q", bad), 422, map[string]string{"cursor": bad})
	}
	// Someone who knows how they are made gets no further than the filter allows.
	l, err := parseListing("name=a&status=pending&created_after=2026-01-01T00:00:00Z&created_before=2027-01-01T00:00:00Z")
	if err != nil {
		t.Fatal(err)
	}
	everything := filter{statuses, nil, firstTime, lastTime}
	for _, f := range []filter{l.filter, everything} {
		for _, created := range []time.Time{
			time.UnixMicro(-1 << 63), time.UnixMicro(1<<63 - 1), firstTime.Add(-1000), lastTime, f.since.Add(-1000), f.before,
		} {
			if p, ok := f.position(f.cursor(position{created, uuid.Max})); ok {
				t.Errorf("cursor for %v is taken: %v", created, p)
			}
		}
		for _, created := range []time.Time{f.since, f.before.Add(-1000)} {
			want := position{created, uuid.Max}
			if p, ok := f.position(f.cursor(want)); !ok || p != want {
				t.Errorf("cursor for %v = %v, %t", want, p, ok)
			}
		}
	}
	for _, created := range []time.Time{firstTime, lastTime.Add(-1000)} {
		a := g.do(t, "GET", "/tasks?cursor="+everything.cursor(position{created, uuid.Max}), "")
		if a.status != 200 {
			t.Errorf("cursor at %v = %d %s", created, a.status, a.body)
		}
	}
}

// The list is there for keys that may read, as every GET is.
func TestListKeys(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys, c.ReadAPIKeys = []string{"full"}, []string{"reader"} })
	for key, want := range map[string]int{"full": 200, "reader": 200, "other": 401} {
		if a := g.do(t, "GET", "/tasks?status=failed", "", "Authorization", "Bearer "+key); a.status != want {
			t.Errorf("with %s = %d %s, want %d", key, a.status, a.body, want)
		}
	}
	if a := g.do(t, "GET", "/tasks?status=none", ""); a.status != 401 {
		t.Errorf("without a key = %d %s, want 401", a.status, a.body)
	}
}

// FuzzListing gives arbitrary queries and cursors to the parser: it accepts none that is not
// within its limits, and of each position one cursor only.
func FuzzListing(f *testing.F) {
	all, err := parseListing("")
	if err != nil {
		f.Fatal(err)
	}
	f.Add("status=failed,pending&status=failed&name=%41&limit=5", "")
	f.Add("created_after=2026-01-01t00:00:00.1234567z&created_before=2026-01-01T00:00:00%2B23:59", "AAAA")
	f.Add("limit=-1&name=%00&x=1&%zz;", all.cursor(position{time.Unix(0, 0), uuid.Max}))
	f.Add("", all.cursor(position{lastTime, uuid.Nil}))
	f.Fuzz(func(t *testing.T, query, cursor string) {
		l, err := parseListing(query)
		if err != nil {
			errs, ok := errors.AsType[fieldErrors](err)
			if !ok || len(errs) == 0 || len(errs) > maxUnknown+7 {
				t.Fatalf("%q: %v", query, err)
			}
			return
		}
		if l.limit < 1 || l.limit > maxPage || len(l.statuses) == 0 || l.since.Before(firstTime) || l.before.After(lastTime) || l.query.Has("cursor") {
			t.Errorf("%q: %+v", query, l)
		}
		if again, err := parseListing(l.query.Encode()); err != nil || !cmp.Equal(l.filter, again.filter, cmp.AllowUnexported(filter{})) || again.limit != l.limit {
			t.Errorf("%q: %+v, from its link %+v, %v", query, l, again, err)
		}
		if p, ok := l.position(cursor); ok && (l.cursor(p) != cursor || p.created.Before(l.since) || !p.created.Before(l.before)) {
			t.Errorf("%q of %q is %v", cursor, query, p)
		}
		if want := (position{l.before.Add(-time.Microsecond), uuid.Max}); l.since.Before(l.before) {
			if p, ok := l.position(l.cursor(want)); !ok || p != want {
				t.Errorf("%q: cursor of %v is that of %v, %t", query, want, p, ok)
			}
		}
	})
}
