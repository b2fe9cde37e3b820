package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// Every status that the file has for a request is produced here once, and each of these answers
// is checked against the file as all are. 500 is a bug by definition: TestPanic.
func TestContractAnswers(t *testing.T) {
	t.Parallel()
	c := testContract(t)
	seen := &answered{contract: c, statuses: make(map[string]bool)}
	t.Run("usual", seen.usual)
	t.Run("refused", seen.refused)
	t.Run("busy", seen.busy)
	t.Run("without PostgreSQL", seen.withoutPostgres)
	if t.Failed() {
		return // what follows would only repeat it
	}
	for _, pattern := range c.patterns() {
		for _, status := range c.statuses(pattern) {
			if name := pattern + " " + status; status != "500" && !seen.statuses[name] {
				t.Errorf("%s was not produced", name)
			}
		}
	}
}

// statuses returns those that the file has for a request.
func (c *contract) statuses(pattern string) []string {
	method, path, _ := strings.Cut(strings.TrimSuffix(pattern, "{$}"), " ")
	responses, _ := c.at("paths", path, strings.ToLower(method), "responses")
	return slices.Sorted(maps.Keys(responses))
}

// answered notes which answers there were.
type answered struct {
	contract *contract
	statuses map[string]bool
}

// do sends a request and notes its answer, which must have the given status.
func (s *answered) do(t *testing.T, g *gateway, status int, method, path, body string, header ...string) answer {
	t.Helper()
	a := g.do(t, method, path, body, header...)
	s.note(t, method, path, status, a)
	return a
}

func (s *answered) note(t *testing.T, method, target string, status int, a answer) {
	t.Helper()
	if a.status != status {
		t.Errorf("%s %.100s = %d %.500s, want %d", method, target, a.status, a.body, status)
	}
	_, pattern := s.contract.mux.Handler(httptest.NewRequest(method, target, nil))
	s.statuses[pattern+" "+fmt.Sprint(a.status)] = true
}

// stream reads a stream until it ends or, for a moment, what there is of it.
func (s *answered) stream(t *testing.T, g *gateway, status int, path string, header ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	a, err := g.try(ctx, "GET", path, nil, header...)
	if err != nil && ctx.Err() == nil {
		t.Errorf("%s: %v", path, err)
	} else if err := s.contract.check("GET", path, a); err != nil {
		t.Error(err)
	}
	s.note(t, "GET", path, status, a)
}

// targets returns the path of each request that the file has with a task and a queue in it.
func (s *answered) targets(id string) map[string][2]string {
	targets := make(map[string][2]string)
	for _, pattern := range s.contract.patterns() {
		method, path, _ := strings.Cut(strings.TrimSuffix(pattern, "{$}"), " ")
		targets[pattern] = [2]string{method, strings.NewReplacer("{task_id}", id, "{queue}", "default").Replace(path)}
	}
	return targets
}

var isJSONBody = []string{"Content-Type", "application/json"}

func (s *answered) usual(t *testing.T) {
	g := startGateway(t, newDatabase(t), nil)
	keyed := append([]string{"Idempotency-Key", "k"}, isJSONBody...)
	s.do(t, g, 202, "POST", "/tasks", `{"name":"a"}`, keyed...)
	s.do(t, g, 200, "POST", "/tasks", `{"name":"a"}`, keyed...)
	s.do(t, g, 422, "POST", "/tasks", `{"name":"b"}`, keyed...)
	s.do(t, g, 400, "POST", "/tasks", `{`, isJSONBody...)
	s.do(t, g, 400, "POST", "/tasks", `{"name":"a"}`, "Content-Type", "application/json", "Idempotency-Key", `"`)
	s.do(t, g, 415, "POST", "/tasks", `{"name":"a"}`)
	s.do(t, g, 415, "POST", "/tasks", `{"name":"a"}`, "Content-Type", "application/json", "Content-Encoding", "gzip")
	s.do(t, g, 308, "POST", "/tasks/", "")
	s.do(t, g, 308, "GET", "/tasks/", "")
	s.do(t, g, 202, "POST", "/tasks/batch", `{"tasks":[{"name":"a"}]}`, keyed...)
	s.do(t, g, 200, "POST", "/tasks/batch", `{"tasks":[{"name":"a"}]}`, keyed...)
	s.do(t, g, 422, "POST", "/tasks/batch", `{"tasks":[]}`, isJSONBody...)
	s.do(t, g, 400, "POST", "/tasks/batch", ``, isJSONBody...)
	s.do(t, g, 415, "POST", "/tasks/batch", ``)
	for _, path := range []string{"/tasks", "/tasks/batch"} {
		request := "POST " + path + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n"
		s.note(t, "POST", path, 413, g.raw(t, request))
	}

	id := g.submitted(t, `{"name":"a"}`)
	shown := s.do(t, g, 200, "GET", "/tasks/"+id, "", "Prefer", "wait=0")
	s.do(t, g, 304, "GET", "/tasks/"+id, "", "If-None-Match", shown.header.Get("Etag"))
	s.do(t, g, 200, "GET", "/tasks?limit=1", "")
	s.stream(t, g, 200, "/tasks/"+id+"/events")
	s.stream(t, g, 200, "/events")
	g.exec(t, "UPDATE tasks SET status = 'processing', attempt = 1, started_at = now(), lease_until = now() + interval '1 h', locked_by = 'w', updated_at = now() WHERE task_id = $1", id)
	s.do(t, g, 409, "POST", "/tasks/"+id+"/retry", "")
	s.do(t, g, 202, "POST", "/tasks/"+id+"/cancel", "")
	g.exec(t, "UPDATE tasks SET status = 'failed', lease_until = NULL, locked_by = NULL, finished_at = now(), updated_at = now() WHERE task_id = $1", id)
	s.do(t, g, 409, "POST", "/tasks/"+id+"/cancel", "")
	ended := g.do(t, "GET", "/tasks/"+id, "")
	s.stream(t, g, 204, "/tasks/"+id+"/events", "Last-Event-Id", strings.Trim(ended.header.Get("Etag"), `"`))
	s.do(t, g, 202, "POST", "/tasks/"+id+"/retry", "")
	s.do(t, g, 200, "POST", "/tasks/"+id+"/cancel", "")
	s.do(t, g, 200, "POST", "/tasks/cancel?status=pending", "")
	s.do(t, g, 200, "POST", "/tasks/retry?name=a", "")
	for _, queue := range []string{"/queues/default", "/queues/critical"} {
		s.do(t, g, 200, "POST", queue+"/pause", "")
		s.do(t, g, 200, "POST", queue+"/resume", "")
	}
	for _, path := range []string{"/queues", "/stats", "/metrics", "/health", "/healthz", "/livez", "/readyz", "/docs", "/docs/style.css", "/openapi.json", "/openapi.yaml"} {
		a := s.do(t, g, 200, "GET", path, "")
		if tag := a.header.Get("Etag"); tag != "" {
			s.do(t, g, 304, "GET", path, "", "If-None-Match", tag)
		}
	}
	s.do(t, g, 308, "GET", "/docs/", "")
	s.do(t, g, 308, "GET", "/redoc", "")
}

