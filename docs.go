package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
)

// openapi.yaml is the contract of the API, written by hand; the command makes the JSON and
// the page of it.
//
//go:generate go run -C tools ./docs
var (
	//go:embed openapi.yaml
	openapiYAML []byte
	//go:embed ui/openapi.json
	openapiJSON []byte
	//go:embed ui/docs.html
	docsPage []byte
	//go:embed ui/style.css
	docsStyle []byte
)

// contentPolicy lets the page load its style sheet from here and nothing from anywhere else.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'"

// documents are the routes that describe the API. They need no key.
var documents = []struct {
	path, mediaType string
	text            []byte
}{
	{"/openapi.json", "application/json", openapiJSON},
	{"/openapi.yaml", "application/yaml", openapiYAML},
	{"/docs", "text/html; charset=utf-8", docsPage},
	{"/docs/style.css", "text/css; charset=utf-8", docsStyle},
}

// serveDocument returns a handler for a text that never changes while the process runs. It is
// compressed when somebody first asks for it so.
func serveDocument(mediaType string, text []byte) http.HandlerFunc {
	packed := sync.OnceValue(func() []byte { return compress(text) })
	sum := sha256.Sum256(text)
	tag := hex.EncodeToString(sum[:8])
	return func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-cache")
		h.Set("Vary", "Accept-Encoding")
		h.Set("Content-Security-Policy", contentPolicy)
		body, tag := text, `"`+tag+`"`
		if acceptsGzip(r.Header.Values("Accept-Encoding")) {
			body, tag = packed(), strings.TrimSuffix(tag, `"`)+`-gzip"`
			h.Set("Content-Encoding", "gzip")
		}
		h.Set("ETag", tag)
		if matches(r.Header.Values("If-None-Match"), tag) {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		writeBody(w, http.StatusOK, mediaType, body)
	}
}

// compress returns text as gzip has it.
func compress(text []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	// A buffer takes everything.
	_, _ = z.Write(text)
	_ = z.Close()
	return b.Bytes()
}

// acceptsGzip reports whether an Accept-Encoding header names gzip and does not refuse it.
func acceptsGzip(values []string) bool {
	for _, value := range values {
		for coding := range strings.SplitSeq(value, ",") {
			name, weight, _ := strings.Cut(coding, ";")
			if strings.EqualFold(strings.TrimSpace(name), "gzip") {
				q, given := strings.CutPrefix(strings.ReplaceAll(weight, " ", ""), "q=")
				return !given || strings.Trim(q, "0.") != ""
			}
		}
	}
	return false
}

var nonASCII = regexp.MustCompile(`[^\x00-\x7f]+`)

// redirect returns a handler that sends clients elsewhere for good, with method and body.
func redirect(path string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		to := path
		if query := r.URL.RawQuery; query != "" {
			to += "?" + nonASCII.ReplaceAllStringFunc(query, url.QueryEscape)
		}
		w.Header().Set("Location", to)
		w.WriteHeader(http.StatusPermanentRedirect)
	}
}
