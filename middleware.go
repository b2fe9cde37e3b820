package main

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Header values that answers share, as each of its own would cost an allocation. They stay as
// they are: Header.Set and Header.Add replace a value, and do not write into it.
var (
	nosniff   = []string{"nosniff"}
	noStore   = []string{"no-store"}
	inASecond = []string{"1"}
)

// ServeHTTP is what every request passes: it gives it an id, finds its route, checks
// key and origin, turns a panic into an answer and writes the one log line. The
// checks come in a fixed order: an unknown path is 404 to a
// caller without a key as well.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	sw := &statusWriter{ResponseWriter: w}
	h := w.Header()
	id := requestID(r)
	h["X-Request-Id"] = []string{id}
	h["X-Content-Type-Options"] = nosniff
	h["Cache-Control"] = noStore
	next, pattern := s.find(r)
	defer func() {
		thrown := recover()
		if thrown != nil && thrown != http.ErrAbortHandler {
			s.log.Error("panic in request", "route", route(pattern), "request_id", id, "err", thrown, "stack", string(debug.Stack()))
			if sw.status == 0 {
				writeProblem(sw, r, errInternal)
				thrown = nil
			}
		}
		took := time.Since(start)
		s.metrics.request(knownMethod(r.Method), route(pattern), sw.status, took)
		s.logRequest(r, pattern, sw.status, id, took)
		if thrown != nil {
			// The answer has begun: only cutting the connection tells the client that it is not whole.
			panic(http.ErrAbortHandler)
		}
	}()
	if pattern == "" {
		unmatched(sw, r, next)
		return
	}
	if err := s.admit(r, pattern); err != nil {
		s.fail(sw, r, err)
		return
	}
	if !strings.Contains(pattern, "{") {
		r.Pattern = pattern
		next.ServeHTTP(sw, r)
		return
	}
	s.mux.ServeHTTP(sw, r) // which matches again: only it sets the values of the path
}

// find returns what answers a request and its pattern, which is empty if the path or the
// method is unknown. The mux alone would take batch in GET /tasks/batch for a task's id,
// and name GET in the Allow of its other methods.
func (s *server) find(r *http.Request) (http.Handler, string) {
	switch r.URL.Path {
	case batchPath, cancelPath, retryPath:
		if r.Method == http.MethodPost || !s.cfg.Gateway {
			break
		}
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Allow", http.MethodPost)
			w.WriteHeader(http.StatusMethodNotAllowed)
		}), ""
	}
	return s.mux.Handler(r)
}

// admit refuses a request without the API key its route needs, and unsafe requests that
// a browser sends on behalf of another origin.
func (s *server) admit(r *http.Request, pattern string) error {
	if !open(pattern) {
		if err := s.keys.check(r); err != nil {
			return err
		}
	}
	if err := s.crossOrigin.Check(r); err != nil {
		return errCrossOrigin
	}
	return nil
}

// logRequest writes one line: never the payload, the key or a raw path.
func (s *server) logRequest(r *http.Request, pattern string, status int, id string, took time.Duration) {
	level := slog.LevelInfo
	if open(pattern) {
		level = slog.LevelDebug
	}
	s.log.LogAttrs(r.Context(), level, "request",
		slog.String("method", knownMethod(r.Method)),
		slog.String("route", route(pattern)),
		slog.Int("status", status),
		slog.Int64("took_us", took.Microseconds()),
		slog.String("request_id", id))
}

// open reports whether a route needs no API key: the probes and the metrics, whose callers have none, and
// the description of the API.
func open(pattern string) bool {
	switch route(pattern) {
	case "/health", "/healthz", "/livez", "/readyz", "/metrics", "/openapi.json", "/openapi.yaml", "/docs", "/docs/style.css", "/docs/{$}", "/redoc":
		return true
	}
	return false
}

