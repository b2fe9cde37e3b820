package main

import (
	"cmp"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"nexusflow/db"
)

var errUnstorable = fieldErrors{{Type: "json_unstorable", Loc: []any{"body"}, Msg: "Input holds data that cannot be stored"}}

// submit answers POST /tasks. 202 and 200 mean that the task is committed in PostgreSQL;
// nothing else has to be up.
func (s *server) submit(w http.ResponseWriter, r *http.Request) {
	memory := bodyLoan{from: s.bodies, turn: s.bodyTurn}
	defer memory.giveBack()
	sub, err := s.readSubmission(w, r, &memory)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	h, ok := s.handlers.find(sub.Name)
	if !ok {
		s.metrics.invalid.Inc()
		s.fail(w, r, fieldErrors{s.unknownTask([]any{"body", "name"})})
		return
	}
	if s.backlogged.Load() {
		s.fail(w, r, errBacklog)
		return
	}
	task, err := prepare(sub, h, traceparent(r.Header.Get("Traceparent")))
	if err != nil {
		s.fail(w, r, err)
		return
	}
	o := s.intake.submit(task)
	if o.err != nil {
		s.fail(w, r, o.err)
		return
	}
	// Name and key are part of the body, which may be large: who waits for the end of the task
	// must not hold it.
	o.name = strings.Clone(o.name)
	key := strings.Clone(sub.Key)
	memory.giveBack()
	writeAccepted(w, o, key, s.awaitAccepted(w, r, o.id))
}

// refuse answers a submission that could not be read.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if err != errNoMemory {
		s.metrics.invalid.Inc()
	}
	s.fail(w, r, err)
}

// prepare returns the task that is to be stored for a submission: with an id, and with
// what its handler says where the submission is silent.
func prepare(sub submission, h *handler, traceparent string) (*waiter, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	task := &waiter{
		id:          id,
		sub:         sub,
		queue:       cmp.Or(sub.Queue, h.queue, defaultQueue),
		maxRetries:  h.maxRetries,
		traceparent: traceparent,
	}
	if sub.MaxRetries != nil {
		task.maxRetries = *sub.MaxRetries
	}
	return task, nil
}

// unknownTask returns the error for a name, at loc, without a handler: a typo must never
// become a dead task.
func (s *server) unknownTask(loc []any) fieldError {
	return fieldError{"unknown_task", loc, "There is no such task; known names: " + strings.Join(s.handlers.names(), ", ")}
}

// writeAccepted answers with the task as the original did. now is the task after a wait, else
// nil; what came of it follows when it has ended.
func writeAccepted(w http.ResponseWriter, o receipt, key string, now *db.Task) {
	if now != nil {
		o.status = now.Status
	}
	h := w.Header()
	id := o.id.String()
	h["Location"] = []string{"/tasks/" + id}
	code := http.StatusAccepted
	if o.replayed {
		code = http.StatusOK
		h.Set("Idempotent-Replayed", "true")
	} else if !terminal(o.status) {
		h["Retry-After"] = inASecond
	}
	b := make([]byte, 0, 160+len(o.name)+len(key))
	b = appendReceipt(b, id, &o, key)
	if now != nil && terminal(now.Status) {
		b = appendJSON(append(b, `,"result":`...), now.Result)
		b = appendText(append(b, `,"error_message":`...), now.ErrorMessage)
	}
	writeBody(w, code, "application/json", append(b, '}'))
}

// appendReceipt appends the original's five members, of which status is "accepted" for a new
// task and the current one for a replay, and leaves the object open.
func appendReceipt(b []byte, id string, o *receipt, key string) []byte {
	b = append(append(b, `{"task_id":"`...), id...)
	b = appendString(append(b, `","name":`...), o.name)
	b = appendString(append(b, `,"status":`...), cmp.Or(o.status, "accepted"))
	b = appendTime(append(b, `,"accepted_at":`...), &o.created)
	b = append(b, `,"idempotency_key":`...)
	if key == "" {
		return append(b, "null"...)
	}
	return appendString(b, key)
}

// readSubmission checks a request in a fixed order, so that of several errors
// a client always sees the same one.
func (s *server) readSubmission(w http.ResponseWriter, r *http.Request, memory *bodyLoan) (submission, error) {
	key, err := readHead(r, maxBodyBytes)
	if err != nil {
		return submission{}, err
	}
	buf := s.buffers.get()
	defer s.buffers.put(buf)
	if err := readBody(buf, w, r, maxBodyBytes, memory); err != nil {
		return submission{}, err
	}
	// The submission holds copies only, so the buffer may go back.
	return parseSubmission(buf.Bytes(), key, s.limits)
}

// traceparent returns a W3C trace context if it is well-formed, else "": tracing is never
// a reason to refuse a task.
func traceparent(text string) string {
	if len(text) != 55 || text[2] != '-' || text[35] != '-' || text[52] != '-' {
		return ""
	}
	version, trace, parent, flags := text[:2], text[3:35], text[36:52], text[53:]
	for _, part := range []string{version, trace, parent, flags} {
		if strings.Trim(part, "0123456789abcdef") != "" {
			return ""
		}
	}
	if version == "ff" || strings.Trim(trace, "0") == "" || strings.Trim(parent, "0") == "" {
		return ""
	}
	return text
}
