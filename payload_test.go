package main

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"maps"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// storableDocs are documents that must be kept; each can be cast to jsonb and read back.
var storableDocs = map[string]string{
	"empty object":             `{}`,
	"empty array":              `[]`,
	"null":                     `null`,
	"scalars":                  `[true, false, null, "", 0, -0, -1.5e+3]`,
	"white space":              " \t\r\n{ \"a\" : [ 1 , 2 ] } \n",
	"every escape":             `{"a":"\"\\\/\b\f\n\r\tA\u00e9"}`,
	"control characters":       `{"\u0001":"\u001f\u007f\u0080"}`,
	"surrogate pair":           `{"a":"\ud83d\ude00"}`,
	"surrogate pair, mixed":    `{"a":"\uD83D\uDE00 and \uDBFF\uDFFF"}`,
	"raw emoji":                `{"a":"😀","é":"ü"}`,
	"noncharacters":            `{"a":"\ufffe\uffff"}`,
	"escaped backslash":        `{"a":"\\u0000 \\ud83d"}`,
	"big integers":             `{"id":12345678901234567890,"x":0.1,"y":9007199254740993}`,
	"largest exponents":        `[1e400, 1E-400, 1e+400, 1e0000000000000000000400, 0e400]`,
	"longest number":           `[` + strings.Repeat("9", maxLiteralLen) + `]`,
	"longest number, scaled":   `[0.` + strings.Repeat("1", maxLiteralLen-7) + `e-400]`,
	"deepest array":            nested("[", "]", maxDepth),
	"deepest object":           nested(`{"a":`, `}`, maxDepth-1, `{}`),
	"duplicate members":        `{"a":1,"b":2,"a":{"c":3,"c":4}}`,
	"as many digits as may be": `[` + strings.Repeat("1e400,", (maxExpandedLen-10)/406) + `0]`,
}

// refusedDocs are JSON, but cannot be kept; the value is a part of the reason.
var refusedDocs = []struct{ name, doc, want string }{
	{"NUL in a value", `{"a":"x\u0000y"}`, `\u0000`},
	{"NUL in a name", `{"a\u0000":1}`, `\u0000`},
	{"NUL alone", `"\u0000"`, `\u0000`},
	{"NUL in a dropped duplicate", `{"a":"\u0000","a":1}`, `\u0000`},
	{"high surrogate at the end", `{"a":"\ud800"}`, "surrogate"},
	{"high surrogate in the middle", `{"a":"\ud83d and more text"}`, "surrogate"},
	{"high surrogate twice", `{"a":"\ud83d\ud83d"}`, "surrogate"},
	{"high surrogate, other escape", `{"a":"\ud83d\n00000"}`, "surrogate"},
	{"high surrogate, no surrogate", `{"a":"\ud83d\u0041"}`, "surrogate"},
	{"low surrogate first", `{"a":"\udc00x"}`, "surrogate"},
	{"low before high", `{"a":"\ude00\ud83d"}`, "surrogate"},
	{"surrogate in a name", `{"\udfff":1}`, "surrogate"},
	{"exponent", `[1e401]`, "exponent"},
	{"negative exponent", `[1e-401]`, "exponent"},
	{"exponent jsonb refuses", `[1e131072]`, "exponent"},
	{"small number jsonb refuses", `[1e-20000]`, "exponent"},
	{"exponent of zero", `[0e999999]`, "exponent"},
	{"exponent beyond every integer", `[1e` + strings.Repeat("9", 900) + `]`, "exponent"},
	{"long number", `[` + strings.Repeat("9", maxLiteralLen+1) + `]`, "longer than 1000"},
	{"long fraction", `[0.` + strings.Repeat("0", maxLiteralLen) + `]`, "longer than 1000"},
	{"number bomb", `[` + strings.Repeat("1e100000,", 900) + `1]`, "exponent"},
	{"number bomb of small numbers", `[` + strings.Repeat("1e400,", maxExpandedLen/406+1) + `0]`, "print as more"},
	{"deep array", nested("[", "]", maxDepth+1), "nested"},
	{"deep object", nested(`{"a":`, `}`, maxDepth, `{}`), "nested"},
	{"deep in the middle", `[{},` + nested("[", "]", maxDepth) + `,{}]`, "nested"},
	{"9,990 deep", nested("[", "]", 9_990), "nested"},
	{"20,000 deep", nested(`[{"a":`, `}]`, 10_000, `1`), "nested"},
	{"half a million deep", nested("[", "]", 500_000), "nested"},
	{"too large", `"` + strings.Repeat("x", maxResultBytes-1) + `"`, "larger than"},
}

