package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// A queue is what the gateway stands before: a peer, or an implementation to compare with.
type queue interface {
	// enqueue stores a task and returns its id once the queue calls it stored.
	enqueue(ctx context.Context, name string, payload json.RawMessage) (id string, err error)
	// show returns the state of a task, or errUnknown.
	show(ctx context.Context, id string) (view, error)
	// close lets running tasks end.
	close()
}

var errUnknown = errors.New("no such task")

// view is a task as the gateway shows it.
type view struct {
	ID         string          `json:"task_id"`
	Name       string          `json:"name"`
	Status     string          `json:"status"`
	Payload    json.RawMessage `json:"payload"`
	Result     json.RawMessage `json:"result"`
	Retries    int             `json:"retry_count"`
	MaxRetries int             `json:"max_retries"`
	Error      string          `json:"error_message"`
}

// taskResult is what the no-op handlers of peers return where a result is kept.
const taskResult = `{"ok":true}`

// serveOptions say how a queue is served.
type serveOptions struct {
	addr     string
	database string
	redis    string
	redisDB  int
	workers  int  // 0 = only take tasks in
	bare     bool // the handlers keep no result, as when the queue is used without a gateway
}

// serve is the small service that a user would write around a queue: POST enqueues, GET
// tells state and result.
func serve(ctx context.Context, args []string) error {
	var o serveOptions
	fs := flag.NewFlagSet("bench serve", flag.ContinueOnError)
	fs.StringVar(&o.addr, "addr", "127.0.0.1:46080", "listen address")
	fs.StringVar(&o.database, "database", "", "PostgreSQL URL")
	fs.StringVar(&o.redis, "redis", "", "address of Redis")
	fs.IntVar(&o.redisDB, "redis-db", 0, "number of the Redis database")
	fs.IntVar(&o.workers, "workers", 0, "tasks run at once; 0 only takes them in")
	fs.BoolVar(&o.bare, "bare", false, "handlers keep no result")
	kind := fs.String("queue", "", "echo, insert, obvious, asynq or river")
	if err := fs.Parse(args); err != nil {
		return err
	}
	open := map[string]func(context.Context, serveOptions) (queue, error){
		"echo":    openEcho,
		"insert":  openInsert,
		"obvious": openObvious,
		"asynq":   openAsynq,
		"river":   openRiver,
	}[*kind]
	if open == nil {
		return fmt.Errorf("serve: no queue %q", *kind)
	}
	q, err := open(ctx, o)
	if err != nil {
		return fmt.Errorf("open %s: %w", *kind, err)
	}
	defer q.close()
	hs := &http.Server{Addr: o.addr, Handler: gateway(q), ReadHeaderTimeout: 5 * time.Second}
	done := make(chan error, 1)
	go func() { done <- hs.ListenAndServe() }()
	select {
	case err := <-done:
		return fmt.Errorf("serve http: %w", err)
	case <-ctx.Done():
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return hs.Shutdown(limited)
}

func gateway(q queue) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /tasks", func(w http.ResponseWriter, r *http.Request) {
		var request struct {
			Name    string          `json:"name"`
			Payload json.RawMessage `json:"payload"`
		}
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&request); err != nil || request.Name == "" {
			http.Error(w, `{"error":"bad request"}`, http.StatusBadRequest)
			return
		}
		id, err := q.enqueue(r.Context(), request.Name, request.Payload)
		if err != nil {
			fmt.Fprintf(os.Stderr, "enqueue: %v\n", err)
			http.Error(w, `{"error":"internal error"}`, http.StatusInternalServerError)
			return
		}
		answer(w, http.StatusAccepted, struct {
			ID     string `json:"task_id"`
			Name   string `json:"name"`
			Status string `json:"status"`
		}{id, request.Name, "accepted"})
	})
	mux.HandleFunc("GET /tasks/{id}", func(w http.ResponseWriter, r *http.Request) {
		task, err := q.show(r.Context(), r.PathValue("id"))
		if errors.Is(err, errUnknown) {
			http.Error(w, `{"error":"not found"}`, http.StatusNotFound)
			return
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "show: %v\n", err)
			http.Error(w, `{"error":"internal error"}`, http.StatusInternalServerError)
			return
		}
		answer(w, http.StatusOK, task)
	})
	return mux
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // an error means that the client is gone
}
