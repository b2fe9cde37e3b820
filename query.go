package main

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// A queryReader reads the parameters of a URL's query and collects what is wrong with them.
type queryReader struct {
	values url.Values
	known  []string // the parameters that were asked for
	errs   fieldErrors
}

// readQuery divides a query into its parameters.
func readQuery(query string) *queryReader {
	q := new(queryReader)
	var err error
	if q.values, err = url.ParseQuery(query); err != nil {
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
	return readQuery(u.RawQuery).end()
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
	q.fail("value_error", name, "Input should be given once")
	return "", false
}

// statuses returns the status parameter, given several times or as a list with commas, in the order of
// allowed; nil if it was not given.
func (q *queryReader) statuses(allowed []string) []string {
	q.known = append(q.known, "status")
	var given []string
	for _, value := range q.values["status"] {
		for status := range strings.SplitSeq(value, ",") {
			given = append(given, status)
		}
	}
	if slices.ContainsFunc(given, func(status string) bool { return !slices.Contains(allowed, status) }) {
		q.fail("literal_error", "status", "Input should be one of: "+strings.Join(allowed, ", "))
		return nil
	}
	if given == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(allowed), func(status string) bool { return !slices.Contains(given, status) })
}

// name returns the name parameter. A row that SQL inserted may have a name that could not be
// submitted, so all that PostgreSQL can store will do.
func (q *queryReader) name() *string {
	name, ok := q.one("name")
	switch {
	case !ok:
		return nil
	case name == "":
		q.fail("string_too_short", "name", "String should have at least 1 character")
	case !utf8.ValidString(name) || strings.ContainsRune(name, 0):
		q.fail("string_pattern_mismatch", "name", "String should be UTF-8 without NUL characters")
	}
	return &name
}

// time returns a parameter that is an RFC 3339 time, as the first microsecond that is not
// before it, since that is what PostgreSQL's times are counted in. In a query "+" is a
// blank, which is taken for the sign that it was.
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
	return new(t.Add(time.Microsecond - 1).Truncate(time.Microsecond))
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

// end refuses the parameters that nobody asked for, as far as an answer has room for them, and
// returns all that is wrong with the query, or nil.
func (q *queryReader) end() error {
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
	if len(q.errs) > 0 {
		return q.errs
	}
	return nil
}
