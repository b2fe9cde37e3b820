package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	randomRequestsTime = 5 * time.Second // unless REQUESTS says otherwise
	randomStream       = 300 * time.Millisecond
	randomCallers      = 4
)

// TestContractRandomRequests sends requests that are made of openapi.yaml, right and wrong ones, to
// the whole service. Every answer keeps the contract and none is a 5xx. REQUESTS=10m goes
// on for longer, REQUESTS_SEED repeats a run's choices.
func TestContractRandomRequests(t *testing.T) {
	t.Parallel()
	limit := randomRequestsTime
	if text := os.Getenv("REQUESTS"); text != "" {
		var err error
		if limit, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("REQUESTS_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("REQUESTS_SEED=%d", seed)
	svc := startService(t, fastConfig(t), nil)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var callers sync.WaitGroup
	counts := make([]map[string]int, randomCallers)
	for i := range randomCallers {
		counts[i] = make(map[string]int)
		callers.Go(func() {
			caller := &randomCaller{
				contract: testContract(t),
				url:      svc.url,
				Rand:     rand.New(rand.NewPCG(seed, uint64(i))),
				counts:   counts[i],
			}
			patterns := caller.contract.patterns()
			for n := i; n < len(patterns) || ctx.Err() == nil; n += randomCallers {
				pattern := caller.choose()
				if n < len(patterns) { // each has its turn, however few requests the time is enough for
					pattern = patterns[n]
				}
				if err := caller.call(ctx, pattern); err != nil {
					t.Errorf("REQUESTS_SEED=%d, caller %d: %v", seed, i, err)
					return
				}
			}
		})
	}
	callers.Wait()
	total := make(map[string]int)
	for _, c := range counts {
		for answer, n := range c {
			total[answer] += n
		}
	}
	for _, answer := range slices.Sorted(maps.Keys(total)) {
		t.Logf("%7d %s", total[answer], answer)
	}
	for _, pattern := range testContract(t).patterns() {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(total)), func(answer string) bool { return strings.HasPrefix(answer, pattern+" ") }) {
			t.Errorf("no request was sent to %s", pattern)
		}
	}
	if body := getJSON(t, svc.url+"/readyz"); body["status"] != "ok" {
		t.Errorf("afterwards the service is %v", body)
	}
}

// A randomCaller makes one request after the other.
type randomCaller struct {
	*rand.Rand
	contract *contract
	url      string
	ids      []string       // of tasks that there are
	cursors  []string       // that were returned
	tags     []string       // ETags and event ids
	counts   map[string]int // answers, by pattern and status
}

// chance reports true once in n calls.
func (r *randomCaller) chance(n int) bool { return r.IntN(n) == 0 }

func pick[T any](r *randomCaller, from ...T) T { return from[r.IntN(len(from))] }

// choose returns the pattern of the next request, one where little can go wrong only seldom.
func (r *randomCaller) choose() string {
	for {
		pattern := pick(r, r.contract.patterns()...)
		_, operation := r.operation(pattern)
		if tag := operation["tags"].([]any)[0]; tag != "Documents" && tag != "Monitor" || r.chance(10) {
			return pattern
		}
	}
}

// operation returns what the contract says of a path and of a method there.
func (r *randomCaller) operation(pattern string) (path, operation map[string]any) {
	method, name, _ := strings.Cut(strings.TrimSuffix(pattern, "{$}"), " ")
	path, _ = r.contract.at("paths", name)
	operation, _ = r.contract.at("paths", name, strings.ToLower(method))
	return path, operation
}

