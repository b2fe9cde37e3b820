package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// statusGone is what the log and the metrics say of a request whose client hung up before it
// could be answered: no fault of the service, which 503 would be. It is never sent.
const statusGone = 499

const (
	problemURN  = "urn:nexusflow:problem:"
	describedBy = `</docs#idempotency>; rel="describedby"; type="text/html"`

	// maxReflected is how much of a request target an error repeats, in bytes.
	maxReflected = 512

	// maxErrors is how many broken rules an answer lists: a batch can break thousands.
	maxErrors = 100
)

// A problem is an error as clients see it (RFC 9457). Type is empty where the status
// says it all.
type problem struct {
	Type      string      `json:"type"`
	Title     string      `json:"title"`
	Status    int         `json:"status"`
	Detail    string      `json:"detail"`
	Instance  string      `json:"instance"`
	RequestID string      `json:"request_id"`
	Errors    fieldErrors `json:"errors,omitempty"`
}

// An httpError is an answer that a handler decided on: the only error whose text reaches
// a client. name is the last part of the problem's type.
type httpError struct {
	status int
	name   string
	title  string
	detail string
	header [2]string // one more response header, if its name is not empty
	errs   fieldErrors
}

func (e *httpError) Error() string { return e.detail }

var (
	errKeyReused = &httpError{
		status: http.StatusUnprocessableEntity,
		name:   "idempotency-key-reused",
		title:  "Idempotency-Key is already used",
		detail: "This Idempotency-Key was already used with a different request. Use a new key for a new task.",
		header: [2]string{"Link", describedBy},
	}
	errBodyUnread = &httpError{
		status: http.StatusBadRequest,
		name:   "malformed-json",
		title:  "Request body is not valid JSON",
		detail: "The body ended early or could not be read.",
		header: [2]string{"Connection", "close"},
	}
	errBacklog = &httpError{
		status: http.StatusTooManyRequests,
		name:   "rate-limited",
		title:  "Too many tasks are waiting",
		detail: "Tasks are waiting longer than this service allows. Send the request again later, with the same key.",
		header: [2]string{"Retry-After", "5"},
	}
	errCrossOrigin = &httpError{
		status: http.StatusForbidden,
		name:   "cross-origin",
		title:  "Cross-origin request refused",
		detail: "Browsers may not send this request from another origin.",
	}
	errNoKey = &httpError{
		status: http.StatusUnauthorized,
		detail: "A valid API key is required: Authorization: Bearer <key>.",
		header: [2]string{"WWW-Authenticate", "Bearer"},
	}
	errReadOnlyKey = &httpError{status: http.StatusForbidden, detail: "This API key may only read."}
	errNotFound    = &httpError{status: http.StatusNotFound, detail: "Not Found"}
	errInternal    = &httpError{status: http.StatusInternalServerError, detail: "Internal error."}
	errUnavailable = &httpError{
		status: http.StatusServiceUnavailable,
		detail: "The service cannot answer now. Send the request again, with the same key.",
		header: [2]string{"Retry-After", "1"},
	}
)

// tooLarge refuses a body of more than limit bytes. The rest of it is not read, so the
// connection cannot be used again.
func tooLarge(limit int64) *httpError {
	return &httpError{
		status: http.StatusRequestEntityTooLarge,
		name:   "body-too-large",
		title:  "Request body is too large",
		detail: "The body is larger than " + strconv.FormatInt(limit, 10) + " bytes.",
		header: [2]string{"Connection", "close"},
	}
}

func invalidKey(detail string, errs fieldErrors) *httpError {
	return &httpError{
		status: http.StatusBadRequest,
		name:   "idempotency-key-invalid",
		title:  "Idempotency-Key is invalid",
		detail: detail,
		header: [2]string{"Link", describedBy},
		errs:   errs,
	}
}

// fail answers with the problem that err stands for. Whatever is not known to be the
// client's doing comes from the store and is 503: a request that stored nothing may
// be sent again.
func (s *server) fail(w http.ResponseWriter, r *http.Request, err error) {
	e, ok := errors.AsType[*httpError](err)
	if syntax, is := errors.AsType[*syntaxError](err); is {
		e = &httpError{
			status: http.StatusBadRequest,
			name:   "malformed-json",
			title:  "Request body is not valid JSON",
			detail: "The body is not valid JSON.",
			errs:   fieldErrors{{Type: "json_invalid", Loc: []any{"body", syntax.Offset}, Msg: "JSON decode error: " + syntax.Msg}},
		}
	} else if fields, is := errors.AsType[fieldErrors](err); is {
		e = &httpError{
			status: http.StatusUnprocessableEntity,
			name:   "validation",
			title:  "Request validation failed",
			detail: "The request body is invalid: see errors.",
			errs:   fields,
		}
		if fields[0].Loc[0] == "query" {
			e.detail = "The query is invalid: see errors."
		}
	} else if key, is := errors.AsType[*keyError](err); is {
		e = invalidKey(key.Error(), nil)
	} else if !ok {
		e = errUnavailable
	}
	if n := len(e.errs); n > maxErrors {
		cut := *e
		cut.errs = e.errs[:maxErrors]
		cut.detail += fmt.Sprintf(" They are %d, of which the first %d are listed.", n, maxErrors)
		e = &cut
	}
	writeProblem(w, r, e)
	if sw, ok := w.(*statusWriter); ok && errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		sw.status = statusGone
	}
}

// writeProblem sends e as application/problem+json.
func writeProblem(w http.ResponseWriter, r *http.Request, e *httpError) {
	h := w.Header()
	if e.header[0] != "" {
		h.Set(e.header[0], e.header[1])
	}
	p := problem{
		Type:      "about:blank",
		Title:     e.title,
		Status:    e.status,
		Detail:    e.detail,
		Instance:  reflected(r.URL.EscapedPath()),
		RequestID: h.Get("X-Request-Id"),
		Errors:    e.errs,
	}
	if e.name != "" {
		p.Type = problemURN + e.name
	}
	if p.Title == "" {
		p.Title = http.StatusText(e.status)
	}
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	// A problem holds strings and numbers only, which always encode.
	_ = enc.Encode(p)
	writeBody(w, e.status, "application/problem+json", []byte(strings.TrimSuffix(b.String(), "\n")))
}

// writeBody sends a whole answer. A client that has gone away is nobody's error.
func writeBody(w http.ResponseWriter, status int, mediaType string, body []byte) {
	h := w.Header()
	h["Content-Type"] = []string{mediaType}
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// reflected cuts text of a request down to what an error may repeat.
func reflected(text string) string {
	if len(text) > maxReflected {
		return text[:maxReflected]
	}
	return text
}
