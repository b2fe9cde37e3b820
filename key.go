package main

import (
	"strconv"
	"strings"
)

// A keyError says why an idempotency key cannot be used. Msg is for the client and does
// not show the key.
type keyError struct{ Msg string }

func (e *keyError) Error() string { return e.Msg }

var errBlankKey = &keyError{"an idempotency key cannot be blank"}

// keyHeader is the Idempotency-Key header of a request.
type keyHeader struct {
	present bool   // a header line was sent
	key     string // its key; "" if the line was blank
}

// parseKeyHeader reads the field lines of an Idempotency-Key header. A key is written
// bare, as most SDKs do, or as a String of RFC 8941 with or without parameters, as
// draft-ietf-httpapi-idempotency-key-header asks; both forms name the same key. A blank
// line is no error here, because a key in the body may still make up for it; a blank String
// is. The error is a *keyError.
func parseKeyHeader(values []string) (keyHeader, error) {
	switch len(values) {
	case 0:
		return keyHeader{}, nil
	case 1:
	default:
		return keyHeader{}, &keyError{"the Idempotency-Key header was sent more than once"}
	}
	key := strings.Trim(values[0], " \t")
	if !isPrintable(key) {
		return keyHeader{}, &keyError{"an idempotency key has printable ASCII characters only"}
	}
	if strings.HasPrefix(key, `"`) {
		var err error
		if key, err = parseQuotedKey(key); err != nil {
			return keyHeader{}, err
		}
	}
	if len(key) > maxKeyLen {
		return keyHeader{}, &keyError{"an idempotency key has at most " + strconv.Itoa(maxKeyLen) + " characters"}
	}
	return keyHeader{present: true, key: key}, nil
}

// parseQuotedKey reads s, which begins with a quote, as an Item of RFC 8941 that is a
// String, and returns the string.
func parseQuotedKey(s string) (string, error) {
	var unescaped []byte // what s has up to start, once an escape was met
	start := 1
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			if i+1 == len(s) || s[i+1] != '"' && s[i+1] != '\\' {
				return "", &keyError{`in a quoted idempotency key only \" and \\ may follow a backslash`}
			}
			unescaped = append(unescaped, s[start:i]...)
			i++
			start = i
		case '"':
			if !isParameters(s[i+1:]) {
				return "", &keyError{"only parameters may follow a quoted idempotency key"}
			}
			key := s[start:i]
			if unescaped != nil {
				key = string(append(unescaped, key...))
			}
			if strings.Trim(key, " ") == "" {
				return "", errBlankKey
			}
			return key, nil
		}
	}
	return "", &keyError{"a quoted idempotency key has no closing quote"}
}

// isParameters reports whether s is empty or looks like parameters, which nobody reads.
// It refuses a comma outside quotes: that is where a proxy joined two header lines.
func isParameters(s string) bool {
	quoted := false
	for i := 0; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++
		case s[i] == '"':
			quoted = !quoted
		case s[i] == ',' && !quoted:
			return false
		}
	}
	return s == "" || s[0] == ';' && !quoted
}

// isPrintable reports whether s has the characters from space to tilde only.
func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
