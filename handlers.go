package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
)

// A handlerFunc does the work of one attempt. Its result is anything encoding/json
// can write; a json.RawMessage is passed on as it is, so that no digit of a number
// changes, and nil is null. An error is tried again after the back-off, unless
// permanent or retryAfter wraps it. ctx ends at the time-out, on cancellation and at
// shutdown; a function that returns then should return context.Cause(ctx), from
// which the worker tells these apart. It may be called again for a task that
// it has already done: delivery is at least once.
type handlerFunc func(ctx context.Context, t task) (any, error)

// A handler is what a worker does for one name, with every default filled in.
type handler struct {
	run        handlerFunc
	kind       string        // exec, url or go
	timeout    time.Duration // longest run of an attempt when the submitter names none
	maxRetries int32         // retries when the submitter names none
	backoff    backoff
	queue      string // where a task goes when the submitter names no queue
}

// anyName is the entry that serves every name without one of its own.
const anyName = "*"

// goHandlers are the functions that a handlers file can name with {"go": "..."}.
// This is the place for a function of your own: add it here and name it in
// the file, or leave the file out and call handle.
func goHandlers() map[string]handlerFunc {
	return map[string]handlerFunc{
		"demo": demo,
		"fail": fail,
		"noop": noop,
	}
}

// demo stands for work that takes a moment and succeeds.
func demo(ctx context.Context, t task) (any, error) {
	if !sleep(ctx, 100*time.Millisecond) {
		return nil, context.Cause(ctx)
	}
	return struct {
		Processed bool   `json:"processed"`
		Name      string `json:"name"`
	}{true, t.Name}, nil
}

// errSimulated is how the demonstration set fails.
//
//lint:ignore ST1005 these are the words of the original
var errSimulated = errors.New("Simulated failure for testing")

// fail stands for work that never succeeds.
func fail(context.Context, task) (any, error) { return nil, errSimulated }

// noop returns the payload at once: what is left is the cost of the service itself.
func noop(_ context.Context, t task) (any, error) { return t.Payload, nil }

// A handlerTable finds the handler of a task name. It is complete before the parts
// that read it start, and never changes after that.
type handlerTable struct {
	byName   map[string]*handler
	named    []string // the queues that the file names, sorted
	defaults handler  // what an entry has that says nothing else
}

// loadHandlers reads cfg.HandlersFile, or returns the demonstration set when there is
// none. The error lists every problem of the file at once, one to a line. A
// process that runs no commands leaves checkExecutables out, because its
// machine need not have them. log gets a line that says which
// it is, and one for each entry whose queue this worker does not read.
func loadHandlers(cfg config, checkExecutables bool, log *slog.Logger) (*handlerTable, error) {
	t := newHandlerTable(cfg)
	if cfg.HandlersFile == "" {
		t.handle(anyName, demo)
		t.handle("fail_task", fail)
		log.Info("no handlers file, the demonstration set is used")
		return t, nil
	}
	if err := t.readFile(cfg, checkExecutables); err != nil {
		return nil, err
	}
	log.Info("handlers file read", "path", cfg.HandlersFile, "handlers", len(t.byName))
	if cfg.Worker {
		t.warnUnreadQueues(cfg, log)
	}
	return t, nil
}

func newHandlerTable(cfg config) *handlerTable {
	return &handlerTable{
		byName: map[string]*handler{},
		defaults: handler{
			kind:       "go",
			timeout:    cfg.TaskTimeout,
			maxRetries: int32(cfg.MaxRetries),
			backoff:    cfg.Backoff,
			queue:      defaultQueue,
		},
	}
}

// handle registers fn for name, with the process-wide defaults, in place of what
// the file says about it; the name "*" stands for all that have no entry. Call it
// between loadHandlers and the start of the parts.
func (t *handlerTable) handle(name string, fn handlerFunc) {
	h := t.defaults
	h.run = fn
	t.byName[name] = &h
}

// find returns the handler of name, or that of "*". With neither, it reports false:
// such a task can be refused on submission, and fails for good in a worker.
func (t *handlerTable) find(name string) (*handler, bool) {
	if h, ok := t.byName[name]; ok {
		return h, true
	}
	h, ok := t.byName[anyName]
	return h, ok
}

// names returns the names that have an entry of their own, sorted.
func (t *handlerTable) names() []string {
	names := slices.Sorted(maps.Keys(t.byName))
	return slices.DeleteFunc(names, func(s string) bool { return s == anyName })
}

// open reports whether every name has a handler.
func (t *handlerTable) open() bool {
	_, ok := t.byName[anyName]
	return ok
}

// queues returns the queues that the file names, sorted. The default queue is among
// them only when an entry names it.
func (t *handlerTable) queues() []string { return slices.Clone(t.named) }

func (t *handlerTable) warnUnreadQueues(cfg config, log *slog.Logger) {
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		queue := t.byName[name].queue
		read := slices.ContainsFunc(cfg.Queues, func(q queueWeight) bool { return q.name == queue })
		if !read && slices.Contains(t.named, queue) {
			log.Warn("queue of a handler is not read by this worker", "name", name, "queue", queue)
		}
	}
}

// resultOf is the result that the output of a command or the body of an answer stands
// for: null when it is blank, the value itself when it is JSON, else the text without
// its last newline as {"output": text}. Bytes that are not UTF-8 become U+FFFD. Whether
// the value can be stored is for the worker to find out, as with every result.
func resultOf(data []byte) any {
	data = bytes.ToValidUTF8(data, []byte("\uFFFD"))
	trimmed := bytes.TrimSpace(data)
	if len(trimmed) == 0 {
		return nil
	}
	if json.Valid(trimmed) {
		return json.RawMessage(trimmed)
	}
	return struct {
		Output string `json:"output"`
	}{strings.TrimRight(string(data), "\r\n")}
}

// cleanText makes error text of bytes from outside: valid UTF-8, no NUL, no blanks at
// the ends, and of long text the last maxErrorBytes.
func cleanText(data []byte) string {
	s := strings.ToValidUTF8(strings.ReplaceAll(string(data), "\x00", ""), "\uFFFD")
	s = s[max(0, len(s)-maxErrorBytes):]
	return strings.TrimSpace(strings.ToValidUTF8(s, "")) // the cut may have halved a character
}