// brokenDocs are no JSON; want is the offset at which that shows.
var brokenDocs = []struct {
	name, doc string
	want      int
}{
	{"nothing", ``, 0},
	{"white space", "  ", 2},
	{"byte order mark", "\ufeff{}", 1},
	{"two values", `{} {}`, 4},
	{"text after the value", `{} x`, 4},
	{"closing twice", `{}}`, 3},
	{"open object", `{`, 1},
	{"open array", `[1`, 2},
	{"wrong bracket", `[1}`, 3},
	{"wrong brace", `{"a":1]`, 7},
	{"comma at the end", `{"name":"a",}`, 13},
	{"comma at the end of an array", `[1,]`, 4},
	{"comma first", `[,1]`, 2},
	{"no comma", `[1 2]`, 4},
	{"no colon", `{"a" 1}`, 6},
	{"no value", `{"a":}`, 6},
	{"name without quotes", `{a:1}`, 2},
	{"name is a number", `{1:1}`, 2},
	{"single quotes", `{'a':1}`, 2},
	{"comment", `{/**/}`, 2},
	{"open string", `"abc`, 4},
	{"open string after a backslash", `"abc\`, 5},
	{"line break in a string", "\"a\nb\"", 3},
	{"NUL byte", "\x00", 1},
	{"NUL byte in a string", "\"\x00\"", 2},
	{"NUL byte after the value", "1\x00", 2},
	{"unknown escape", `"\x41"`, 2},
	{"short escape", `"\u12"`, 2},
	{"escape with a sign", `"\u+123"`, 2},
	{"second half broken", `"\ud83d\uzzzz"`, 8},
	{"invalid UTF-8", "\"\xff\"", 2},
	{"cut UTF-8", "\"\xc3\"", 2},
	{"overlong UTF-8", "\"\xc0\x80\"", 2},
	{"surrogate in UTF-8", "\"\xed\xa0\x80\"", 2},
	{"beyond Unicode", "\"\xf4\x90\x80\x80\"", 2},
	{"invalid UTF-8 in a name", "{\"\xff\":1}", 3},
	{"invalid UTF-8 outside", "\xff", 1},
	{"leading zero", `01`, 2},
	{"minus alone", `-`, 1},
	{"plus", `+1`, 1},
	{"no fraction", `1.`, 2},
	{"no integer", `.5`, 1},
	{"no exponent", `1e`, 2},
	{"no exponent after a sign", `1e+]`, 4},
	{"hexadecimal", `0x10`, 2},
	{"NaN", `NaN`, 1},
	{"infinity", `-Infinity`, 2},
	{"cut word", `tru`, 3},
	{"wrong word", `nul1`, 4},
	{"long word", `truee`, 5},
	{"upper case", `True`, 1},
	{"half a million open", strings.Repeat("[", 500_000), 500_000},
	{"a million deep but for one", strings.Repeat("[", 500_000) + strings.Repeat("]", 499_999), 999_999},
	{"wrong bracket far down", strings.Repeat("[", 1_000) + "}", 1_001},
}

// nested returns depth times left, what is inside, and depth times right.
func nested(left, right string, depth int, inside ...string) string {
	return strings.Repeat(left, depth) + strings.Join(inside, "") + strings.Repeat(right, depth)
}

func TestCheckStorable(t *testing.T) {
	for name, doc := range storableDocs {
		if err := checkStorable([]byte(doc)); err != nil {
			t.Errorf("%s: checkStorable = %v, want nil", name, err)
		}
		if !json.Valid([]byte(doc)) {
			t.Errorf("%s: the document of this test is not JSON", name)
		}
	}
	for _, tt := range refusedDocs {
		err := checkStorable([]byte(tt.doc))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: checkStorable = %v, want an error with %q", tt.name, err, tt.want)
		}
		if _, ok := errors.AsType[*syntaxError](err); ok {
			t.Errorf("%s: checkStorable = %v, want another kind of error: this is JSON", tt.name, err)
		}
	}
	for _, tt := range brokenDocs {
		err := checkStorable([]byte(tt.doc))
		if got, ok := errors.AsType[*syntaxError](err); !ok || got.Offset != tt.want {
			t.Errorf("%s: checkStorable = %v, want a syntax error at byte %d", tt.name, err, tt.want)
		}
	}
}

// mutated yields n texts one to three edits away from the documents above.
func mutated(n int) iter.Seq[string] {
	var seeds []string
	for _, name := range slices.Sorted(maps.Keys(storableDocs)) {
		seeds = append(seeds, storableDocs[name])
	}
	for _, tt := range refusedDocs {
		seeds = append(seeds, tt.doc)
	}
	for _, tt := range brokenDocs {
		seeds = append(seeds, tt.doc)
	}
	seeds = slices.DeleteFunc(seeds, func(doc string) bool { return len(doc) > 2000 })
	edits := []string{"", "{", "}", "[", "]", ",", ":", `"`, `\`, `\u`, "d83d", "0", "1", "-", "+", ".", "e", "E", "t", "true", "null",
		" ", "\n", "\x00", "\x1f", "\x7f", "\x80", "\xff", "é", "😀", "/", "a"}
	return func(yield func(string) bool) {
		rng := rand.New(rand.NewPCG(1, 2))
		for range n {
			doc := seeds[rng.IntN(len(seeds))]
			for range 1 + rng.IntN(3) {
				i := rng.IntN(len(doc) + 1)
				j := min(i+rng.IntN(3), len(doc))
				doc = doc[:i] + edits[rng.IntN(len(edits))] + doc[j:]
			}
			if !yield(doc) {
				return
			}
		}
	}
}

