package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// maxBackoff is the longest back-off that an entry may ask for.
const maxBackoff = 24 * time.Hour

// A fileReader turns a handlers file into entries of a table and collects what is
// wrong with it, so that an operator sees all of it at the first start.
type fileReader struct {
	cfg              config
	checkExecutables bool
	table            *handlerTable
	pusher           *pusher
	problems         []error
}

// readFile fills t from cfg.HandlersFile. t is of no use when it returns an error.
func (t *handlerTable) readFile(cfg config, checkExecutables bool) error {
	data, err := os.ReadFile(cfg.HandlersFile)
	if err != nil {
		return fmt.Errorf("HANDLERS_FILE: %w", err) // the os error names the path
	}
	p, err := newPusher(cfg)
	if err != nil {
		return err
	}
	r := &fileReader{cfg: cfg, checkExecutables: checkExecutables, table: t, pusher: p}
	r.file(data)
	return errors.Join(r.problems...)
}

func (r *fileReader) problem(err error) {
	r.problems = append(r.problems, fmt.Errorf("%s: %w", r.cfg.HandlersFile, err))
}

func (r *fileReader) file(data []byte) {
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		r.problem(errors.New("begins with a byte order mark; save it as UTF-8 without one"))
		return
	}
	if !utf8.Valid(data) {
		r.problem(errors.New("is not valid UTF-8"))
		return
	}
	entries, err := splitObject(data)
	if err != nil {
		r.problem(err)
		return
	}
	if len(entries) == 0 {
		r.problem(errors.New("names no handler"))
	}
	queues := map[string]bool{}
	for _, e := range entries {
		r.entry(e.key, e.value, queues)
	}
	r.table.named = slices.Sorted(maps.Keys(queues))
}

// entry reads one name and its object, and adds its queue, if any, to queues.
func (r *fileReader) entry(name string, value json.RawMessage, queues map[string]bool) {
	bad := func(format string, args ...any) {
		r.problem(fmt.Errorf("%q: %w", name, fmt.Errorf(format, args...)))
	}
	if _, ok := r.table.byName[name]; ok {
		bad("the name is there twice")
		return
	}
	if !validTaskName(name) {
		bad("a name has 1 to %d characters, none of them a control character, and is not blank", maxNameLen)
	}
	h := r.table.defaults
	r.table.byName[name] = &h
	fields, err := splitObject(value)
	if err != nil {
		bad("%w", err)
		return
	}
	seen := map[string]bool{}
	kinds := 0
	for _, f := range fields {
		if seen[f.key] {
			bad("%q: the key is there twice", f.key)
			continue
		}
		seen[f.key] = true
		if f.key == "exec" || f.key == "url" || f.key == "go" {
			kinds++
		}
		if err := r.field(&h, f.key, f.value); err != nil {
			bad("%q: %w", f.key, err)
		}
	}
	if seen["queue"] {
		queues[h.queue] = true
	}
	if kinds != 1 {
		bad("want exactly one of exec, url and go, not %d of them", kinds)
	}
	if (seen["backoff_base"] || seen["backoff_max"]) && h.backoff.base > h.backoff.max && h.backoff.max > 0 {
		bad("backoff_base %v is above backoff_max %v", h.backoff.base, h.backoff.max)
	}
}

// field sets what one key of an entry says about h.
func (r *fileReader) field(h *handler, key string, value json.RawMessage) (err error) {
	switch key {
	case "exec", "url", "go":
		h.kind = key
		h.run, err = r.kind(key, value)
	case "timeout":
		h.timeout, err = durationValue(value, r.cfg.MaxTaskTimeout)
	case "max_retries":
		h.maxRetries, err = retriesValue(value)
	case "backoff_base":
		h.backoff.base, err = durationValue(value, maxBackoff)
	case "backoff_max":
		h.backoff.max, err = durationValue(value, maxBackoff)
	case "queue":
		h.queue, err = queueValue(value)
	default:
		err = errors.New("unknown key; the keys are exec, url, go, timeout, max_retries, queue, backoff_base and backoff_max")
	}
	return err
}

