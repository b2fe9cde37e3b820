package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"

	"golang.org/x/sync/semaphore"
)

const (
	// maxPooledBody is the largest buffer that is kept for the next request: a few large
	// bodies must not occupy memory for ever.
	maxPooledBody = 64 << 10

	// bodyMemory is what all bodies may hold at a time beyond their first maxPooledBody bytes, as
	// sent: with copies and the statement that stores them that is several times as much.
	bodyMemory = 32 << 20
	bodyStep   = 256 << 10     // in which they ask for it
	bodyTurn   = maxBatchBytes // of it, kept for one at a time that found no more
)

var errNoMemory = &httpError{
	status: http.StatusServiceUnavailable,
	detail: "Too many large bodies are on their way. Send the request again, with the same key.",
	header: [2]string{"Retry-After", "1"},
}

// bufferPool lends buffers for request bodies.
type bufferPool struct{ pool sync.Pool }

func (p *bufferPool) get() *bytes.Buffer {
	if b, ok := p.pool.Get().(*bytes.Buffer); ok {
		return b
	}
	return new(bytes.Buffer)
}

func (p *bufferPool) put(b *bytes.Buffer) {
	if b.Cap() <= maxPooledBody {
		b.Reset()
		p.pool.Put(b)
	}
}

// readHead checks what can be known before the body, of at most limit bytes, is read, and
// returns the key in the header.
func readHead(r *http.Request, limit int64) (keyHeader, error) {
	if err := checkMedia(r.Header); err != nil {
		return keyHeader{}, err
	}
	if r.ContentLength > limit {
		return keyHeader{}, tooLarge(limit)
	}
	return parseKeyHeader(r.Header.Values("Idempotency-Key"))
}

// A bodyLoan is memory that one request body holds of what there is for large ones.
type bodyLoan struct {
	from *semaphore.Weighted // bodyMemory without bodyTurn
	turn *semaphore.Weighted // 1 for whoever may use bodyTurn
	held int64
	last bool // has the turn
}

// grow takes n bytes more. When there are none the body waits for its turn, for slotLimit at
// most, and then has room to its end: of many that hold a part each, one always
// gets on. It fails with errNoMemory.
func (l *bodyLoan) grow(ctx context.Context, n int64) error {
	if l.last {
		return nil
	}
	if l.from.TryAcquire(n) {
		l.held += n
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, slotLimit)
	defer cancel()
	if l.turn.Acquire(ctx, 1) != nil {
		return errNoMemory
	}
	l.last = true
	return nil
}

// giveBack may be called twice. Nothing may refer to the body any more.
func (l *bodyLoan) giveBack() {
	if l.held > 0 {
		l.from.Release(l.held)
		l.held = 0
	}
	if l.last {
		l.turn.Release(1)
		l.last = false
	}
}

// readBody reads a body of at most limit bytes, however it is framed. What is beyond a small one
// is borrowed as it arrives: who only announces much holds nothing. Without that some dozens
// of large batches at once would be the end of a small container.
func readBody(buf *bytes.Buffer, w http.ResponseWriter, r *http.Request, limit int64, loan *bodyLoan) error {
	body := r.Body
	if r.ContentLength < 0 { // else readHead has compared it, and net/http ends the body there
		body = http.MaxBytesReader(w, r.Body, limit)
	}
	for room := maxPooledBody; ; {
		if buf.Available() == 0 {
			buf.Grow(bytes.MinRead)
		}
		free := buf.AvailableBuffer()
		n, err := body.Read(free[:min(cap(free), room)])
		buf.Write(free[:n]) // which moves the end only
		if room -= n; err == io.EOF {
			return nil
		}
		if _, large := errors.AsType[*http.MaxBytesError](err); large {
			return tooLarge(limit)
		}
		if err != nil {
			return errBodyUnread
		}
		if room == 0 {
			if err := loan.grow(r.Context(), bodyStep); err != nil {
				return err
			}
			room = bodyStep
		}
	}
}

// checkMedia refuses bodies that do not say they are JSON, which also keeps out the
// requests that a browser sends across origins without asking, and
// compressed ones, which may be bombs.
func checkMedia(h http.Header) error {
	types := h.Values("Content-Type")
	if len(types) != 1 || !isJSON(types[0]) {
		return unsupported("The Content-Type must be application/json in UTF-8.", "Accept-Post", "application/json")
	}
	for _, coding := range h.Values("Content-Encoding") {
		if coding != "" && !strings.EqualFold(coding, "identity") {
			return unsupported("The body must not be compressed.", "Accept-Encoding", "identity")
		}
	}
	return nil
}

func isJSON(contentType string) bool {
	if contentType == "application/json" {
		return true
	}
	media, params, err := mime.ParseMediaType(contentType)
	if err != nil {
		return false
	}
	if charset, given := params["charset"]; given && !strings.EqualFold(charset, "utf-8") {
		return false
	}
	subtype, ok := strings.CutPrefix(media, "application/")
	return ok && (subtype == "json" || strings.HasSuffix(subtype, "+json"))
}

func unsupported(detail, header, value string) *httpError {
	return &httpError{
		status: http.StatusUnsupportedMediaType,
		name:   "unsupported-media-type",
		title:  "Unsupported media type",
		detail: detail,
		header: [2]string{header, value},
	}
}
