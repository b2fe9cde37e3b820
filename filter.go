package main

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

const filterCheck = 8 // bytes of the filter's hash in a cursor

// A selection says which tasks are meant; nil admits all.
type selection struct {
	statuses                    []string
	name                        *string
	createdAfter, createdBefore *time.Time // both exclusive
}

// readBulk reads the query of a request about many tasks, which must choose some of them:
// a forgotten filter must not cancel everything. Its error holds all that is wrong.
func readBulk(u *url.URL, statuses []string) (*bulk, error) {
	q := readQuery(u)
	b := &bulk{limit: maxBulk}
	b.statuses = q.statuses(statuses)
	b.name = q.name()
	b.createdAfter = q.time("created_after")
	b.createdBefore = q.time("created_before")
	if text, ok := q.one("limit"); ok {
		b.limit = q.integer("limit", text, 1, maxBulk)
	}
	text, given := q.one("cursor")
	q.unknown()
	if len(q.errs) == 0 && b.statuses == nil && b.name == nil && b.createdAfter == nil && b.createdBefore == nil {
		q.fail("missing", "status", "At least one of status, name, created_after and created_before is required")
	}
	if b.statuses == nil {
		b.statuses = statuses
	}
	if given && len(q.errs) == 0 {
		if b.after, given = b.position(u.Path, text); !given {
			q.fail("value_error", "cursor", "The cursor is not one that this request with these filters returned")
		}
	}
	if len(q.errs) > 0 {
		return nil, q.errs
	}
	return b, nil
}

// cursor returns the token for going on behind a key: opaque to clients, and of use only for
// the same request.
func (f *selection) cursor(path string, after uuid.UUID) string {
	return base64.RawURLEncoding.EncodeToString(append(after[:], f.check(path)...))
}

// position returns the key that cursor was given, or false for a token that is not of
// this path and filter.
func (f *selection) position(path, token string) (after uuid.UUID, ok bool) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || len(b) != len(after)+filterCheck || string(b[len(after):]) != string(f.check(path)) {
		return after, false
	}
	return uuid.UUID(b[:len(after)]), true
}

// check returns a hash of everything that decides which tasks a walk meets.
func (f *selection) check(path string) []byte {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%q\n", path, f.statuses)
	if f.name != nil {
		fmt.Fprintf(h, "%q", *f.name)
	}
	for _, t := range []*time.Time{f.createdAfter, f.createdBefore} {
		fmt.Fprintln(h)
		if t != nil {
			fmt.Fprint(h, t.UnixMicro())
		}
	}
	return h.Sum(nil)[:filterCheck]
}

// A queryReader reads the parameters of a URL's query and collects what is wrong with them.
type queryReader struct {
	values url.Values
	known  []string // the parameters that were asked for
	errs   fieldErrors
}

// readQuery divides a query into its parameters.
func readQuery(u *url.URL) *queryReader {
	q := new(queryReader)
	var err error
	if q.values, err = url.ParseQuery(u.RawQuery); err != nil {
		// The text of the error repeats what the client sent.
		q.errs = append(q.errs, fieldError{"value_error", []any{"query"}, "The query cannot be read: check its percent-encoding; ';' does not separate parameters"})
	}
	return q
}

// noQuery refuses every parameter: one that is ignored may be one that somebody relies on.
func noQuery(u *url.URL) error {
	if u.RawQuery == "" {
		return nil
	}
	q := readQuery(u)
	q.unknown()
	if len(q.errs) == 0 {
		return nil
	}
	return q.errs
}

func (q *queryReader) fail(kind, name, msg string) {
	q.errs = append(q.errs, fieldError{kind, []any{"query", name}, msg})
}

// one returns a parameter that may be given once.
func (q *queryReader) one(name string) (string, bool) {
	q.known = append(q.known, name)
	values := q.values[name]
	switch len(values) {
	case 0:
		return "", false
	case 1:
		return values[0], true
	}
	q.fail("value_error", name, "The parameter should be given once")
	return "", false
}

// statuses returns the status parameter, given several times or as a list with commas, in the order of
// allowed; nil if it was not given.
func (q *queryReader) statuses(allowed []string) []string {
	q.known = append(q.known, "status")
	var given []string
	for _, value := range q.values["status"] {
		for status := range strings.SplitSeq(value, ",") {
			given = append(given, strings.TrimSpace(status))
		}
	}
	if slices.ContainsFunc(given, func(status string) bool { return !slices.Contains(allowed, status) }) {
		q.fail("literal_error", "status", "Input should be one or more of: "+strings.Join(allowed, ", "))
		return nil
	}
	if given == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(allowed), func(status string) bool { return !slices.Contains(given, status) })
}

// name returns the name parameter; one that no task can have is an error.
func (q *queryReader) name() *string {
	name, ok := q.one("name")
	if !ok {
		return nil
	}
	switch n := utf8.RuneCountInString(name); {
	case n == 0:
		q.fail("string_too_short", "name", "String should have at least 1 character")
	case n > maxNameLen:
		q.fail("string_too_long", "name", fmt.Sprintf("String should have at most %d characters", maxNameLen))
	case !utf8.ValidString(name) || strings.ContainsFunc(name, isControl):
		q.fail("string_pattern_mismatch", "name", "String should be UTF-8 without control characters")
	}
	return &name
}

// time returns a parameter that is an RFC 3339 time. In a query "+" is a blank, which is taken
// for the sign that it was.
func (q *queryReader) time(name string) *time.Time {
	text, ok := q.one(name)
	if !ok {
		return nil
	}
	t, ok := parseTime(strings.Replace(text, " ", "+", 1))
	if !ok {
		q.fail("datetime_parsing", name, "Input should be an RFC 3339 date and time with a UTC offset")
		return nil
	}
	return &t
}

// integer returns a parameter that is an integer from low to high.
func (q *queryReader) integer(name, text string, low, high int) int {
	n, err := strconv.Atoi(text)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		q.fail("int_type", name, "Input should be a valid integer")
	case n < low:
		q.fail("greater_than_equal", name, fmt.Sprintf("Input should be greater than or equal to %d", low))
	case n > high:
		q.fail("less_than_equal", name, fmt.Sprintf("Input should be less than or equal to %d", high))
	}
	return n
}

// unknown refuses the parameters that nobody asked for, as far as an answer has room for them.
func (q *queryReader) unknown() {
	var names []string
	for name := range q.values {
		if !slices.Contains(q.known, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names[:min(len(names), maxUnknown)] {
		q.fail("extra_forbidden", showName(strings.ToValidUTF8(name, "\uFFFD")), "Extra inputs are not permitted")
	}
}
