package main

import (
	"errors"
	"fmt"
)

// What a stored JSON document may hold. A jsonb column keeps 1e100000 in a few bytes
// but prints 100,001 digits: 8 KB of such numbers read back as 100 MB, and 175 KB could
// never be read again. So a document may not grow beyond maxExpandedLen when it is printed.
const (
	maxDepth       = 100     // objects and arrays within each other
	maxExponent    = 400     // of a number, either sign
	maxLiteralLen  = 1000    // characters of a number
	maxExpandedLen = 2 << 20 // bytes of the text, and one for each power of ten in its exponents
)

// checkStorable returns nil if doc is one JSON value that PostgreSQL stores as jsonb and
// gives back. Otherwise the error says what is in the way: a *syntaxError when doc
// is no JSON at all (or not UTF-8), another error when it is JSON that cannot be kept or is
// larger than maxResultBytes. Trying again cannot help.
func checkStorable(doc []byte) error {
	if len(doc) > maxResultBytes {
		return fmt.Errorf("larger than %d bytes", maxResultBytes)
	}
	s := scanner{src: string(doc)}
	if !s.value() || !s.end() {
		return s.err
	}
	if reasons := s.unstorable(len(doc)); reasons != nil {
		return errors.New(reasons[0])
	}
	return nil
}

// facts are what a scanner saw in one value.
type facts struct {
	escaped   bool // the last string has escape sequences
	nul       bool // \u0000: PostgreSQL refuses it (22P05)
	surrogate bool // half a surrogate pair: refused too (22P02); Go would turn it into U+FFFD
	exponent  bool // an exponent beyond maxExponent
	long      bool // a number beyond maxLiteralLen
	depth     int  // deepest nesting
	exponents int  // sum of the absolute exponents, each counted up to maxExponent+1
}

// unstorable returns every reason for which a value cannot be kept; size is the length
// of the text it came in.
func (f *facts) unstorable(size int) (reasons []string) {
	if f.nul {
		reasons = append(reasons, `\u0000 cannot be stored`)
	}
	if f.surrogate {
		reasons = append(reasons, "half a surrogate pair cannot be stored")
	}
	if f.depth > maxDepth {
		reasons = append(reasons, fmt.Sprintf("nested more than %d levels deep", maxDepth))
	}
	if f.exponent {
		reasons = append(reasons, fmt.Sprintf("a number's exponent is not within %d and %d", -maxExponent, maxExponent))
	}
	if f.long {
		reasons = append(reasons, fmt.Sprintf("a number is longer than %d characters", maxLiteralLen))
	}
	if f.exponents > 0 && size+f.exponents > maxExpandedLen {
		reasons = append(reasons, fmt.Sprintf("its numbers would print as more than %d bytes", maxExpandedLen))
	}
	return reasons
}