// TestSyntaxAgreesWithEncodingJSON compares the scanner's verdict with json.Valid. The two
// must differ only where encoding/json looks away: it lets invalid UTF-8 pass, and it
// refuses more than 10,000 levels.
func TestSyntaxAgreesWithEncodingJSON(t *testing.T) {
	valid := 0
	for doc := range mutated(200_000) {
		want := json.Valid([]byte(doc)) && utf8.ValidString(doc)
		if want {
			valid++
		}
		if got := looksJSON(doc); got != want {
			t.Fatalf("%q: JSON = %v, want %v", doc, got, want)
		}
	}
	if valid < 10_000 {
		t.Errorf("%d of the texts are valid: too few to tell anything", valid)
	}
}

// looksJSON is the scanner's verdict on syntax alone.
func looksJSON(doc string) bool {
	s := scanner{src: doc}
	return s.value() && s.end()
}

// TestStorableInPostgres has PostgreSQL store and show again what was found storable: no
// error, the same value, and no more text than promised.
func TestStorableInPostgres(t *testing.T) {
	t.Parallel()
	docs := slices.Collect(maps.Values(storableDocs))
	for doc := range mutated(20_000) {
		if checkStorable([]byte(doc)) == nil {
			docs = append(docs, doc)
		}
	}
	conn, err := pgx.Connect(t.Context(), newDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	for batch := range slices.Chunk(docs, 500) {
		rows, err := conn.Query(t.Context(), "SELECT d::jsonb::text FROM unnest($1::text[]) WITH ORDINALITY AS u (d, n) ORDER BY n", batch)
		if err != nil {
			t.Fatal(err)
		}
		shown, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("store a batch: %v", err)
		}
		for i, got := range shown {
			if !reflect.DeepEqual(exact(decode(t, got)), exact(decode(t, batch[i]))) {
				t.Errorf("%.200q came back as %.200q", batch[i], got)
			}
			// jsonb prints a space after each comma and colon.
			if most := maxExpandedLen + len(batch[i]); len(got) > most {
				t.Errorf("%.200q came back as %d bytes, want at most %d", batch[i], len(got), most)
			}
		}
	}
}

