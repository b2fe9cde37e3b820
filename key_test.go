package main

import (
	"errors"
	"strings"
	"testing"
)

func TestParseKeyHeader(t *testing.T) {
	long := strings.Repeat("a", maxKeyLen)
	tests := []struct {
		name    string
		values  []string
		want    keyHeader
		wantErr string // part of the message
	}{
		{"no header", nil, keyHeader{}, ""},
		{"bare", []string{"k1"}, keyHeader{true, "k1"}, ""},
		{"case is kept (row 21)", []string{"K1"}, keyHeader{true, "K1"}, ""},
		{"trimmed", []string{" \tk1\t "}, keyHeader{true, "k1"}, ""},
		{"space inside", []string{"k 1"}, keyHeader{true, "k 1"}, ""},
		{"comma", []string{"k1, k2"}, keyHeader{true, "k1, k2"}, ""},
		{"quote inside", []string{`k"1`}, keyHeader{true, `k"1`}, ""},
		{"semicolon in a bare key", []string{"k1;v=1"}, keyHeader{true, "k1;v=1"}, ""},
		{"backslash in a bare key", []string{`k\1`}, keyHeader{true, `k\1`}, ""},
		{"blank (rows 24 and 25)", []string{""}, keyHeader{true, ""}, ""},
		{"white space", []string{" \t "}, keyHeader{true, ""}, ""},
		{"quoted (row 19)", []string{`"k1"`}, keyHeader{true, "k1"}, ""},
		{"quoted, spaces inside", []string{`" k1 "`}, keyHeader{true, " k1 "}, ""},
		{"quoted with parameters (row 20)", []string{`"k1";v=1`}, keyHeader{true, "k1"}, ""},
		{"parameters of every kind", []string{`"k1"; a; b=?1;c="x,\";y";d=:aGk=:;e=1.5`}, keyHeader{true, "k1"}, ""},
		{"escapes", []string{`"a\"b\\c"`}, keyHeader{true, `a"b\c`}, ""},
		{"escape at the end", []string{`"a\""`}, keyHeader{true, `a"`}, ""},
		{"only an escape", []string{`"\\"`}, keyHeader{true, `\`}, ""},
		{"longest (row 28)", []string{long}, keyHeader{true, long}, ""},
		{"longest, quoted", []string{`"` + long + `"`}, keyHeader{true, long}, ""},
		{"longest, all escaped", []string{`"` + strings.Repeat(`\\`, maxKeyLen) + `"`}, keyHeader{true, strings.Repeat(`\`, maxKeyLen)}, ""},

		{"quoted empty (row 27)", []string{`""`}, keyHeader{}, "blank"},
		{"quoted blank", []string{`"  "`}, keyHeader{}, "blank"},
		{"too long (row 29)", []string{long + "a"}, keyHeader{}, "255"},
		{"too long, quoted", []string{`"` + long + `a"`}, keyHeader{}, "255"},
		{"3,000 characters", []string{strings.Repeat("xyz", 1000)}, keyHeader{}, "255"},
		{"non-ASCII (row 30)", []string{"café"}, keyHeader{}, "printable"},
		{"Latin-1", []string{"caf\xe9"}, keyHeader{}, "printable"},
		{"non-ASCII, quoted", []string{`"café"`}, keyHeader{}, "printable"},
		{"non-ASCII space", []string{"\u00a0"}, keyHeader{}, "printable"},
		{"control character (row 31)", []string{"a\x01"}, keyHeader{}, "printable"},
		{"DEL", []string{"a\x7f"}, keyHeader{}, "printable"},
		{"tab inside", []string{"a\tb"}, keyHeader{}, "printable"},
		{"NUL", []string{"a\x00b"}, keyHeader{}, "printable"},
		{"sent twice (row 32)", []string{"k1", "k1"}, keyHeader{}, "more than once"},
		{"sent twice, one blank", []string{"k1", ""}, keyHeader{}, "more than once"},
		{"unterminated (row 33)", []string{`"abc`}, keyHeader{}, "closing quote"},
		{"one quote", []string{`"`}, keyHeader{}, "closing quote"},
		{"closing quote escaped", []string{`"abc\"`}, keyHeader{}, "closing quote"},
		{"text after it", []string{`"a"b"`}, keyHeader{}, "parameters"},
		{"space before parameters", []string{`"a" ;v=1`}, keyHeader{}, "parameters"},
		{"bad escape", []string{`"a\nb"`}, keyHeader{}, "backslash"},
		{"backslash at the end", []string{`"a\`}, keyHeader{}, "backslash"},
		{"two quoted lines joined by a proxy", []string{`"k1", "k2"`}, keyHeader{}, "parameters"},
		{"joined after parameters", []string{`"k1";v="a", "k2"`}, keyHeader{}, "parameters"},
		{"parameter unterminated", []string{`"k1";v="a`}, keyHeader{}, "parameters"},
	}
	for _, tt := range tests {
		got, err := parseKeyHeader(tt.values)
		if tt.wantErr == "" && err != nil || tt.wantErr != "" && (err == nil || !strings.Contains(err.Error(), tt.wantErr)) {
			t.Errorf("%s: parseKeyHeader(%q) error = %v, want %q", tt.name, tt.values, err, tt.wantErr)
		}
		if got != tt.want {
			t.Errorf("%s: parseKeyHeader(%q) = %+v, want %+v", tt.name, tt.values, got, tt.want)
		}
		if _, ok := errors.AsType[*keyError](err); err != nil && !ok {
			t.Errorf("%s: parseKeyHeader(%q) error is a %T, want *keyError", tt.name, tt.values, err)
		}
	}
}

func FuzzKeyHeader(f *testing.F) {
	for _, s := range []string{"", "k", `"k"`, `"k";v=1`, `"a\"b\\c"`, `""`, `"abc`, `"a"b"`, "café", " \tk ", `"k1", "k2"`, `"k";v="a,b"`} {
		f.Add(s, false)
	}
	f.Add("k1", true)
	f.Fuzz(func(t *testing.T, value string, twice bool) {
		values := []string{value}
		if twice {
			values = append(values, value)
		}
		got, err := parseKeyHeader(values)
		if err != nil {
			if _, ok := errors.AsType[*keyError](err); !ok {
				t.Errorf("parseKeyHeader(%q) error is a %T, want *keyError", values, err)
			}
			if got != (keyHeader{}) {
				t.Errorf("parseKeyHeader(%q) = %+v beside an error", values, got)
			}
			return
		}
		if twice || !got.present || !isPrintable(got.key) || len(got.key) > maxKeyLen {
			t.Errorf("parseKeyHeader(%q) = %+v, which is no valid key", values, got)
		}
		if got.key == "" {
			if strings.Trim(value, " \t") != "" {
				t.Errorf("parseKeyHeader(%q) = blank", values)
			}
			return
		}
		// The key in quotes is the same key.
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(got.key) + `"`
		if again, err := parseKeyHeader([]string{quoted}); err != nil || again != got {
			t.Errorf("parseKeyHeader(%q) = %+v, %v, want %+v", quoted, again, err, got)
		}
	})
}

func BenchmarkParseKeyHeader(b *testing.B) {
	for _, bm := range []struct{ name, value string }{
		{"bare", "8e03978e-40d5-43e8-bc93-6894a57f9324"},
		{"quoted", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`},
		{"escaped", `"8e03978e-\"40d5\"-43e8-bc93-6894a57f9324"`},
	} {
		b.Run(bm.name, func(b *testing.B) {
			b.ReportAllocs()
			values := []string{bm.value}
			for b.Loop() {
				if _, err := parseKeyHeader(values); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