// call sends one request and checks what comes back.
func (r *randomCaller) call(ctx context.Context, pattern string) error {
	method, path, _ := strings.Cut(strings.TrimSuffix(pattern, "{$}"), " ")
	item, operation := r.operation(pattern)
	query, header := url.Values{}, http.Header{}
	target := path
	for _, holder := range []map[string]any{item, operation} {
		list, _ := holder["parameters"].([]any)
		for _, entry := range list {
			p := r.resolve(entry)
			name, schema := p["name"].(string), r.resolve(p["schema"])
			switch p["in"] {
			case "path":
				target = strings.Replace(target, "{"+name+"}", url.PathEscape(r.text(name, schema)), 1)
			case "query":
				for range pick(r, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2) {
					query.Add(name, r.text(name, schema))
				}
			case "header":
				if r.chance(2) {
					header.Add(name, headerText(r.text(name, schema)))
				}
			}
		}
	}
	if r.chance(12) {
		query.Add(r.junk(), r.junk())
	}
	var body []byte
	if operation["requestBody"] != nil {
		body = r.body(path)
		header.Set("Content-Type", "application/json")
		if r.chance(20) {
			header.Set("Content-Type", pick(r, "text/plain", "application/json; charset=latin1", "application/vnd.x+json", ""))
		}
		if r.chance(40) {
			header.Set("Content-Encoding", "gzip")
		}
	}
	switch {
	case r.chance(25):
		method = pick(r, "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
	case method == "GET" && r.chance(10):
		method = "HEAD"
	}
	text := query.Encode()
	if r.chance(40) {
		text += pick(r, "&%zz", ";", "&%ff=%ff", "&=", "&a%00=b")
	}
	if text != "" {
		target += "?" + text
	}
	return r.send(ctx, pattern, method, target, header, body)
}

// headerText returns the part of a text that may travel in a header.
func headerText(text string) string {
	return strings.Map(func(c rune) rune {
		if c < ' ' && c != '\t' || c == 0x7f {
			return -1
		}
		return c
	}, text)
}

// send makes the request. A stream, and a wait, is ended after a moment.
func (r *randomCaller) send(ctx context.Context, pattern, method, target string, header http.Header, body []byte) error {
	patience := 20 * time.Second
	if strings.HasSuffix(pattern, "/events") {
		patience = randomStream
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	request, err := http.NewRequestWithContext(limited, method, r.url+target, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s %q: %w", method, target, err)
	}
	request.Header = header
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.Do(request)
	if patience == randomStream && errors.Is(err, context.DeadlineExceeded) {
		r.counts[pattern+" without answer"]++ // not even its beginning came in time
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s %.300s %v %.1000s: %w", method, target, header, body, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil && !(patience == randomStream && errors.Is(err, context.DeadlineExceeded)) {
		return fmt.Errorf("%s %.300s %v %.1000s: %w", method, target, header, body, err)
	}
	a := answer{response.StatusCode, response.Header, string(text)}
	r.learn(a)
	r.counts[pattern+" "+strconv.Itoa(a.status)]++
	err = r.contract.check(method, target, a)
	switch {
	case err != nil:
	case a.status >= 500:
		err = errors.New("a 5xx")
	case a.status >= 400 && a.header.Get("Content-Type") != "application/problem+json":
		err = errors.New("an error that is no problem")
	default:
		return nil
	}
	return fmt.Errorf("%w\n%s %.300s\n%v\n%.1000s\n%d %.1000s", err, method, target, header, body, a.status, a.body)
}

// learn keeps what later requests may name.
func (r *randomCaller) learn(a answer) {
	keep := func(list *[]string, value string) {
		if value == "" || value == "null" {
			return
		}
		if *list = append(*list, value); len(*list) > 50 {
			*list = (*list)[1:]
		}
	}
	if id := strings.TrimPrefix(a.header.Get("Location"), "/tasks/"); len(id) == 36 {
		keep(&r.ids, id)
	}
	keep(&r.tags, a.header.Get("Etag"))
	if strings.Contains(a.body, `"next_cursor"`) {
		keep(&r.cursors, a.str("next_cursor"))
	}
}

func (r *randomCaller) resolve(value any) map[string]any {
	object := value.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		found, _ := r.contract.at(strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
		return found
	}
	return object
}

// text returns the value of a parameter: mostly one that its schema allows.
func (r *randomCaller) text(name string, schema map[string]any) string {
	if r.chance(10) {
		return r.junk()
	}
	switch name {
	case "task_id":
		if len(r.ids) > 0 && !r.chance(6) {
			return pick(r, pick(r, r.ids...), pick(r, r.ids...), strings.ToUpper(pick(r, r.ids...)))
		}
	case "cursor":
		return pick(r, append(slices.Clone(r.cursors), "AAZG0hK")...)
	case "wait":
		return pick(r, "0", "0", "1", "-1", "1.5", "1e1", "")
	case "Prefer":
		return pick(r, "wait=0", "wait=1", "respond-async, wait=1", "wait=x", "wait", "", `wait="1";a=",`)
	case "If-None-Match", "Last-Event-ID":
		return pick(r, append(slices.Clone(r.tags), "*", `W/"a", "b"`, "AAAAAAAA-0")...)
	case "queue":
		return pick(r, "default", "default", "nowhere", strings.Repeat("q", 65))
	case "Idempotency-Key":
		return r.key()
	}
	switch value := r.value(schema).(type) {
	case string:
		return value
	case []any: // of words, in one parameter
		var words []string
		for _, word := range value {
			words = append(words, fmt.Sprint(word))
		}
		return strings.Join(words, ",")
	default:
		b, err := json.Marshal(value)
		if err != nil {
			panic(err)
		}
		return string(b)
	}
}

func (r *randomCaller) key() string {
	key := "key-" + strconv.Itoa(r.IntN(20))
	return pick(r, key, key, `"`+key+`"`, `"`+key+`";a=1`, `"open`, `"a"b`, "", " ", "é", strings.Repeat("k", pick(r, 240, 241, 255, 256)))
}

// body returns a request body for a path: mostly one that the schema allows, else damaged.
func (r *randomCaller) body(path string) []byte {
	var value any = r.submission()
	if path == "/tasks/batch" {
		tasks := make([]any, pick(r, 0, 1, 1, 2, 5, 500, 501))
		for i := range tasks {
			tasks[i] = r.submission()
		}
		value = map[string]any{"tasks": tasks}
	}
	if r.chance(15) {
		value = pick[any](r, nil, 1, "x", []any{}, map[string]any{}, map[string]any{"tasks": 1}, map[string]any{"tasks": []any{1, nil, []any{}}})
	}
	b, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	switch {
	case r.chance(12): // some bytes are lost, changed or doubled
		for range 1 + r.IntN(3) {
			if len(b) == 0 {
				break
			}
			at := r.IntN(len(b))
			b = pick(r, slices.Delete(slices.Clone(b), at, at+1), slices.Insert(slices.Clone(b), at, byte(r.IntN(256))), b[:at])
		}
	case r.chance(150):
		b = append(b, bytes.Repeat([]byte(" "), 1<<20)...)
	}
	return b
}

func (r *randomCaller) submission() map[string]any {
	schema := r.resolve(map[string]any{"$ref": "#/components/schemas/Submission"})
	properties := schema["properties"].(map[string]any)
	s := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		if name != "name" && !r.chance(4) {
			continue
		}
		s[name] = r.value(properties[name].(map[string]any))
		switch name {
		case "name":
			if !r.chance(12) {
				s[name] = pick(r, "process_video", "fail_task", "a")
			}
		case "idempotency_key":
			s[name] = headerText(r.key())
		case "queue":
			s[name] = pick[any](r, "default", "default", "nowhere", nil)
		}
		if r.chance(20) {
			s[name] = pick[any](r, nil, true, 1.5, -1, "", []any{}, map[string]any{"a": 1}, json.RawMessage("1e400"), json.RawMessage(`"\u0000"`), json.RawMessage(`{"a":"\ud800"}`))
		}
	}
	if r.chance(20) {
		s[r.junk()] = 1
	}
	if r.chance(30) {
		depth := 99 + r.IntN(3)
		s["payload"] = json.RawMessage(strings.Repeat(`{"a":`, depth) + "1" + strings.Repeat("}", depth))
	}
	return s
}

// value returns something that a schema allows, at a limit where it has one, or just beyond.
func (r *randomCaller) value(schema map[string]any) any {
	schema = r.resolve(schema)
	if words, ok := schema["enum"].([]any); ok {
		return pick(r, words...)
	}
	kind, ok := schema["type"].(string)
	if !ok {
		kinds, _ := schema["type"].([]any)
		kind, _ = pick(r, append(slices.Clone(kinds), "object")...).(string)
	}
	number := func(name string, otherwise int) int {
		n, _ := schema[name].(json.Number)
		return int(cmp.Or(first(n.Int64()), int64(otherwise)))
	}
	switch kind {
	case "null":
		return nil
	case "boolean":
		return r.chance(2)
	case "integer", "number":
		low, high := number("minimum", 0), number("maximum", 1000)
		return pick(r, low, low+1, low-1, high, high+1, low+r.IntN(high-low+1))
	case "array":
		items := make([]any, 1+r.IntN(2))
		for i := range items {
			items[i] = r.value(schema["items"].(map[string]any))
		}
		return items
	case "object":
		return pick[any](r, map[string]any{}, map[string]any{"file": r.junk()}, map[string]any{"n": json.RawMessage("12345678901234567890"), "l": []any{1, "x", nil}})
	}
	switch schema["format"] {
	case "date-time":
		return pick(r, time.Now().Add(time.Duration(r.IntN(200)-100)*time.Hour).Format(time.RFC3339), time.Now().UTC().Format(time.RFC3339Nano), "2026-02-30T00:00:00Z", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-11-30")
	case "uuid":
		return fmt.Sprintf("%08x-0000-7000-8000-%012x", r.Uint32(), r.Uint32())
	}
	high := number("maxLength", 40)
	return strings.Repeat(pick(r, "a", "a", "é", " "), pick(r, 1, 2, high, high+1))
}

func first(n int64, _ error) int64 { return n }

// junk returns text that hardly any rule allows.
func (r *randomCaller) junk() string {
	return pick(r, "", " ", "x", "null", "\x00", "\u2028", "é", "\xff", "'; --", "%00", "../..", "a,b", "-1", "99999999999999999999", "1e999", strings.Repeat("x", 3000), "<script>", "\ud7ff\ue000", "{\"a\":1}")
}