// kind makes the function of an entry from the value of its exec, url or go key.
func (r *fileReader) kind(key string, value json.RawMessage) (handlerFunc, error) {
	switch key {
	case "exec":
		argv, err := argvValue(value)
		if err != nil {
			return nil, err
		}
		if r.checkExecutables {
			if _, err := exec.LookPath(argv[0]); err != nil {
				return nil, err // an *exec.Error, which names the file
			}
		}
		return newCommand(argv).run, nil
	case "url":
		u, err := urlValue(value)
		if err != nil {
			return nil, err
		}
		return r.pusher.endpoint(u), nil
	}
	name, err := decodeValue[string](value, "a string")
	if err != nil {
		return nil, err
	}
	known := goHandlers()
	fn, ok := known[name]
	if !ok {
		return nil, fmt.Errorf("no function %q; known: %s", name, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
	}
	return fn, nil
}

// validTaskName reports whether a task can have this name at all.
func validTaskName(s string) bool {
	return utf8.RuneCountInString(s) <= maxNameLen && strings.TrimSpace(s) != "" && !strings.ContainsFunc(s, unicode.IsControl)
}

func argvValue(value json.RawMessage) ([]string, error) {
	const want = `a list of strings, as in ["./run.sh", "-v"]`
	list, err := decodeValue[[]*string](value, want)
	if err != nil {
		return nil, err
	}
	argv := make([]string, 0, len(list))
	for _, s := range list {
		if s == nil {
			return nil, errors.New("want " + want)
		}
		if strings.ContainsRune(*s, 0) {
			return nil, errors.New("an argument cannot hold a NUL character")
		}
		argv = append(argv, *s)
	}
	if len(argv) == 0 || argv[0] == "" {
		return nil, errors.New("the command is empty")
	}
	return argv, nil
}

// urlValue reads a URL. Its errors quote nothing of the text, which may hold a password.
func urlValue(value json.RawMessage) (*url.URL, error) {
	s, err := decodeValue[string](value, "a string")
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New("not a valid URL")
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return nil, errors.New("want an http:// or https:// URL")
	}
	if u.Hostname() == "" {
		return nil, errors.New("the URL names no host")
	}
	if u.Port() != "" {
		if n, err := strconv.ParseUint(u.Port(), 10, 16); err != nil || n == 0 {
			return nil, errors.New("want a port from 1 to 65535")
		}
	}
	return u, nil
}

func durationValue(value json.RawMessage, limit time.Duration) (time.Duration, error) {
	s, err := decodeValue[string](value, `a duration in a string, as in "30s"`)
	if err != nil {
		return 0, err
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("not a duration: %q; want one like 30s or 1h30m", s)
	}
	if d < time.Millisecond || d > limit {
		return 0, fmt.Errorf("%v is out of range; want 1ms to %v", d, limit)
	}
	return d, nil
}

func retriesValue(value json.RawMessage) (int32, error) {
	want := fmt.Sprintf("a whole number from 0 to %d", maxRetryLimit)
	n, err := decodeValue[int32](value, want)
	if err == nil && (n < 0 || n > maxRetryLimit) {
		err = errors.New("want " + want)
	}
	return n, err
}

func queueValue(value json.RawMessage) (string, error) {
	s, err := decodeValue[string](value, "a string")
	if err != nil {
		return "", err
	}
	if s == "" || len(s) > 64 || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789_-") != "" {
		return "", errors.New("a queue name has 1 to 64 of the characters a-z, 0-9, _ and -")
	}
	return s, nil
}

// decodeValue reads one JSON value as a T. Unlike json.Unmarshal it refuses null.
func decodeValue[T any](value json.RawMessage, want string) (T, error) {
	var v *T
	if err := json.Unmarshal(value, &v); err != nil || v == nil {
		return *new(T), errors.New("want " + want)
	}
	return *v, nil
}

// A jsonMember is one key of a JSON object and its value.
type jsonMember struct {
	key   string
	value json.RawMessage
}

// splitObject splits a JSON object, and nothing after it, in its order and with repeated
// keys kept, which a Go map or struct would hide.
func splitObject(data []byte) ([]jsonMember, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	if open, err := dec.Token(); err != nil {
		return nil, jsonError(data, dec, err)
	} else if open != json.Delim('{') {
		return nil, errors.New("want a JSON object")
	}
	var list []jsonMember
	for dec.More() {
		var m jsonMember
		key, err := dec.Token()
		if err != nil {
			return nil, jsonError(data, dec, err)
		}
		m.key = key.(string) // the decoder takes nothing else before a colon
		if err := dec.Decode(&m.value); err != nil {
			return nil, jsonError(data, dec, err)
		}
		list = append(list, m)
	}
	if _, err := dec.Token(); err != nil { // the closing brace
		return nil, jsonError(data, dec, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("there is text after the JSON object")
	}
	return list, nil
}

// jsonError says on which line the decoder stopped.
func jsonError(data []byte, dec *json.Decoder, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON ends too early")
	}
	at := dec.InputOffset()
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		at = syntax.Offset
	}
	line := 1 + bytes.Count(data[:min(int(at), len(data))], []byte("\n"))
	return fmt.Errorf("line %d: %w", line, err)
}
