package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// scrape returns the samples that /metrics shows, by name and labels, and the whole text.
func scrape(t testing.TB, url string) (samples map[string]float64, text string) {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/plain; version=0.0.4; charset=utf-8" {
		t.Fatalf("GET /metrics = %d %v %s, %v", resp.StatusCode, resp.Header, b, err)
	}
	samples = make(map[string]float64)
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		value, err := strconv.ParseFloat(strings.TrimSpace(line[i+1:]), 64)
		if err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		samples[line[:i]] = value
	}
	return samples, string(b)
}

// wantSamples waits until /metrics shows the given values.
func wantSamples(t testing.TB, url string, want map[string]float64) {
	t.Helper()
	var diff string
	eventually(t, "metrics as wanted", func() bool {
		got, _ := scrape(t, url)
		maps.DeleteFunc(got, func(name string, _ float64) bool { _, asked := want[name]; return !asked })
		diff = cmp.Diff(want, got)
		return diff == ""
	}, func() any { return diff })
}

// Each event moves its counter, once.
func TestMetrics(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	direct := newDatabase(t)
	through := newLink(t, "127.0.0.1:0", testPostgres(t).socket)
	name, _, _ := strings.Cut(strings.TrimPrefix(direct, "postgres://nexusflow@/"), "?")
	cfg.DatabaseURL = through.dsn(name)
	cfg.Lease = 6 * time.Second // that a slow machine lets none pass
	held, goOn := make(chan struct{}, 2), make(chan struct{})
	s := startService(t, cfg, map[string]handlerFunc{
		"ok":   func(context.Context, task) (any, error) { return nil, nil },
		"held": func(context.Context, task) (any, error) { held <- struct{}{}; <-goOn; return nil, nil },
		"once": func(_ context.Context, t task) (any, error) {
			if t.RetryCount == 0 {
				return nil, errors.New("once")
			}
			return nil, nil
		},
		"never": func(context.Context, task) (any, error) { return nil, permanent(errors.New("never")) },
		"asked": func(ctx context.Context, _ task) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
	})
	post := func(key, body string, want int) {
		t.Helper()
		if status, answer := postTask(t, s.url, key, body); status != want {
			t.Fatalf("POST %s = %d %v, want %d", body, status, answer, want)
		}
	}
	post("k", `{"name":"ok"}`, 202)
	post("k", `{"name":"ok"}`, 200)
	post("k", `{"name":"ok","payload":{"x":1}}`, 422)
	post("", `{"name":1}`, 422)
	post("", `{"name":"once"}`, 202)
	post("", `{"name":"never"}`, 202)
	// A count of ended tasks is kept for a while: the first one must find all of them.
	eventually(t, "all ended", func() bool {
		var ended int
		err := s.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE finished_at IS NOT NULL").Scan(&ended)
		return err == nil && ended == 3
	})
	wantSamples(t, s.url, map[string]float64{
		`nexusflow_tasks_submitted_total{outcome="created"}`:                          3,
		`nexusflow_tasks_submitted_total{outcome="replayed"}`:                         1,
		`nexusflow_tasks_submitted_total{outcome="conflict"}`:                         1,
		`nexusflow_tasks_submitted_total{outcome="invalid"}`:                          1,
		`nexusflow_http_requests_total{code="202",method="POST",route="/tasks"}`:      3,
		`nexusflow_http_requests_total{code="422",method="POST",route="/tasks"}`:      2,
		`nexusflow_http_request_duration_seconds_count{method="POST",route="/tasks"}`: 6,
		`nexusflow_task_attempts_total{outcome="completed"}`:                          2,
		`nexusflow_task_attempts_total{outcome="retried"}`:                            1,
		`nexusflow_task_attempts_total{outcome="failed"}`:                             1,
		`nexusflow_task_attempts_total{outcome="cancelled"}`:                          0,
		`nexusflow_task_attempts_total{outcome="lost"}`:                               0,
		`nexusflow_task_duration_seconds_count`:                                       4,
		`nexusflow_task_queue_wait_seconds_count`:                                     4,
		`nexusflow_tasks{status="pending"}`:                                           0,
		`nexusflow_tasks{status="processing"}`:                                        0,
		`nexusflow_tasks{status="completed"}`:                                         2,
		`nexusflow_tasks{status="failed"}`:                                            1,
		`nexusflow_tasks{status="cancelled"}`:                                         0,
		`nexusflow_workers`:                                                           4,
		`nexusflow_workers_busy`:                                                      0,
		`nexusflow_stream_length`:                                                     0,
		`nexusflow_stream_pending`:                                                    0,
		`nexusflow_stream_lag`:                                                        0,
		`nexusflow_oldest_pending_seconds`:                                            0,
		`nexusflow_unpublished_tasks`:                                                 0,
		`nexusflow_expired_leases`:                                                    0,
		`nexusflow_dependency_up{dependency="postgres"}`:                              1,
		`nexusflow_dependency_up{dependency="redis"}`:                                 1,
		fmt.Sprintf(`nexusflow_build_info{version=%q}`, version()):                    1,
		`nexusflow_batch_rows_sum{statement="outcome"}`:                               4,
		`nexusflow_batch_rows_sum{statement="submit"}`:                                5,
		`nexusflow_outcomes_refused_total`:                                            0,
	})

	// An outcome whose reply is lost was stored all the same.
	through.loseReply("CompleteTasks")
	s.await(s.insert("ok"), statusCompleted)
	// A worker that is taken for dead, and then reports.
	id := s.insert("held")
	<-held
	wantSamples(t, s.url, map[string]float64{
		`nexusflow_task_attempts_total{outcome="completed"}`: 3, `nexusflow_outcomes_refused_total`: 0, `nexusflow_workers_busy`: 1,
	})
	s.exec("UPDATE tasks SET attempt = attempt + 7, lease_until = now() WHERE task_id = $1", id)
	close(goOn)
	// Rows whose worker is gone and rows whose entry is gone.
	s.insert("ok", "status='processing'", "attempt=1", "lease_until=now() - interval '1 minute'")
	s.insert("ok", "published_at=now() - interval '1 minute'")
	asked := s.insert("asked")
	s.await(asked, statusProcessing)
	s.exec("UPDATE tasks SET cancel_requested = true WHERE task_id = $1", asked)
	if _, err := s.stream.publish(t.Context(), []entry{{uuid.New(), defaultQueue}, {asked, defaultQueue}}); err != nil {
		t.Fatal(err)
	}
	wantSamples(t, s.url, map[string]float64{
		`nexusflow_outcomes_refused_total`:                   1,
		`nexusflow_task_attempts_total{outcome="completed"}`: 6, // "held" too, under another number
		`nexusflow_task_attempts_total{outcome="cancelled"}`: 1,
		`nexusflow_task_attempts_total{outcome="lost"}`:      2,
		`nexusflow_republished_total`:                        1,
		`nexusflow_unknown_entries_total`:                    1,
		`nexusflow_workers_busy`:                             0,
	})
}