// refused produces what is wrong with a request whatever it is about.
func (s *answered) refused(t *testing.T) {
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys, c.ReadAPIKeys = []string{"full"}, []string{"read"} })
	full, read := []string{"Authorization", "Bearer full"}, []string{"Authorization", "Bearer read"}
	for pattern, target := range s.targets(uuid.NewString()) {
		method, path := target[0], target[1]
		declared := s.contract.statuses(pattern)
		s.noteMethod(t, g, pattern, path)
		if slices.Contains(declared, "401") {
			s.do(t, g, 401, method, path, "")
		} else if a := g.do(t, method, path, ""); a.status == 401 {
			t.Errorf("%s needs a key", pattern)
		}
		if slices.Contains(declared, "403") {
			s.do(t, g, 403, method, path, "", read...)
			s.do(t, g, 403, method, path, "", append([]string{"Sec-Fetch-Site", "cross-site"}, full...)...)
		} else if a := g.do(t, method, "/tasks?limit=x", "", read...); a.status == 403 {
			t.Errorf("%s is not for readers", pattern)
		}
		if slices.Contains(declared, "422") && !slices.Contains(declared, "415") {
			s.do(t, g, 422, method, path+"?stauts=x", "", full...)
		}
		if slices.Contains(declared, "404") {
			s.do(t, g, 404, method, strings.Replace(path, "default", "nowhere", 1), "", full...)
		}
	}
	a := s.do(t, g, 403, "POST", "/tasks", "{}", append([]string{"Sec-Fetch-Site", "cross-site"}, full...)...)
	if a.str("type") != problemURN+"cross-origin" {
		t.Errorf("cross-origin: %s", a.body)
	}
}

// noteMethod sends a method that no path has, and notes it as an answer to pattern.
func (s *answered) noteMethod(t *testing.T, g *gateway, pattern, path string) {
	t.Helper()
	a := g.do(t, "DELETE", path, "")
	if a.status != http.StatusMethodNotAllowed {
		t.Errorf("DELETE %s = %d, want 405", path, a.status)
	}
	s.statuses[pattern+" "+fmt.Sprint(a.status)] = true
}

func (s *answered) busy(t *testing.T) {
	g := startGateway(t, newDatabase(t), nil)
	g.server.backlogged.Store(true)
	s.do(t, g, 429, "POST", "/tasks", `{"name":"a"}`, isJSONBody...)
	s.do(t, g, 429, "POST", "/tasks/batch", `{"tasks":[{"name":"a"}]}`, isJSONBody...)
	for g.server.lobby.take() {
	}
	a := s.do(t, g, 503, "GET", "/events", "")
	if a.str("type") != problemURN+"overloaded" {
		t.Errorf("no place for a stream: %s", a.body)
	}
}

func (s *answered) withoutPostgres(t *testing.T) {
	server := startPostgresServer(t)
	g := startGateway(t, server.createDatabase(t, "nexusflow"), nil)
	server.stop()
	for pattern, target := range s.targets(uuid.NewString()) {
		if !slices.Contains(s.contract.statuses(pattern), "503") {
			continue
		}
		path, body := target[1], `{"name":"a"}`
		switch path {
		case "/tasks/batch":
			body = `{"tasks":[{"name":"a"}]}`
		case "/tasks/cancel", "/tasks/retry":
			path += "?name=a"
		}
		s.do(t, g, 503, target[0], path, body, isJSONBody...)
	}
}
