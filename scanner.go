package main

import (
	"fmt"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// A syntaxError says why a text is not JSON (RFC 8259) in UTF-8. Offset counts the
// bytes up to and including the offending one, as encoding/json does.
type syntaxError struct {
	Offset int
	Msg    string
}

func (e *syntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Msg)
}

// A scanner checks JSON text in one pass and takes note of what cannot be stored. It keeps
// one bit for each open object or array instead of recursing, so that a text nested a
// million deep costs 128 KiB at most, and is still told from one that is not well formed.
type scanner struct {
	src  string
	pos  int          // the next byte to read
	err  *syntaxError // why the last call returned false
	name string       // of the member read last, between its quotes
	open [2]uint64    // bit d%64 of word d/64 is set if level d is an object
	more []uint64     // the same for the levels that open has no room for
	facts
}

// value reads one value with what it contains, and collects its facts anew. The text of
// the value begins at the byte next returns before the call and ends at pos.
func (s *scanner) value() bool {
	s.facts = facts{}
	depth := 0
values:
	for {
		switch c := s.next(); {
		case c == '"':
			if !s.text() {
				return false
			}
		case c == '-' || '0' <= c && c <= '9':
			if !s.number() {
				return false
			}
		case c == '{':
			s.push(depth, 1)
			depth++
			if s.next() != '}' {
				if !s.member() {
					return false
				}
				continue values
			}
		case c == '[':
			s.push(depth, 0)
			depth++
			if s.next() != ']' {
				continue values
			}
		default:
			if !s.literal(c) {
				return false
			}
		}
		for ; depth > 0; depth-- {
			c, object := s.next(), *s.word(depth - 1)>>((depth-1)%64)&1 == 1
			switch {
			case c == ',':
				s.pos++
				if object && !s.member() {
					return false
				}
				continue values
			case object && c != '}':
				return s.fail("expected ',' or '}'")
			case !object && c != ']':
				return s.fail("expected ',' or ']'")
			}
			s.pos++
		}
		return true
	}
}

// list reads the object or array at pos, whose closing bracket is end, and has read read
// each of its members or elements.
func (s *scanner) list(end byte, read func() bool) bool {
	s.pos++
	if s.next() != end {
		for read() && s.next() == ',' {
			s.pos++
		}
		if s.err != nil {
			return false
		}
		if s.next() != end {
			return s.fail("expected ',' or '" + string(end) + "'")
		}
	}
	s.pos++
	return true
}

// push steps into the object (kind 1) or array (kind 0) at pos, as level depth.
func (s *scanner) push(depth int, kind uint64) {
	s.pos++
	if depth/64 == len(s.open)+len(s.more) {
		s.more = append(s.more, 0)
	}
	w := s.word(depth)
	*w = *w&^(1<<(depth%64)) | kind<<(depth%64)
	s.depth = max(s.depth, depth+1)
}

// word returns the word that has the bit of level depth.
func (s *scanner) word(depth int) *uint64 {
	if i := depth / 64; i >= len(s.open) {
		return &s.more[i-len(s.open)]
	}
	return &s.open[depth/64]
}

// member reads the name of a member and the colon after it.
func (s *scanner) member() bool {
	if s.next() != '"' {
		return s.fail("expected a member name")
	}
	start := s.pos + 1
	if !s.text() {
		return false
	}
	s.name = s.src[start : s.pos-1]
	if s.next() != ':' {
		return s.fail("expected ':'")
	}
	s.pos++
	return true
}

// text reads the string whose opening quote is at pos.
func (s *scanner) text() bool {
	s.escaped = false
	s.pos++
	for {
		s.pos = skipPlain(s.src, s.pos)
		if s.pos == len(s.src) {
			return s.fail("")
		}
		switch c := s.src[s.pos]; {
		case c == '"':
			s.pos++
			return true
		case c == '\\':
			r, n := unescape(s.src[s.pos:])
			if n == 0 {
				return s.fail("invalid escape sequence")
			}
			s.escaped = true
			s.nul = s.nul || r == 0
			s.surrogate = s.surrogate || utf16.IsSurrogate(r)
			s.pos += n
		case c < ' ':
			return s.fail("control character in a string")
		default:
			r, n := utf8.DecodeRuneInString(s.src[s.pos:])
			if r == utf8.RuneError && n == 1 {
				return s.fail("invalid UTF-8")
			}
			s.pos += n
		}
	}
}