// exec runs a statement past the service.
func (s *testService) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.pool.Exec(context.Background(), sql, args...); err != nil {
		s.t.Fatal(err)
	}
}

// The waiting time is that by the database's clock, from when the task was due.
func TestQueueWait(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	s.await(s.insert("x", "run_at=now() - interval '100 s'"), statusCompleted)
	s.await(s.insert("x", "run_at=now() + interval '1 s'"), statusCompleted)
	got, _ := scrape(t, s.url)
	if n, sum := got["nexusflow_task_queue_wait_seconds_count"], got["nexusflow_task_queue_wait_seconds_sum"]; n != 2 || sum < 100 || sum > 130 {
		t.Errorf("%v waits of %v s in all, want 2 of a little over 100 s", n, sum)
	}
}

// What "promtool check metrics" looks for.
func TestMetricsLint(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	_, text := scrape(t, s.url)
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("the text of /metrics: %v, %v", problems, err)
	}
	g := startGateway(t, newDatabase(t), nil)
	g.submitted(t, `{"name":"a"}`)
	problems, err = testutil.GatherAndLint(g.server.metrics.registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("the registry: %v, %v", problems, err)
	}
}

// README's table of metrics is that of the registry.
func TestReadmeMetrics(t *testing.T) {
	t.Parallel()
	s := startService(t, fastConfig(t), nil)
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(nexusflow_\\w+)").FindAllStringSubmatch(string(readme), -1) {
		documented = append(documented, m[1])
	}
	slices.Sort(documented)
	var diff string
	eventually(t, "README.md's table is that of the metrics", func() bool {
		_, text := scrape(t, s.url)
		var shown []string
		for _, m := range regexp.MustCompile(`(?m)^# TYPE (nexusflow_\w+)`).FindAllStringSubmatch(text, -1) {
			shown = append(shown, m[1])
		}
		diff = cmp.Diff(shown, documented)
		return diff == ""
	}, func() any { return "-registry +README\n" + diff })
}