// route returns the path of a pattern, or other for a request that matches none.
func route(pattern string) string {
	if pattern == "" {
		return "other"
	}
	return pattern[strings.IndexByte(pattern, ' ')+1:]
}

// knownMethod returns method, or other for one that HTTP does not name: callers may
// invent as many as they like.
func knownMethod(method string) string {
	switch method {
	case "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT":
		return method
	}
	return "other"
}

// requestID returns the client's X-Request-Id if it is harmless, else a fresh one.
func requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if len(id) < 1 || len(id) > 64 {
		return uuid.NewString()
	}
	for _, c := range []byte(id) {
		if !(c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c == '.' || c == '_' || c == '-') {
			return uuid.NewString()
		}
	}
	return id
}

// unmatched gives the mux's own answers to requests without a route, 404, 405 and
// redirects to a cleaned path, the form of all other errors. A catch-all route
// would do so more simply, but turns 405 into 404.
func unmatched(w http.ResponseWriter, r *http.Request, answer http.Handler) {
	rec := &headerRecorder{header: http.Header{}}
	answer.ServeHTTP(rec, r)
	switch rec.status {
	case http.StatusMethodNotAllowed:
		w.Header().Set("Allow", rec.header.Get("Allow"))
		detail := "The " + reflected(r.Method) + " method is not allowed here."
		writeProblem(w, r, &httpError{status: rec.status, detail: detail})
	case http.StatusNotFound:
		writeProblem(w, r, errNotFound)
	default:
		if to := rec.header.Get("Location"); to != "" {
			w.Header().Set("Location", to)
		}
		writeProblem(w, r, &httpError{status: rec.status, detail: http.StatusText(rec.status)})
	}
}

// headerRecorder keeps what a handler says about its answer and drops the body.
type headerRecorder struct {
	header http.Header
	status int
}

func (r *headerRecorder) Header() http.Header         { return r.header }
func (r *headerRecorder) Write(b []byte) (int, error) { return len(b), nil }
func (r *headerRecorder) WriteHeader(status int)      { r.status = status }

// statusWriter remembers the status for the log line. It is 0 until the answer begins.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// apiKeys are the SHA-256 sums of the keys that open the API. Without any, it is open.
type apiKeys struct {
	full, read [][sha256.Size]byte
}

func newAPIKeys(cfg config) apiKeys {
	var k apiKeys
	for _, key := range cfg.APIKeys {
		k.full = append(k.full, sha256.Sum256([]byte(key)))
	}
	for _, key := range cfg.ReadAPIKeys {
		k.read = append(k.read, sha256.Sum256([]byte(key)))
	}
	return k
}

// check returns why the request's key does not open its method, or nil. It compares sums
// with every key each time: neither the length of a key nor which one matched shows in
// the time it takes.
func (k apiKeys) check(r *http.Request) error {
	if len(k.full) == 0 && len(k.read) == 0 {
		return nil
	}
	scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return errNoKey
	}
	sum := sha256.Sum256([]byte(strings.TrimSpace(given)))
	full, read := 0, 0
	for i := range k.full {
		full |= subtle.ConstantTimeCompare(sum[:], k.full[i][:])
	}
	for i := range k.read {
		read |= subtle.ConstantTimeCompare(sum[:], k.read[i][:])
	}
	switch {
	case full == 1:
		return nil
	case read == 0:
		return errNoKey
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		return nil
	}
	return errReadOnlyKey
}

// errorLog passes what net/http has to say about connections on to the log: mishaps of
// clients at debug, because any client can cause as many as it likes.
type errorLog struct{ log *slog.Logger }

func (l errorLog) Write(line []byte) (int, error) {
	level := slog.LevelDebug
	text := strings.TrimSpace(string(line))
	if strings.HasPrefix(text, "http: Accept error") || strings.HasPrefix(text, "http: superfluous") || strings.Contains(text, "panic serving") {
		level = slog.LevelError
	}
	l.log.Log(context.Background(), level, "http server", "err", text)
	return len(line), nil
}
