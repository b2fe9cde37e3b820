package main

import (
	"bytes"
	"encoding/json"
	"time"
)

// appendJSON appends JSON as it is but for white space, which jsonb adds; nothing as null. It
// never decodes: numbers keep every digit.
func appendJSON(b []byte, raw json.RawMessage) []byte {
	if len(raw) == 0 {
		return append(b, "null"...)
	}
	buf := bytes.NewBuffer(b)
	if err := json.Compact(buf, raw); err != nil {
		// Nested deeper than encoding/json goes, which only SQL can have stored.
		return append(b, raw...)
	}
	return buf.Bytes()
}

// appendTime appends a time as the original showed it: always six digits, so that texts sort as
// times do, and what POST said is byte for byte what GET says. RFC3339, which leaves
// out the fraction and writes Z, is the layout that the library need not read anew each time.
func appendTime(b []byte, t *time.Time) []byte {
	if t == nil {
		return append(b, "null"...)
	}
	b = t.UTC().AppendFormat(append(b, '"'), time.RFC3339)
	b[len(b)-1] = '.'
	for us, unit := t.Nanosecond()/1000, 100_000; unit > 0; unit /= 10 {
		b = append(b, byte('0'+us/unit%10))
	}
	return append(b, `+00:00"`...)
}

func appendText(b []byte, s *string) []byte {
	if s == nil {
		return append(b, "null"...)
	}
	return appendString(b, *s)
}

// appendString appends s as a JSON string, which json.Marshal would escape for HTML.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s { // bytes that are not UTF-8 come as U+FFFD
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, '\\', 'n')
		case r == '\r':
			b = append(b, '\\', 'r')
		case r == '\t':
			b = append(b, '\\', 't')
		case r < 0x20:
			b = append(b, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}
