package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	// timeLayout shows times as the original did: always six digits, so that texts sort as
	// times do, and what POST said is byte for byte what GET says.
	timeLayout = "2006-01-02T15:04:05.000000-07:00"

	// readLimit bounds a status read, waiting for a connection included. As with submitLimit,
	// PostgreSQL gives up first.
	readLimit = statementTimeout + time.Second

	retryAfterCap = 30 * time.Second // a client is never told to stay away longer
)

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
	ready       readiness
	draining    atomic.Bool
	backlogged  atomic.Bool   // the oldest due task waits longer than MAX_BACKLOG_AGE
	operating   chan struct{} // holds a token while a request changes many tasks
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
		operating:   make(chan struct{}, 1),
	}
	s.lobby = newLobby(p.api, s.intake.note)
	s.feed = newFeed(p.api, s.intake.note)
	s.census = newCensus(log, p, h, s.knownQueues(), s.checkRecord)
	m.registry.MustRegister(censusMetrics{s.census})
	if cfg.Gateway { // a worker alone answers probes and scrapes only, and so needs no API keys
		s.mux.HandleFunc("POST /tasks", s.submit)
		s.mux.HandleFunc("POST "+batchPath, s.submitBatch)
		s.mux.HandleFunc("POST /tasks/{$}", redirect("/tasks"))
		s.mux.HandleFunc("GET /tasks", s.listTasks)
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
		s.intake.note(err)
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

// etag names a state of a task. Every transition that shows moves updated_at.
func etag(t *db.Task) string {
	b := make([]byte, 0, 48)
	b = append(b, '"')
	b = append(b, t.Status...)
	b = append(b, '-')
	b = strconv.AppendInt(b, int64(t.RetryCount), 10)
	b = append(b, '-')
	b = strconv.AppendInt(b, t.UpdatedAt.UnixMicro(), 16)
	return string(append(b, '"'))
}

// matches reports whether an If-None-Match header names tag. The comparison is the weak
// one, as RFC 9110 section 13.1.2 asks for: proxies that compress mark tags as weak.
func matches(values []string, tag string) bool {
	for _, value := range values {
		for given := range strings.SplitSeq(value, ",") {
			given = strings.TrimSpace(given)
			if given == "*" || strings.TrimPrefix(given, "W/") == tag {
				return true
			}
		}
	}
	return false
}

// retryAfterSeconds tells when asking for a task again may be worth it: at once, or when
// one that waits is due.
func retryAfterSeconds(t *db.Task) string {
	wait := time.Second
	if t.Status == statusPending {
		wait = min(max(time.Until(t.RunAt), wait), retryAfterCap)
	}
	return strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10)
}

// appendTask appends the representation of a task: the original's members in its order,
// then ours.
func appendTask(b []byte, t *db.Task) []byte {
	b = appendHead(b, t)
	b = appendJSON(append(b, `,"payload":`...), t.Payload)
	b = appendJSON(append(b, `,"result":`...), t.Result)
	return append(appendState(b, t), '}')
}

// appendSummary is appendTask without payload and result.
func appendSummary(b []byte, t *db.Task) []byte {
	return append(appendState(appendHead(b, t), t), '}')
}

// appendHead appends the members of a task that come before its payload.
func appendHead(b []byte, t *db.Task) []byte {
	b = append(b, `{"task_id":"`...)
	b = append(b, t.TaskID.String()...)
	b = appendString(append(b, `","name":`...), t.Name)
	return appendString(append(b, `,"status":`...), t.Status)
}