// The labels of a request are ours, whatever it asks for.
func TestRequestLabels(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	g.do(t, "GET", "/tasks/"+uuid.NewString(), "", "Authorization", "Bearer secret")
	g.do(t, "HEAD", "/tasks/x", "", "Authorization", "Bearer secret")
	g.do(t, "GET", "/tasks/x", "")
	g.do(t, "GET", "/secretpath", "")
	g.do(t, "BREW", "/tasks", "")
	g.do(t, "BREW", "/secretpath", "")
	g.do(t, "GET", "/metrics", "")
	got, _ := scrape(t, g.URL)
	maps.DeleteFunc(got, func(name string, _ float64) bool { return !strings.HasPrefix(name, "nexusflow_http_requests_total") })
	want := map[string]float64{
		`nexusflow_http_requests_total{code="404",method="GET",route="/tasks/{task_id}"}`:  1,
		`nexusflow_http_requests_total{code="404",method="HEAD",route="/tasks/{task_id}"}`: 1,
		`nexusflow_http_requests_total{code="401",method="GET",route="/tasks/{task_id}"}`:  1,
		`nexusflow_http_requests_total{code="404",method="GET",route="other"}`:             1,
		`nexusflow_http_requests_total{code="405",method="other",route="other"}`:           1,
		`nexusflow_http_requests_total{code="404",method="other",route="other"}`:           1,
		`nexusflow_http_requests_total{code="200",method="GET",route="/metrics"}`:          1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// Observing allocates nothing once a series is there.
func TestMetricsAllocateNothing(t *testing.T) {
	m := newMetrics()
	allocations := testing.AllocsPerRun(100, func() {
		m.request("POST", "/tasks", 202, time.Millisecond)
		m.created.Inc()
		m.submitRows.Observe(3)
		m.wait.Observe(0.1)
		m.attempt(outcomeComplete, statusCompleted, time.Second)
	})
	if allocations != 0 {
		t.Errorf("%v allocations, want 0", allocations)
	}
}

// A worker alone shows metrics and probes, without keys, and nothing else.
func TestWorkerMetrics(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	cfg.Gateway = false
	s := startService(t, cfg, nil)
	s.await(s.insert("x"), statusCompleted)
	wantSamples(t, s.url, map[string]float64{`nexusflow_task_attempts_total{outcome="completed"}`: 1, `nexusflow_tasks{status="completed"}`: 1})
	for _, path := range []string{"/stats", "/tasks/" + uuid.NewString()} {
		if resp, err := http.Get(s.url + path); err != nil || resp.StatusCode != http.StatusNotFound {
			t.Errorf("GET %s = %v, %v, want 404", path, resp, err)
		}
	}
}

// While servers are away or silent a scrape is answered soon: with what the process knows,
// without the figures that it cannot know.
func TestMetricsWithoutServers(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	name, _, _ := strings.Cut(strings.TrimPrefix(dsn, "postgres://nexusflow@/"), "?")
	server := startRedisServer(t)
	pg, rd := newLink(t, "127.0.0.1:0", testPostgres(t).socket), newLink(t, "127.0.0.1:0", server.socket)
	cfg := fastConfig(t)
	cfg.DatabaseURL, cfg.RedisURL = pg.dsn(name), "redis://"+rd.addr
	s := startService(t, cfg, nil)
	up := map[string]float64{
		`nexusflow_dependency_up{dependency="postgres"}`: 1, `nexusflow_dependency_up{dependency="redis"}`: 1,
		`nexusflow_tasks{status="pending"}`: 0, `nexusflow_tasks{status="completed"}`: 0, `nexusflow_stream_length`: 0,
	}
	wantSamples(t, s.url, up)
	for _, mode := range []linkMode{blackHole, refused} {
		pg.set(mode)
		rd.set(mode)
		var got map[string]float64
		slowest := time.Duration(0)
		eventually(t, "figures absent", func() bool {
			begin := time.Now()
			got, _ = scrape(t, s.url)
			slowest = max(slowest, time.Since(begin))
			for sample := range got {
				for _, figure := range []string{"nexusflow_tasks{", "nexusflow_oldest", "nexusflow_stream_", "nexusflow_unpublished", "nexusflow_expired"} {
					if strings.HasPrefix(sample, figure) {
						return false
					}
				}
			}
			return got[`nexusflow_dependency_up{dependency="postgres"}`] == 0 && got[`nexusflow_dependency_up{dependency="redis"}`] == 0
		}, func() any { return got })
		for _, dependency := range []string{"postgres", "redis"} {
			if value, ok := got[fmt.Sprintf("nexusflow_dependency_up{dependency=%q}", dependency)]; !ok || value != 0 {
				t.Errorf("mode %v: %s up = %v, %v; want 0", mode, dependency, value, ok)
			}
		}
		if slowest > 3*scrapeLimit {
			t.Errorf("mode %v: a scrape took %v", mode, slowest)
		}
		pg.set(pass)
		rd.set(pass)
		wantSamples(t, s.url, up)
	}
}
