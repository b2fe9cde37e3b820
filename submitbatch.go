package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
)

// The paths of what is done to many tasks at once: of POST only.
const (
	batchPath  = "/tasks/batch"
	cancelPath = "/tasks/cancel"
	retryPath  = "/tasks/retry"
)

// submitBatch answers POST /tasks/batch. With 202 and 200 every item has a task that is
// committed in PostgreSQL; with any other answer nothing was created.
func (s *server) submitBatch(w http.ResponseWriter, r *http.Request) {
	memory := bodyLoan{from: s.bodies, turn: s.bodyTurn}
	defer memory.giveBack()
	tasks, err := s.readBatch(w, r, &memory)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	if s.backlogged.Load() {
		s.fail(w, r, errBacklog)
		return
	}
	// As with a single task, a client that hangs up aborts nothing.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), submitLimit)
	defer cancel()
	receipts, err := s.intake.submitAll(ctx, tasks)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	memory.giveBack() // almost: a slow reader of the answer holds up no other body
	writeBatch(w, tasks, receipts)
}

// writeBatch answers with a receipt for each item, in the order of the request.
func writeBatch(w http.ResponseWriter, tasks []*waiter, receipts []receipt) {
	size, accepted := 64, 0
	for i, o := range receipts {
		size += 180 + len(o.name) + len(tasks[i].sub.Key)
		if !o.replayed {
			accepted++
		}
	}
	b := append(make([]byte, 0, size), `{"tasks":[`...)
	for i := range receipts {
		if i > 0 {
			b = append(b, ',')
		}
		o := &receipts[i]
		b = appendReceipt(b, o.id.String(), o, tasks[i].sub.Key)
		b = strconv.AppendBool(append(b, `,"replayed":`...), o.replayed)
		b = append(b, '}')
	}
	b = strconv.AppendInt(append(b, `],"accepted":`...), int64(accepted), 10)
	b = strconv.AppendInt(append(b, `,"replayed":`...), int64(len(receipts)-accepted), 10)
	code := http.StatusAccepted
	if accepted == 0 {
		code = http.StatusOK
		w.Header().Set("Idempotent-Replayed", "true")
	} else {
		w.Header().Set("Retry-After", "1")
	}
	writeBody(w, code, "application/json", append(b, '}'))
}

// readBatch checks a request in the same order as readSubmission and returns its tasks.
func (s *server) readBatch(w http.ResponseWriter, r *http.Request, memory *bodyLoan) ([]*waiter, error) {
	key, err := readHead(r, maxBatchBytes)
	if err != nil {
		return nil, err
	}
	if len(key.key) > maxBatchKeyLen {
		return nil, &keyError{fmt.Sprintf("the idempotency key of a batch has at most %d characters", maxBatchKeyLen)}
	}
	subs, err := s.readItems(w, r, key, memory)
	if err != nil {
		return nil, err
	}
	trace := traceparent(r.Header.Get("Traceparent"))
	tasks := make([]*waiter, len(subs))
	for i, sub := range subs {
		h, _ := s.handlers.find(sub.Name)
		if tasks[i], err = prepare(sub, h, trace); err != nil {
			return nil, err
		}
	}
	return tasks, nil
}

// readItems reads the body. The submissions hold copies only.
func (s *server) readItems(w http.ResponseWriter, r *http.Request, key keyHeader, memory *bodyLoan) ([]submission, error) {
	buf := s.buffers.get()
	defer s.buffers.put(buf)
	if err := readBody(buf, w, r, maxBatchBytes, memory); err != nil {
		return nil, err
	}
	text := scanner{src: buf.String()}
	var b batchReader
	if !b.scan(&text) || !text.end() {
		return nil, text.err
	}
	return s.checkBatch(&b, key)
}

// A batchReader holds the items of a batch between scanning and checking.
type batchReader struct {
	items   []submitReader // the first maxBatchTasks of them
	count   int            // all of them
	kind    string         // of error that tells why there are none; "" = there are
	unknown []string       // names of other members, as they may be shown
}

// scan divides the body into its items. It reports false at a syntax error, which is in s.
func (b *batchReader) scan(s *scanner) bool {
	if s.next() != '{' {
		b.kind = "model_attributes_type"
		return s.value()
	}
	b.kind = "missing"
	return s.list('}', func() bool {
		if !s.member() {
			return false
		}
		name := s.name
		if s.escaped {
			name = unescapeAll(name)
		}
		if name != "tasks" {
			b.unknown = addUnknown(b.unknown, name)
			return s.value()
		}
		// Of several the last one counts, as with the members of an item.
		b.items, b.count, b.kind = b.items[:0], 0, ""
		if s.next() != '[' {
			b.kind = "list_type"
			return s.value()
		}
		return s.list(']', func() bool { return b.item(s) })
	})
}

// item reads one item. What exceeds the limit is counted only, or 8 MiB of "{},{}," would
// fill the memory.
func (b *batchReader) item(s *scanner) bool {
	b.count++
	if b.count > maxBatchTasks {
		return s.value()
	}
	b.items = append(b.items, submitReader{batched: true, index: b.count - 1})
	item := &b.items[b.count-1]
	s.next()
	start := s.pos
	ok := item.scan(s)
	item.size = s.pos - start
	return ok
}

// errors returns what is wrong with the batch, its items apart.
func (b *batchReader) errors() (errs fieldErrors) {
	tasks := []any{"body", "tasks"}
	switch {
	case b.kind == "model_attributes_type":
		errs = append(errs, fieldError{b.kind, tasks[:1], "Input should be an object"})
	case b.kind == "missing":
		errs = append(errs, fieldError{b.kind, tasks, "Field required"})
	case b.kind == "list_type":
		errs = append(errs, fieldError{b.kind, tasks, "Input should be a valid list"})
	case b.count == 0:
		errs = append(errs, fieldError{"too_short", tasks, "List should have at least 1 item"})
	case b.count > maxBatchTasks:
		errs = append(errs, fieldError{"too_long", tasks, fmt.Sprintf("List should have at most %d items, not %d", maxBatchTasks, b.count)})
	}
	for _, name := range b.unknown {
		errs = append(errs, fieldError{"extra_forbidden", []any{"body", name}, "Extra inputs are not permitted"})
	}
	return errs
}

// checkBatch returns the submissions of a batch whose header has the given key, or what
// is wrong with all of them. An item without a key of its own gets that of the header and
// its index, so that repeating the whole batch creates nothing anew.
func (s *server) checkBatch(b *batchReader, header keyHeader) ([]submission, error) {
	errs := b.errors()
	subs := make([]submission, len(b.items))
	for i := range b.items {
		item := &b.items[i]
		subs[i] = item.check(s.limits)
		if name := subs[i].Name; name != "" {
			if _, known := s.handlers.find(name); !known {
				item.errs = append(item.errs, s.unknownTask(item.loc("name")))
			}
		}
		errs = append(errs, item.errs...)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	for i := range subs {
		if header.key != "" {
			key := header.key + "[" + strconv.Itoa(i) + "]"
			if subs[i].Key == "" {
				subs[i].Key = key
			} else if subs[i].Key != key {
				subs[i].Displaced = key
			}
		}
		if err := b.items[i].seal(&subs[i], header.present); err != nil {
			errs = append(errs, fieldError{"value_error", b.items[i].loc("idempotency_key"), err.Error()})
		}
	}
	if len(errs) > 0 {
		return nil, invalidKey(errBlankKey.Error(), errs)
	}
	return subs, nil
}