// exact replaces the numbers in v by what they stand for, so that 1e2 equals 100.
func exact(v any) any {
	switch v := v.(type) {
	case json.Number:
		n, ok := new(big.Rat).SetString(v.String())
		if !ok {
			panic("not a number: " + v.String())
		}
		return n.RatString()
	case []any:
		for i := range v {
			v[i] = exact(v[i])
		}
	case map[string]any:
		for name := range v {
			v[name] = exact(v[name])
		}
	}
	return v
}

// TestSkipPlain tries every byte at every place of a word, after it and before it.
func TestSkipPlain(t *testing.T) {
	for c := range 256 {
		special := c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf
		for at := range 20 {
			text := []byte(strings.Repeat("a", 20))
			text[at] = byte(c)
			want := len(text)
			if special {
				want = at
			}
			if got := skipPlain(string(text), 0); got != want {
				t.Fatalf("skipPlain with byte %#x at %d = %d, want %d", c, at, got, want)
			}
			// The neighbours must not disturb it: 0x1f borrows, 0xff carries.
			for _, after := range []byte{0, ' ', '!', '"', '#', '[', '\\', ']', 0x7f, 0x80, 0xff} {
				if at == len(text)-1 {
					break
				}
				text[at+1] = after
				want := at
				if !special {
					want = len(text)
					if after < ' ' || after == '"' || after == '\\' || after >= utf8.RuneSelf {
						want = at + 1
					}
				}
				if got := skipPlain(string(text), 0); got != want {
					t.Fatalf("skipPlain with bytes %#x %#x at %d = %d, want %d", c, after, at, got, want)
				}
			}
		}
	}
}

func FuzzCheckStorable(f *testing.F) {
	for _, doc := range storableDocs {
		f.Add([]byte(doc))
	}
	for _, tt := range refusedDocs {
		if len(tt.doc) < 10_000 {
			f.Add([]byte(tt.doc))
		}
	}
	for _, tt := range brokenDocs {
		if len(tt.doc) < 10_000 {
			f.Add([]byte(tt.doc))
		}
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		err := checkStorable(doc)
		valid := json.Valid(doc) && utf8.Valid(doc)
		if err == nil && !valid {
			t.Errorf("%q passed, but is no JSON in UTF-8", doc)
		}
		if s, broken := errors.AsType[*syntaxError](err); broken {
			if valid {
				t.Errorf("%q: %v, but encoding/json takes it", doc, err)
			}
			if s.Offset < 0 || s.Offset > len(doc) {
				t.Errorf("%q: offset %d is outside", doc, s.Offset)
			}
		}
		if err != nil {
			return
		}
		if depth := depthOf(doc); depth > maxDepth {
			t.Errorf("%q passed, but is %d levels deep", doc, depth)
		}
		if i := strings.Index(strings.ReplaceAll(string(doc), `\\`, ""), `\u0000`); i >= 0 {
			t.Errorf("%q passed, but has a NUL at %d", doc, i)
		}
		var v any
		if err := json.Unmarshal(doc, &v); err == nil && strings.Count(string(doc), "\ufffd")+strings.Count(strings.ToLower(string(doc)), `\ufffd`) == 0 {
			if out, err := json.Marshal(v); err == nil && strings.Contains(string(out), "\ufffd") {
				t.Errorf("%q passed, but has half a surrogate pair", doc)
			}
		}
	})
}

// depthOf measures nesting without our scanner.
func depthOf(doc []byte) int {
	dec := json.NewDecoder(strings.NewReader(string(doc)))
	depth, deepest := 0, 0
	for {
		tok, err := dec.Token()
		if err != nil {
			return deepest
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}

func BenchmarkCheckStorable(b *testing.B) {
	for name, doc := range benchmarkPayloads() {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(doc)))
			b.ReportAllocs()
			for b.Loop() {
				if err := checkStorable([]byte(doc)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