// appendState appends the members of a task that come after its result.
func appendState(b []byte, t *db.Task) []byte {
	b = strconv.AppendInt(append(b, `,"retry_count":`...), int64(t.RetryCount), 10)
	b = strconv.AppendInt(append(b, `,"max_retries":`...), int64(t.MaxRetries), 10)
	b = appendText(append(b, `,"error_message":`...), t.ErrorMessage)
	b = appendTime(append(b, `,"created_at":`...), &t.CreatedAt)
	b = appendTime(append(b, `,"updated_at":`...), &t.UpdatedAt)
	b = appendText(append(b, `,"idempotency_key":`...), t.IdempotencyKey)
	b = appendString(append(b, `,"queue":`...), t.Queue)
	b = appendTime(append(b, `,"run_at":`...), &t.RunAt)
	b = appendTime(append(b, `,"next_retry_at":`...), nextRetry(t))
	b = appendTime(append(b, `,"started_at":`...), t.StartedAt)
	b = appendTime(append(b, `,"finished_at":`...), t.FinishedAt)
	b = append(b, `,"timeout_ms":`...)
	if t.TimeoutMS != nil {
		b = strconv.AppendInt(b, *t.TimeoutMS, 10)
	} else {
		b = append(b, "null"...)
	}
	b = strconv.AppendBool(append(b, `,"cancel_requested":`...), t.CancelRequested)
	b = strconv.AppendInt(append(b, `,"attempt":`...), int64(t.Attempt), 10)
	b = strconv.AppendInt(append(b, `,"lost_count":`...), int64(t.LostCount), 10)
	return appendAttempts(append(b, `,"attempts":`...), t.Attempts)
}

// nextRetry returns when a task that waits after a failure runs again. A task given back by a
// worker that stopped or died has a retry_count as well, but is due since that moment.
// The answer must not depend on the time of day, or the ETag would lie.
func nextRetry(t *db.Task) *time.Time {
	if t.Status == statusPending && t.RetryCount > 0 && t.RunAt.After(t.UpdatedAt) {
		return &t.RunAt
	}
	return nil
}

// appendAttempts appends the ledger, its members in the documented order: jsonb
// orders them by length.
func appendAttempts(b []byte, ledger json.RawMessage) []byte {
	if string(ledger) == "[]" {
		return append(b, ledger...)
	}
	var attempts []struct {
		Attempt    json.RawMessage `json:"attempt"`
		Worker     json.RawMessage `json:"worker"`
		StartedAt  json.RawMessage `json:"started_at"`
		FinishedAt json.RawMessage `json:"finished_at"`
		Outcome    json.RawMessage `json:"outcome"`
		Error      json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(ledger, &attempts); err != nil {
		return appendJSON(b, ledger) // a row that somebody wrote by hand
	}
	b = append(b, '[')
	for i, a := range attempts {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendJSON(append(b, `{"attempt":`...), a.Attempt)
		b = appendJSON(append(b, `,"worker":`...), a.Worker)
		b = appendJSON(append(b, `,"started_at":`...), a.StartedAt)
		b = appendJSON(append(b, `,"finished_at":`...), a.FinishedAt)
		b = appendJSON(append(b, `,"outcome":`...), a.Outcome)
		b = appendJSON(append(b, `,"error":`...), a.Error)
		b = append(b, '}')
	}
	return append(b, ']')
}

// appendJSON appends JSON as it is but for white space, which jsonb adds; nothing as null. It
// never decodes: numbers keep every digit.
func appendJSON(b []byte, raw json.RawMessage) []byte {
	if len(raw) == 0 {
		return append(b, "null"...)
	}
	buf := bytes.NewBuffer(b)
	if err := json.Compact(buf, raw); err != nil {
		// Nested deeper than encoding/json goes, which only SQL can have stored.
		return append(b, raw...)
	}
	return buf.Bytes()
}

func appendTime(b []byte, t *time.Time) []byte {
	if t == nil {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = t.UTC().AppendFormat(b, timeLayout)
	return append(b, '"')
}

func appendText(b []byte, s *string) []byte {
	if s == nil {
		return append(b, "null"...)
	}
	return appendString(b, *s)
}

// appendString appends s as a JSON string, which json.Marshal would escape for HTML.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s { // bytes that are not UTF-8 come as U+FFFD
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, '\\', 'n')
		case r == '\r':
			b = append(b, '\\', 'r')
		case r == '\t':
			b = append(b, '\\', 't')
		case r < 0x20:
			b = append(b, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}
