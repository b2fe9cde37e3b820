package main

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestLoad posts to a real server: every request must be valid, none may be lost or
// counted twice, and every key must be new.
func TestLoad(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	keys, seqs := map[string]bool{}, map[int]bool{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Name    string
			Payload struct{ Seq int }
		}
		data, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(data, &body)
		}
		if err != nil || body.Name != taskName || r.Method != http.MethodPost || r.URL.Path != "/tasks" {
			t.Errorf("%s %s: %v in %q", r.Method, r.URL, err, data)
		}
		mu.Lock()
		defer mu.Unlock()
		keys[r.Header.Get("Idempotency-Key")] = true
		seqs[body.Payload.Seq] = true
		w.WriteHeader(http.StatusAccepted)
		io.WriteString(w, `{"task_id":"1"}`)
	}))
	defer srv.Close()

	const n = 500
	done, err := load{addr: srv.Listener.Addr().String(), conns: 7, count: n, keys: true}.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if done.tasks != n || len(keys) != n || len(seqs) != n || keys[""] {
		t.Errorf("load of %d tasks: counted %d, %d payloads and %d keys arrived", n, done.tasks, len(seqs), len(keys))
	}
	if done.p50 <= 0 || done.p99 < done.p50 {
		t.Errorf("load: p50 %v, p99 %v", done.p50, done.p99)
	}
}

func TestLoadReportsRefusal(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "too many", http.StatusTooManyRequests)
	}))
	defer srv.Close()
	_, err := load{addr: srv.Listener.Addr().String(), conns: 2, count: 10}.run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "429") || !strings.Contains(err.Error(), "too many") {
		t.Errorf("load of a server that refuses: error %v, want one with status and body", err)
	}
}

// TestGateway submits to and reads from the gateway of the peers as the measurements do.
func TestGateway(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(gateway(memoryQueue{}))
	defer srv.Close()
	pool := newConnections(srv.Listener.Addr().String())
	defer pool.close()
	if _, err := pollUntilDone(t.Context(), pool, 1); err != nil {
		t.Errorf("post and poll: %v", err)
	}
	c, err := pool.take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if _, err := c.get("other"); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("get of an unknown task: error %v, want status 404", err)
	}
}

// memoryQueue has one task, which is completed.
type memoryQueue struct{ echo }

func (q memoryQueue) show(ctx context.Context, id string) (view, error) {
	if want, _ := q.enqueue(ctx, "", nil); id != want {
		return view{}, errUnknown
	}
	return view{ID: id, Status: "completed", Payload: json.RawMessage("{}")}, nil
}

func TestOpenLoop(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seqs []int
	begin := time.Now()
	err := openLoop(t.Context(), 1000, 50, func(seq int) error {
		mu.Lock()
		defer mu.Unlock()
		seqs = append(seqs, seq)
		return nil
	})
	slices.Sort(seqs)
	if err != nil || len(seqs) != 50 || seqs[0] != 0 || seqs[49] != 49 {
		t.Errorf("openLoop called with %v, error %v", seqs, err)
	}
	if took := time.Since(begin); took < 49*time.Millisecond {
		t.Errorf("50 calls at 1000 a second took %v", took)
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	var times []time.Duration
	for i := range 100 {
		times = append(times, time.Duration(100-i))
	}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 51, 0.99: 100, 1: 100} {
		if got := quantile(times, q); got != want {
			t.Errorf("quantile(1..100, %v) = %d, want %d", q, got, want)
		}
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("quantile of nothing = %d, want 0", got)
	}
}

func TestRatiosAreOfOneRound(t *testing.T) {
	t.Parallel()
	var r results
	a, b := key{"x", "nexusflow"}, key{"x", "river"}
	for round, v := range []float64{10, 40, 90} {
		r.add(a, sample{round: round, rate: v})
	}
	// A slow machine halves both; a round that is missing counts for nothing.
	r.add(b, sample{round: 2, rate: 30})
	r.add(b, sample{round: 0, rate: 5})
	if got, want := r.ratios(a, b, rate), []float64{2, 3}; !slices.Equal(got, want) {
		t.Errorf("ratios = %v, want %v", got, want)
	}
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		comparison
		value           float64
		target, verdict string
	}{
		{comparison{bound: 4}, 4, "≥ 4.00", "met"},
		{comparison{bound: 4}, 3.99, "≥ 4.00", "**not met**"},
		{comparison{bound: 0.5, atMost: true, percent: true}, 0.5, "≤ 50 %", "met"},
		{comparison{bound: 0.5, atMost: true, percent: true}, 0.51, "≤ 50 %", "**not met**"},
		{comparison{}, 7, "", ""},
	} {
		if target, verdict := c.comparison.target(c.value); target != c.target || verdict != c.verdict {
			t.Errorf("target of %v against bound %v = %q, %q, want %q, %q", c.value, c.bound, target, verdict, c.target, c.verdict)
		}
	}
}

// TestComparisonsNameMeasurements sees that every measurement a comparison names has one
// spelling: a misspelt one would silently be left out of the report.
func TestComparisonsNameMeasurements(t *testing.T) {
	t.Parallel()
	o, err := parseOptions(nil)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{opts: o}
	measured := []string{together64, drained, toHandler, toVisible, dueRetries, duringMoves, memorySteady}
	for _, conns := range levels() {
		measured = append(measured, submitting(conns))
	}
	for _, rows := range o.rows {
		measured = append(measured, grownTable{rows: rows}.name("submit"), grownTable{rows: rows}.name("drain"))
	}
	bounds := 0
	for _, c := range b.comparisons() {
		if c.bound > 0 {
			bounds++
		}
		for _, k := range []key{c.of, c.to} {
			if k != (key{}) && !slices.Contains(measured, k.what) {
				t.Errorf("%s: nothing measures %q", c.text, k.what)
			}
		}
	}
	const want = 27
	if bounds != want {
		t.Errorf("%d comparisons have a target, want %d", bounds, want)
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	pid, got, ok := parseStat("4242 (a (b) c) S 17 4242 4242 0 -1 4194560 100 200 0 0 150 50 300 100 20 0 1 0 99 1 1")
	want := procTime{parent: 17, used: 2, reaped: 4}
	if !ok || pid != 4242 || got != want {
		t.Errorf("parseStat = %d, %+v, %v, want 4242, %+v, true", pid, got, ok, want)
	}
	if _, _, ok := parseStat("4242 (half a line) S 17"); ok {
		t.Error("parseStat accepts half a line")
	}
	procs := map[int]procTime{1: {}, 17: {parent: 1, used: 1}, 18: {parent: 17, used: 2, reaped: 4}, 19: {parent: 18, used: 8}, 20: {parent: 1, used: 16}}
	if got := treeTime(procs, 17); got != 15 {
		t.Errorf("treeTime = %v, want 15", got)
	}
}

func TestGrew(t *testing.T) {
	t.Parallel()
	var sizes []float64
	for i := range 100 {
		sizes = append(sizes, 20)
		if i >= 90 {
			sizes[i] = 30
		}
	}
	if got := grew(sizes); got != 1.5 {
		t.Errorf("grew = %v, want 1.5", got)
	}
	if got := grew(sizes[:9]); got != 0 {
		t.Errorf("grew of a short series = %v, want 0", got)
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0.456: "0.46", 12.34: "12.3", 999: "999", 1234: "1,234", 5_000_000: "5,000,000"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}
