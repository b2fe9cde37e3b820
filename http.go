package main

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/semaphore"

	"nexusflow/db"
)

// readLimit bounds a status read, waiting for a connection included. As with submitLimit,
// PostgreSQL gives up first.
const readLimit = statementTimeout + time.Second

// A server is the gateway: it takes tasks in and tells what became of them. It meets
// the workers in PostgreSQL only.
type server struct {
	log         *slog.Logger
	cfg         config
	pools       *pools
	handlers    *handlerTable
	hints       hints
	limits      limits
	keys        apiKeys
	crossOrigin *http.CrossOriginProtection
	mux         *routes
	intake      *intake
	lobby       *lobby
	feed        *feed
	census      *census
	metrics     *metrics
	buffers     bufferPool
	bodies      *semaphore.Weighted // bytes that large request bodies may hold
	bodyTurn    *semaphore.Weighted // for one that finds none of it
	ready       readiness
	draining    atomic.Bool
	backlogged  atomic.Bool   // the oldest due task waits longer than MAX_BACKLOG_AGE
	operating   chan struct{} // holds a token while a request changes many tasks
	listing     chan struct{} // holds a token for each list of all names that is read
}

// hints is what the gateway knows of the stream. Neither publish nor up blocks.
type hints struct {
	publish func([]entry) // adds entries for committed tasks that are due; keeps the slice
	up      func() bool   // whether the stream is believed to be reachable

	// depth sums up the streams of the queues, and readers counts the workers of each. Both cost
	// one round trip.
	depth   func(ctx context.Context, queues []string) (streamDepth, error)
	readers func(ctx context.Context, queues []string) (map[string]int, error)
}

// routes is a ServeMux that knows its patterns.
type routes struct {
	http.ServeMux
	patterns []string
}

// HandleFunc is for use before the first request.
func (m *routes) HandleFunc(pattern string, handler http.HandlerFunc) {
	m.patterns = append(m.patterns, pattern)
	m.ServeMux.HandleFunc(pattern, handler)
}

// newServer returns a gateway that serves nothing before run is called.
func newServer(log *slog.Logger, cfg config, p *pools, handlers *handlerTable, h hints, m *metrics) *server {
	s := &server{
		log:         log,
		cfg:         cfg,
		pools:       p,
		handlers:    handlers,
		hints:       h,
		limits:      limits{maxTimeout: cfg.MaxTaskTimeout, queues: queueNames(cfg, handlers)},
		keys:        newAPIKeys(cfg),
		crossOrigin: http.NewCrossOriginProtection(),
		mux:         new(routes),
		intake:      newIntake(log, p, h, m),
		metrics:     m,
		bodies:      semaphore.NewWeighted(bodyMemory - bodyTurn),
		bodyTurn:    semaphore.NewWeighted(1),
		operating:   make(chan struct{}, 1),
		listing:     make(chan struct{}, max(1, p.api.Config().MaxConns/2)),
	}
	s.lobby = newLobby(p.api, s.noteRead)
	s.feed = newFeed(p.api, s.noteRead)
	s.census = newCensus(log, p, h, s.knownQueues(), s.checkRecord)
	m.registry.MustRegister(censusMetrics{s.census})
	if cfg.Gateway { // a worker alone answers probes and scrapes only, and so needs no API keys
		s.mux.HandleFunc("POST /tasks", s.submit)
		s.mux.HandleFunc("POST "+batchPath, s.submitBatch)
		s.mux.HandleFunc("POST /tasks/{$}", redirect("/tasks"))
		s.mux.HandleFunc("GET /tasks", s.listTasks)
		s.mux.HandleFunc("GET /tasks/{$}", redirect("/tasks"))
		s.mux.HandleFunc("GET /tasks/{task_id}", s.showTask)
		s.mux.HandleFunc("GET /tasks/{task_id}/events", s.taskEvents)
		s.mux.HandleFunc("GET /events", s.allEvents)
		s.mux.HandleFunc("GET /stats", s.stats)
		s.mux.HandleFunc("POST /tasks/{task_id}/cancel", s.cancelTask)
		s.mux.HandleFunc("POST /tasks/{task_id}/retry", s.retryTask)
		s.mux.HandleFunc("POST "+cancelPath, s.cancelTasks)
		s.mux.HandleFunc("POST "+retryPath, s.retryTasks)
		s.mux.HandleFunc("GET /queues", s.listQueues)
		s.mux.HandleFunc("POST /queues/{queue}/pause", s.pauseQueue)
		s.mux.HandleFunc("POST /queues/{queue}/resume", s.resumeQueue)
		for _, d := range documents {
			s.mux.HandleFunc("GET "+d.path, serveDocument(d.mediaType, d.text))
		}
		s.mux.HandleFunc("GET /docs/{$}", redirect("/docs"))
		s.mux.HandleFunc("GET /redoc", redirect("/docs"))
	}
	s.mux.HandleFunc("GET /health", s.health)
	s.mux.HandleFunc("GET /healthz", s.health)
	s.mux.HandleFunc("GET /livez", s.health)
	s.mux.HandleFunc("GET /readyz", s.readyz)
	s.mux.HandleFunc("GET /metrics", s.showMetrics)
	return s
}

