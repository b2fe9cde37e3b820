package main

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"nexusflow/db"
)

const (
	heartbeat      = 15 * time.Second
	streamPatience = 10 * time.Second
	streamRetry    = 2 * time.Second // after which a client whose stream ended connects again
	streamChunk    = 32 << 10        // what is collected before it is sent
	streamPage     = 256             // events that a stream takes from the feed at once
)

var errNoPlace = &httpError{
	status: http.StatusServiceUnavailable,
	name:   "overloaded",
	title:  "Too many requests are waiting",
	detail: "No further stream can be served now. Connect again later, or ask with GET.",
	header: [2]string{"Retry-After", "5"},
}

// An eventStream writes server-sent events. A client that does not read is given up
// after the lobby's patience: send then returns an error.
type eventStream struct {
	w        http.ResponseWriter
	control  *http.ResponseController
	patience time.Duration
}

// refuseStream answers a request for a stream for which there is no place.
func (s *server) refuseStream(w http.ResponseWriter, r *http.Request) {
	if s.draining.Load() {
		s.fail(w, r, errUnavailable)
		return
	}
	s.fail(w, r, errNoPlace)
}

// startStream begins the answer; end is to be called last.
func (s *server) startStream(w http.ResponseWriter) *eventStream {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("X-Accel-Buffering", "no") // nginx would collect events
	e := &eventStream{w, http.NewResponseController(w), s.lobby.patience}
	_ = e.control.SetReadDeadline(time.Time{}) // at ReadTimeout net/http takes the client for gone
	w.WriteHeader(http.StatusOK)
	return e
}

// end leaves net/http the time to tell the client that the answer is whole.
func (e *eventStream) end() { _ = e.control.SetWriteDeadline(time.Now().Add(e.patience)) }

// send writes b, if there is anything in it, and does not keep it back.
func (e *eventStream) send(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	_ = e.control.SetWriteDeadline(time.Now().Add(e.patience))
	if _, err := e.w.Write(b); err != nil {
		return err
	}
	return e.control.Flush()
}

// appendRetry appends the time after which a client connects again.
func appendRetry(b []byte) []byte {
	b = strconv.AppendInt(append(b, "retry: "...), streamRetry.Milliseconds(), 10)
	return append(b, '\n')
}

// appendEvent appends one event; data is JSON and so one line.
func appendEvent(b []byte, id, name string, data []byte) []byte {
	b = append(append(b, "id: "...), id...)
	b = append(append(b, "\nevent: "...), name...)
	b = append(append(b, "\ndata: "...), data...)
	return append(b, "\n\n"...)
}

// appendID tells the client where it is, without an event.
func appendID(b []byte, id string) []byte {
	return append(append(append(b, "id: "...), id...), "\n\n"...)
}

const gapEvent = "gap"

var (
	gapData     = []byte("{}")
	beatComment = []byte(": alive\n\n")
)

