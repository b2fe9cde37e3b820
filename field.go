package main

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// A fieldError is one broken rule, in the words of pydantic, which clients of FastAPI know.
type fieldError struct {
	Type string `json:"type"`
	Loc  []any  `json:"loc"`
	Msg  string `json:"msg"`
}

// fieldErrors are all the rules that a request breaks, but for unknown members beyond
// the first maxUnknown.
type fieldErrors []fieldError

func (e fieldErrors) Error() string {
	var b strings.Builder
	for i, f := range e {
		if i > 0 {
			b.WriteString("; ")
		}
		for _, l := range f.Loc {
			fmt.Fprint(&b, l, " ")
		}
		b.WriteString(f.Msg)
	}
	return b.String()
}

// parseTime reads an RFC 3339 time from the year 1 on and returns it in UTC.
func parseTime(text string) (time.Time, bool) {
	// RFC 3339 allows small letters, and time.Parse more than RFC 3339: a comma, and an
	// hour of one digit (golang/go#54580).
	t, err := time.Parse(time.RFC3339, strings.ToUpper(text))
	if err != nil || strings.Contains(text, ",") || text[len("2006-01-02T0")] == ':' || t.UTC().Year() < 1 {
		return time.Time{}, false
	}
	return t.UTC(), true
}

func isQueueName(s string) bool {
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return false
		}
	}
	return 0 < len(s) && len(s) <= maxQueueLen
}

// isControl reports whether r would break a line or steer a terminal where the text is shown.
func isControl(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029'
}

// showName returns the beginning of an unknown member's name as it may be reflected.
func showName(name string) string {
	n := 0
	return strings.Map(func(r rune) rune {
		n++
		switch {
		case n > maxUnknownChars:
			return -1
		case isControl(r):
			return utf8.RuneError
		}
		return r
	}, name)
}
