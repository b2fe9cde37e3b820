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
)

const (
	// maxPooledBody is the largest buffer that is kept for the next request: a few large
	// bodies must not occupy memory for ever.
	maxPooledBody = 64 << 10

	// bodyMemory is what all larger bodies may hold at a time, in bytes as sent; with copies and
	// the statement that stores them that is some four times as much memory.
	bodyMemory = 32 << 20
)

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

// reserve waits until there is memory for the body of r, of at most limit bytes, beside those
// of other requests, for slotLimit at most, and returns what gives it back, which may be
// called twice. A small body need not wait. Without this some dozens of large batches at
// once would be the end of a small container.
func (s *server) reserve(r *http.Request, limit int64) (release func(), err error) {
	n := r.ContentLength
	if n < 0 {
		n = limit // nobody knows
	}
	if n <= maxPooledBody || n > limit {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), slotLimit)
	defer cancel()
	if s.bodies.Acquire(ctx, n) != nil {
		return nil, errUnavailable
	}
	return sync.OnceFunc(func() { s.bodies.Release(n) }), nil
}

// readBody reads a body of at most limit bytes, however it is framed.
func readBody(buf *bytes.Buffer, w http.ResponseWriter, r *http.Request, limit int64) error {
	_, err := io.Copy(buf, http.MaxBytesReader(w, r.Body, limit))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return tooLarge(limit)
	}
	if err != nil {
		return errBodyUnread
	}
	return nil
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