// taskEvents answers GET /tasks/{task_id}/events with the states of a task: at once with the
// present one, unless the client says in Last-Event-ID that it knows it, then with each that
// is seen, until the task has ended. A client that knows the end gets 204, after which
// an EventSource does not connect again.
func (s *server) taskEvents(w http.ResponseWriter, r *http.Request) {
	given := r.PathValue("task_id")
	id, ok := taskID(given)
	if !ok {
		s.fail(w, r, taskNotFound(given))
		return
	}
	if err := noQuery(r.URL); err != nil {
		s.fail(w, r, err)
		return
	}
	p := s.lobby.join(id, false)
	if p == nil {
		s.refuseStream(w, r)
		return
	}
	defer s.lobby.leave(p)
	t, err := s.readTask(r.Context(), id)
	if errors.Is(err, pgx.ErrNoRows) {
		s.fail(w, r, taskNotFound(given))
		return
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	known := strings.Trim(r.Header.Get("Last-Event-ID"), `"`)
	if terminal(t.Status) && known == eventTag(&t) {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	e := s.startStream(w)
	defer e.end()
	if r.Method == http.MethodHead {
		return
	}
	s.followTask(r, e, p, &t, known)
}

// followTask sends the states of the task at p from t on. It returns when the task has
// ended or was deleted, the client is gone, or the process drains.
func (s *server) followTask(r *http.Request, e *eventStream, p *place, t *db.Task, known string) {
	beat := time.NewTicker(s.lobby.beat)
	defer beat.Stop()
	b := append(appendRetry(nil), '\n')
	for {
		if tag := eventTag(t); tag != known {
			b = appendEvent(b, tag, t.Status, appendTask(nil, t))
			known = tag
		}
		if e.send(b) != nil || terminal(t.Status) {
			return
		}
		b = b[:0]
		s.lobby.saw(p, t)
		select {
		case <-p.changed:
			now, err := s.readTask(r.Context(), p.id)
			if errors.Is(err, pgx.ErrNoRows) {
				return
			}
			if err == nil { // else the next poll tells again
				t = &now
			}
		case <-beat.C:
			b = append(b, beatComment...)
		case <-s.lobby.closed:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// eventTag is the ETag of a task as an event id: without its quotes.
func eventTag(t *db.Task) string { return strings.Trim(etag(t), `"`) }

// allEvents answers GET /events with the changes of all tasks, or of those of one name
// or in some states, as the feed sees them. An event named gap says that some may
// be missing before it.
func (s *server) allEvents(w http.ResponseWriter, r *http.Request) {
	only, err := readEventFilter(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if !s.lobby.take() {
		s.refuseStream(w, r)
		return
	}
	defer s.lobby.free()
	s.feed.follow()
	defer s.feed.unfollow()
	if !s.feedReady(r) {
		s.fail(w, r, errUnavailable)
		return
	}
	number := s.feed.newest()
	first := appendRetry(nil)
	known := r.Header.Get("Last-Event-ID")
	if n, ours := s.feed.number(known); ours {
		number = n
		first = append(first, '\n')
	} else if known != "" { // another process' event
		first = appendEvent(first, s.feed.eventID(number), gapEvent, gapData)
	} else { // an id to come back with, should the stream break before the first event
		first = appendID(first, s.feed.eventID(number))
	}
	e := s.startStream(w)
	defer e.end()
	if r.Method == http.MethodHead {
		return
	}
	s.followAll(r, e, only, number, first)
}

// feedReady waits until the feed sees changes, for as long as a read may take.
func (s *server) feedReady(r *http.Request) bool {
	limit := time.NewTimer(readLimit)
	defer limit.Stop()
	for {
		p := s.feed.after(0, 0)
		if p.ready {
			return true
		}
		select {
		case <-p.grown:
		case <-limit.C:
			return false
		case <-s.lobby.closed:
			return false
		case <-r.Context().Done():
			return false
		}
	}
}

// followAll sends b, and then what passes the filter, from the event after that of the given
// number on. It returns when the client is gone or the process drains.
func (s *server) followAll(r *http.Request, e *eventStream, only eventFilter, number uint64, b []byte) {
	beat := time.NewTicker(s.lobby.beat)
	defer beat.Stop()
	for {
		p := s.feed.after(number, streamPage)
		if p.gap {
			b = appendEvent(b, s.feed.eventID(p.last-uint64(len(p.changes))), gapEvent, gapData)
		}
		for i, c := range p.changes {
			if only.passes(c) {
				b = appendEvent(b, s.feed.eventID(p.last-uint64(len(p.changes)-1-i)), c.status, c.data)
			}
			if len(b) >= streamChunk {
				if e.send(b) != nil {
					return
				}
				b = b[:0]
			}
		}
		if e.send(b) != nil {
			return
		}
		b, number = b[:0], p.last
		if len(p.changes) > 0 {
			continue
		}
		select {
		case <-p.grown:
		case <-beat.C:
			b = appendID(append(b, beatComment...), s.feed.eventID(number)) // past what did not pass the filter
		case <-s.lobby.closed:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// An eventFilter says which changes a stream shows; empty parts let all pass.
type eventFilter struct {
	name     *string
	statuses []string
}

func (f eventFilter) passes(c change) bool {
	return (f.name == nil || *f.name == c.name) && (f.statuses == nil || slices.Contains(f.statuses, c.status))
}

// readEventFilter reads the query of a stream.
func readEventFilter(r *http.Request) (eventFilter, error) {
	q := readQuery(r.URL.RawQuery)
	f := eventFilter{name: q.name(), statuses: q.statuses(statuses)}
	return f, q.end()
}
