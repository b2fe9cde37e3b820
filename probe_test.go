//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
)

// A probe is the work that tasks do in fault tests: a handler that sees each start and
// decides each end.
type probe struct {
	server *httptest.Server

	mu     sync.Mutex
	runs   []*probeRun
	decide func(*probeRun) reply
}

// A probeRun is one attempt as its handler sees it.
type probeRun struct {
	task    uuid.UUID
	attempt int
	member  string // the process that runs it
	payload probePayload
	answer  chan reply
	gone    <-chan struct{} // closed when the attempt's context ended or its process died

	began time.Time
	ended time.Time // guarded by the probe's mu; zero while it runs
}

// probePayload tells the probe what to do where a test does not decide itself.
type probePayload struct {
	Do string `json:"do"` // hold, fail, refuse, fail once; otherwise complete
	MS int    `json:"ms"` // after so many milliseconds
}

// A reply ends a run. The zero reply means: wait until the test gives one.
type reply struct {
	code int
	body string
}

var (
	failing  = reply{http.StatusInternalServerError, "told to fail"}
	refusing = reply{http.StatusBadRequest, "told to refuse"}
)

func startProbe(t testing.TB) *probe {
	p := &probe{decide: byPayload}
	p.server = httptest.NewServer(p)
	t.Cleanup(p.server.Close)
	t.Cleanup(p.release)
	return p
}

func (p *probe) url(member string) string { return p.server.URL + "/" + member }

// completing is the answer that shows in the result which attempt gave it.
func completing(r *probeRun) reply {
	return reply{http.StatusOK, fmt.Sprintf(`{"attempt":%d,"by":%q}`, r.attempt, r.member)}
}

func byPayload(r *probeRun) reply {
	switch r.payload.Do {
	case "hold":
		return reply{}
	case "fail":
		return failing
	case "refuse":
		return refusing
	case "fail once":
		if r.attempt == 1 {
			return failing
		}
	}
	return completing(r)
}

func holding(*probeRun) reply { return reply{} }

func (p *probe) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return
	}
	r := &probeRun{
		member: strings.TrimPrefix(req.URL.Path, "/"),
		answer: make(chan reply, 1),
		gone:   req.Context().Done(),
		began:  time.Now(),
	}
	r.task, _ = uuid.Parse(req.Header.Get("X-Task-Id"))
	r.attempt, _ = strconv.Atoi(req.Header.Get("X-Task-Attempt"))
	if err := json.Unmarshal(body, &r.payload); err != nil {
		r.payload = probePayload{}
	}
	p.mu.Lock()
	p.runs = append(p.runs, r)
	decide := p.decide
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.ended = time.Now()
	}()
	a := decide(r)
	if r.payload.MS > 0 {
		select {
		case <-time.After(time.Duration(r.payload.MS) * time.Millisecond):
		case <-r.gone:
			return
		}
	}
	if a.code == 0 {
		select {
		case a = <-r.answer:
		case <-r.gone:
			return
		}
	}
	w.WriteHeader(a.code)
	io.WriteString(w, a.body)
}

// set changes what decides the runs that start from now on.
func (p *probe) set(decide func(*probeRun) reply) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decide = decide
}

// end ends a held run.
func (r *probeRun) end(a reply) {
	select {
	case r.answer <- a:
	default:
	}
}

// release completes what is held, and lets nothing be held from now on.
func (p *probe) release() {
	p.set(func(r *probeRun) reply {
		if a := byPayload(r); a.code != 0 {
			return a
		}
		return completing(r)
	})
	for _, r := range p.running() {
		r.end(completing(r))
	}
}

// all returns the runs so far, in the order of their starts.
func (p *probe) all() []*probeRun {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.runs)
}

func (p *probe) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.runs)
}

// running returns the runs that have not ended.
func (p *probe) running() []*probeRun {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.runs), func(r *probeRun) bool { return !r.ended.IsZero() })
}

// runningOn returns the runs of one process that have not ended.
func (p *probe) runningOn(member string) []*probeRun {
	return slices.DeleteFunc(p.running(), func(r *probeRun) bool { return r.member != member })
}

// of returns the runs of one task, in the order of their attempts.
func (p *probe) of(task uuid.UUID) []*probeRun {
	runs := slices.DeleteFunc(p.all(), func(r *probeRun) bool { return r.task != task })
	slices.SortStableFunc(runs, func(a, b *probeRun) int { return cmp.Compare(a.attempt, b.attempt) })
	return runs
}

// end returns when a run ended, or now.
func (p *probe) endOf(r *probeRun) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.ended.IsZero() {
		return time.Now()
	}
	return r.ended
}