// number reads the number at pos.
func (s *scanner) number() bool {
	start := s.pos
	if s.src[s.pos] == '-' {
		s.pos++
	}
	if s.pos < len(s.src) && s.src[s.pos] == '0' {
		s.pos++
	} else if !s.digits() {
		return false
	}
	if s.pos < len(s.src) && s.src[s.pos] == '.' {
		s.pos++
		if !s.digits() {
			return false
		}
	}
	if s.pos < len(s.src) && s.src[s.pos]|0x20 == 'e' {
		s.pos++
		if s.pos < len(s.src) && (s.src[s.pos] == '+' || s.src[s.pos] == '-') {
			s.pos++
		}
		first := s.pos
		if !s.digits() {
			return false
		}
		exponent := 0
		for _, c := range []byte(s.src[first:s.pos]) {
			exponent = min(10*exponent+int(c-'0'), maxExponent+1)
		}
		s.exponent = s.exponent || exponent > maxExponent
		s.exponents += exponent
	}
	s.long = s.long || s.pos-start > maxLiteralLen
	return true
}

// digits reads one digit or more.
func (s *scanner) digits() bool {
	start := s.pos
	for s.pos < len(s.src) && '0' <= s.src[s.pos] && s.src[s.pos] <= '9' {
		s.pos++
	}
	if s.pos == start {
		return s.fail("invalid number")
	}
	return true
}

// literal reads true, false or null; c is the byte at pos.
func (s *scanner) literal(c byte) bool {
	want := ""
	switch c {
	case 't':
		want = "true"
	case 'f':
		want = "false"
	case 'n':
		want = "null"
	default:
		return s.fail("expected a value")
	}
	for i := range len(want) {
		if s.pos == len(s.src) || s.src[s.pos] != want[i] {
			return s.fail("expected " + want)
		}
		s.pos++
	}
	return true
}

// next skips white space and returns the byte at pos, which is not yet read, or 0 at the
// end of the text. A real 0 there is as little JSON as the end, so nobody has to tell them apart.
func (s *scanner) next() byte {
	for s.pos < len(s.src) {
		c := s.src[s.pos]
		if !isSpace(c) {
			return c
		}
		s.pos++
	}
	return 0
}

// end reports whether nothing but white space is left.
func (s *scanner) end() bool {
	s.next()
	return s.pos == len(s.src) || s.fail("text after the JSON value")
}

// fail notes a syntax error at pos and returns false.
func (s *scanner) fail(msg string) bool {
	if s.pos == len(s.src) {
		s.err = &syntaxError{s.pos, "unexpected end"}
	} else {
		s.err = &syntaxError{s.pos + 1, msg}
	}
	return false
}

func isSpace(c byte) bool { return c <= ' ' && (c == ' ' || c == '\n' || c == '\r' || c == '\t') }

// skipPlain returns the index, from i on, of the first byte of s that a JSON string does
// not simply contain: a quote, a backslash, a control character or a byte of
// a non-ASCII character. It looks at eight bytes at once; the lowest byte that a
// test below marks is always one that is meant, a carry reaches only those above it.
func skipPlain(s string, i int) int {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(s); i += 8 {
		w := uint64(s[i]) | uint64(s[i+1])<<8 | uint64(s[i+2])<<16 | uint64(s[i+3])<<24 |
			uint64(s[i+4])<<32 | uint64(s[i+5])<<40 | uint64(s[i+6])<<48 | uint64(s[i+7])<<56
		quote, backslash := w^('"'*ones), w^('\\'*ones)
		if m := (w | (w - ' '*ones) | (quote - ones) | (backslash - ones)) & high; m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
	}
	for i < len(s) && ' ' <= s[i] && s[i] < utf8.RuneSelf && s[i] != '"' && s[i] != '\\' {
		i++
	}
	return i
}

// unescape decodes the escape sequence at the start of s, two of them if they form a
// surrogate pair, and returns its length, or 0 if there is none. Half a pair is
// returned as it is, and then utf16.IsSurrogate holds.
func unescape(s string) (r rune, n int) {
	if len(s) < 2 {
		return 0, 0
	}
	switch c := s[1]; c {
	case '"', '\\', '/':
		return rune(c), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
	default:
		return 0, 0
	}
	r = hex4(s[2:])
	if r < 0 {
		return 0, 0
	}
	if utf16.IsSurrogate(r) && len(s) >= 12 && s[6] == '\\' && s[7] == 'u' {
		if pair := utf16.DecodeRune(r, hex4(s[8:])); pair != utf8.RuneError {
			return pair, 12
		}
	}
	return r, 6
}

// hex4 returns the value of the four hexadecimal digits that s begins with, or -1.
func hex4(s string) (r rune) {
	if len(s) < 4 {
		return -1
	}
	for _, c := range []byte(s[:4]) {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | rune(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return -1
		}
	}
	return r
}