// queueNames lists the queues that a submitter may name.
func queueNames(cfg config, handlers *handlerTable) []string {
	names := handlers.queues()
	for _, q := range cfg.Queues {
		names = append(names, q.name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (s *server) handler() http.Handler { return s }

// httpServer returns a server for the API whose limits a slow or hostile client cannot
// outstay. Its context is not the process': a signal must not abort requests.
func (s *server) httpServer() *http.Server {
	return &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       15 * time.Second,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(errorLog{s.log}, "", 0),
	}
}

// run stores what requests submit until ctx ends, then what was submitted before, and
// returns nil; beside that it looks for what other requests wait for. End ctx after the HTTP
// server has drained: a request that comes later waits out its limit and gets 503.
func (s *server) run(ctx context.Context) error {
	defer s.census.close()
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { s.lobby.run(ctx) })
	beside.Go(func() { s.feed.run(ctx) })
	if s.cfg.MaxBacklogAge > 0 {
		beside.Go(func() { s.watchBacklog(ctx) })
	}
	return s.intake.run(ctx)
}

// drain makes readiness fail from now on, so that no new client is sent here, and ends all
// waits: long polls are answered with what is so now, and streams end.
func (s *server) drain() {
	s.draining.Store(true)
	s.lobby.close()
}

// changed tells those who wait that this process has changed a task. It costs next to
// nothing while nobody does.
func (s *server) changed(id uuid.UUID) {
	s.lobby.hint(id)
	s.feed.hint(id)
}

// watchBacklog asks once a second whether tasks wait too long. A question that is not
// answered leaves the gate open: the record being away has an answer of its own.
func (s *server) watchBacklog(ctx context.Context) {
	for {
		ask, cancel := context.WithTimeout(ctx, time.Second)
		ms, err := db.New(s.pools.api).BacklogAge(ask)
		cancel()
		s.backlogged.Store(err == nil && time.Duration(ms)*time.Millisecond > s.cfg.MaxBacklogAge)
		if !sleep(ctx, time.Second) {
			return
		}
	}
}

// showTask answers GET /tasks/{task_id}, at once or after the wait that is asked for. A failed
// task is a 200: the request for its state succeeded.
func (s *server) showTask(w http.ResponseWriter, r *http.Request) {
	given := r.PathValue("task_id")
	id, ok := taskID(given)
	if !ok {
		s.fail(w, r, taskNotFound(given))
		return
	}
	wait, err := requestedWait(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	t, waited, err := s.currentTask(w, r, id, wait)
	if errors.Is(err, pgx.ErrNoRows) {
		s.fail(w, r, taskNotFound(given))
		return
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	tag := etag(&t)
	h := w.Header()
	h.Set("Cache-Control", "private, no-cache")
	h.Set("ETag", tag)
	if waited {
		h.Set("Retry-After", "1")
	} else if !terminal(t.Status) {
		h.Set("Retry-After", retryAfterSeconds(&t))
	}
	if matches(r.Header.Values("If-None-Match"), tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	writeBody(w, http.StatusOK, "application/json", appendTask(nil, &t))
}

// read asks PostgreSQL something within readLimit, and notes whether it serves. A connection
// that broke, as all do when PostgreSQL restarts, is replaced once: reading twice harms nothing.
func read[T any](ctx context.Context, s *server, ask func(context.Context, *db.Queries) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	q := db.New(s.pools.api)
	t, err := ask(ctx, q)
	if broken(err) && ctx.Err() == nil {
		s.pools.api.Reset()
		t, err = ask(ctx, q)
	}
	if !timedOut(err) && !errors.Is(err, pgx.ErrNoRows) {
		s.noteRead(err)
	}
	return t, err
}

// readTask reads a task, whole.
func (s *server) readTask(ctx context.Context, id uuid.UUID) (db.Task, error) {
	return read(ctx, s, func(ctx context.Context, q *db.Queries) (db.Task, error) { return q.GetTask(ctx, id) })
}

// taskID reads an id in its canonical form, in either case. What else uuid.Parse
// accepts is not an id of ours, and must not reach SQL.
func taskID(text string) (id uuid.UUID, ok bool) {
	if len(text) != 36 {
		return id, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

func taskNotFound(id string) *httpError {
	return &httpError{status: http.StatusNotFound, detail: "Task '" + shown(id) + "' not found."}
}

// shown returns the beginning of a path value as an error may repeat it.
func shown(value string) string {
	return strings.ToValidUTF8(value[:min(len(value), 64)], "\uFFFD")
}

func terminal(status string) bool {
	return status == statusCompleted || status == statusFailed || status == statusCancelled
}
