package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"
	"unicode/utf8"
)

// fingerprintVersion begins what is hashed. Hashes are stored for as long as their tasks:
// whoever changes what follows it changes the version too, and then a retry of an older
// request is taken for a different one.
const fingerprintVersion = "nexusflow request 1\n"

// fingerprint returns the SHA-256 by which a retry of a request is told from another
// request with the same key. It covers the name, every optional member that was sent, as
// it was sent (a default that changes must not break a retry), and the payload in
// canonical form. All but the payload, which comes last, have their length in
// front, so that no two requests hash the same bytes.
func (r *submitReader) fingerprint(name, payload string) [32]byte {
	// The canonical form is rarely longer than the text it is of.
	buf := make([]byte, 0, 256+len(name)+len(payload))
	buf = frame(append(buf, fingerprintVersion...), memberNames[memberName], name)
	for i := memberMaxRetries; i < memberCount; i++ {
		if m := &r.members[i]; m.text != "" {
			value := m.text
			if value[0] == '"' {
				value = unescapeAll(value[1 : len(value)-1])
			}
			buf = frame(buf, memberNames[i], value)
		}
	}
	c := canonicalizer{buf: buf, members: make([]canonicalMember, 0, 16)}
	c.value(payload)
	return sha256.Sum256(c.buf)
}

// frame appends a name and a value, each after its length.
func frame(dst []byte, name, value string) []byte {
	dst = append(binary.AppendUvarint(dst, uint64(len(name))), name...)
	return append(binary.AppendUvarint(dst, uint64(len(value))), value...)
}

// A canonicalizer appends to buf the one form of a JSON text that does not depend on how
// it was written: no white space, members sorted by their names, of equal names the last
// (as jsonb keeps it), strings with no escapes but \", \\ and \u00xx for control
// characters. Numbers stay as written. It trusts its input to be valid and at
// most maxDepth deep, because it recurses.
type canonicalizer struct {
	buf     []byte
	members []canonicalMember // of the objects that are open, the outermost first
	scratch []byte
}

// A canonicalMember is a member in buf, from start to end; colon is what separates its name
// from its value.
type canonicalMember struct{ start, colon, end int }

// value appends the value that s begins with and returns what follows it.
func (c *canonicalizer) value(s string) string {
	s = skipSpace(s)
	switch s[0] {
	case '{':
		return c.object(s[1:])
	case '[':
		c.buf = append(c.buf, '[')
		s = skipSpace(s[1:])
		for s[0] != ']' {
			s = skipSpace(c.value(s))
			if s[0] == ',' {
				c.buf = append(c.buf, ',')
				s = s[1:]
			}
		}
		c.buf = append(c.buf, ']')
		return s[1:]
	case '"':
		return c.text(s[1:])
	}
	n := 1
	for n < len(s) && s[n] != ',' && s[n] != ']' && s[n] != '}' && !isSpace(s[n]) {
		n++
	}
	c.buf = append(c.buf, s[:n]...)
	return s[n:]
}

// object appends the object whose first member s begins with.
func (c *canonicalizer) object(s string) string {
	c.buf = append(c.buf, '{')
	first, base, sorted := len(c.members), len(c.buf), true
	for s = skipSpace(s); s[0] != '}'; s = skipSpace(s) {
		if s[0] == ',' {
			c.buf = append(c.buf, ',')
			s = skipSpace(s[1:])
		}
		m := canonicalMember{start: len(c.buf)}
		s = skipSpace(c.text(s[1:]))
		m.colon = len(c.buf)
		c.buf = append(c.buf, ':')
		s = c.value(s[1:])
		m.end = len(c.buf)
		if sorted && len(c.members) > first {
			sorted = c.compare(c.members[len(c.members)-1], m) < 0
		}
		c.members = append(c.members, m)
	}
	if !sorted {
		c.sort(c.members[first:], base)
	}
	c.members = c.members[:first]
	c.buf = append(c.buf, '}')
	return s[1:]
}

// sort puts members, whose text is all of buf from base on, in order and drops those
// that a later one of the same name replaces.
func (c *canonicalizer) sort(members []canonicalMember, base int) {
	slices.SortFunc(members, func(a, b canonicalMember) int {
		return cmp.Or(c.compare(a, b), cmp.Compare(a.start, b.start))
	})
	c.scratch = slices.Grow(c.scratch[:0], len(c.buf)-base)
	for i, m := range members {
		if i+1 < len(members) && c.compare(m, members[i+1]) == 0 {
			continue
		}
		if len(c.scratch) > 0 {
			c.scratch = append(c.scratch, ',')
		}
		c.scratch = append(c.scratch, c.buf[m.start:m.end]...)
	}
	c.buf = append(c.buf[:base], c.scratch...)
}

// compare orders two members by the bytes of their names, without the quotes.
func (c *canonicalizer) compare(a, b canonicalMember) int {
	return bytes.Compare(c.buf[a.start+1:a.colon-1], c.buf[b.start+1:b.colon-1])
}

// text appends the string whose opening quote precedes s and returns what follows it.
func (c *canonicalizer) text(s string) string {
	c.buf = append(c.buf, '"')
	for {
		n := skipPlain(s, 0)
		for s[n] >= utf8.RuneSelf {
			n = skipPlain(s, n+1)
		}
		c.buf = append(c.buf, s[:n]...)
		if s[n] == '"' {
			c.buf = append(c.buf, '"')
			return s[n+1:]
		}
		r, size := unescape(s[n:])
		switch {
		case r == '"' || r == '\\':
			c.buf = append(c.buf, '\\', byte(r))
		case r < ' ':
			const hex = "0123456789abcdef"
			c.buf = append(c.buf, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			c.buf = utf8.AppendRune(c.buf, r)
		}
		s = s[n+size:]
	}
}

// skipSpace returns s without the JSON white space in front of it.
func skipSpace(s string) string {
	i := 0
	for i < len(s) && isSpace(s[i]) {
		i++
	}
	return s[i:]
}

// unescapeAll returns the content s of a valid JSON string as the text it stands for. Half
// a surrogate pair becomes U+FFFD.
func unescapeAll(s string) string {
	n := strings.IndexByte(s, '\\')
	if n < 0 {
		return s
	}
	dst := make([]byte, 0, len(s))
	for ; n >= 0; n = strings.IndexByte(s, '\\') {
		dst = append(dst, s[:n]...)
		r, size := unescape(s[n:])
		dst = utf8.AppendRune(dst, r)
		s = s[n+size:]
	}
	return string(append(dst, s...))
}
