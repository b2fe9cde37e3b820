package main

import (
	"encoding/hex"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

// canonical returns the canonical form of a payload.
func canonical(payload string) string {
	var c canonicalizer
	if rest := c.value(payload); strings.TrimSpace(rest) != "" {
		panic("not read: " + rest)
	}
	return string(c.buf)
}

func TestCanonical(t *testing.T) {
	for _, tt := range []struct{ name, payload, want string }{
		{"empty", ` { } `, `{}`},
		{"white space", "{ \"a\" :\t[ 1 ,\r\n2 , [ ] , { } ] , \"b\" : null }", `{"a":[1,2,[],{}],"b":null}`},
		{"order", `{"b":1,"a":2}`, `{"a":2,"b":1}`},
		{"order at every level", `{"z":[{"b":{"y":1,"x":2},"a":0}],"a":{"d":1,"c":2}}`, `{"a":{"c":2,"d":1},"z":[{"a":0,"b":{"x":2,"y":1}}]}`},
		{"order of arrays is kept", `{"a":[3,1,2]}`, `{"a":[3,1,2]}`},
		{"prefixes", `{"ab":1,"a":2,"":3,"a!":4}`, `{"":3,"a":2,"a!":4,"ab":1}`},
		{"order after unescaping", `{"\u0062":1,"a":2}`, `{"a":2,"b":1}`},
		{"the last duplicate", `{"a":1,"b":2,"a":3}`, `{"a":3,"b":2}`},
		{"the last duplicate, in order", `{"a":1,"a":2,"a":3}`, `{"a":3}`},
		{"the last duplicate, escaped", `{"b":0,"a":1,"\u0061":2}`, `{"a":2,"b":0}`},
		{"duplicates at depth", `{"b":[{"x":1,"x":{"q":1,"p":2}}],"b":[{"x":{"q":2,"p":1},"a":{"n":1,"n":2}}]}`, `{"b":[{"a":{"n":2},"x":{"p":1,"q":2}}]}`},
		{"one escaping", `{"a":"\u0041\/\t\u001F\u007f\u00E9\ud83d\ude00\"\\"}`, "{\"a\":\"A/\\u0009\\u001f\x7fé😀\\\"\\\\\"}"},
		{"escapes end to end", `{"a":"\n\n","b":"\\"}`, `{"a":"\u000a\u000a","b":"\\"}`},
		{"non-ASCII", `{"ключ":"значение","é":"ü"}`, `{"é":"ü","ключ":"значение"}`},
		{"numbers as written", `{"a":[1,1.0,1e2,100,-0,0,1E2,12345678901234567890]}`, `{"a":[1,1.0,1e2,100,-0,0,1E2,12345678901234567890]}`},
		{"words", `{"a":[true,false,null]}`, `{"a":[true,false,null]}`},
	} {
		if got := canonical(tt.payload); got != tt.want {
			t.Errorf("%s: canonical(%s) = %s, want %s", tt.name, tt.payload, got, tt.want)
		}
	}
	for name, doc := range storableDocs {
		t.Run(name, func(t *testing.T) { checkCanonical(t, doc) })
	}
}

// checkCanonical checks what must hold for the canonical form of every valid document: it is
// valid, its own canonical form, and stands for the same value.
func checkCanonical(t *testing.T, doc string) {
	t.Helper()
	got := canonical(doc)
	if !json.Valid([]byte(got)) {
		t.Fatalf("canonical(%q) = %q, which is no JSON", doc, got)
	}
	if again := canonical(got); again != got {
		t.Errorf("canonical(%q) = %q, and of that %q", doc, got, again)
	}
	// Not with go-cmp, which compares deep nesting in exponential time.
	if !reflect.DeepEqual(decode(t, doc), decode(t, got)) {
		t.Errorf("canonical(%q) = %q, which stands for something else", doc, got)
	}
}

// decode reads a document with its numbers as text.
func decode(t *testing.T, doc string) (v any) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(doc))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("decode %q: %v", doc, err)
	}
	return v
}

// TestFingerprint has groups of requests: those of one group are the same request in
// other words, those of different groups are not.
func TestFingerprint(t *testing.T) {
	groups := [][]string{
		{`{"name":"a"}`, `{"name":"a","payload":null}`, `{"payload":{},"name":"a"}`, ` { "name" : "\u0061" , "payload" : { } } `,
			`{"name":"a","idempotency_key":"other"}`, `{"name":"a","max_retries":null,"queue":null,"run_at":null,"delay_ms":null,"timeout_ms":null}`,
			`{"name":"b","payload":{"x":1},"payload":{},"name":"a"}`},
		{`{"name":"b"}`},
		{`{"name":"a","payload":{"x":1,"y":{"z":[1,2],"w":"A"}}}`, `{"payload":{"y":{"w":"\u0041","z":[ 1, 2 ]},"x":1},"name":"a"}`, `{"name":"a","payload":{"x":0,"y":{"z":[1,2],"w":"A"},"x":1}}`},
		{`{"name":"a","payload":{"x":1,"y":{"z":[2,1],"w":"A"}}}`},
		{`{"name":"a","payload":{"x":1,"y":{"z":[1,2],"w":"a"}}}`},
		{`{"name":"a","payload":{"x":1,"z":[1,2],"w":"A"}}`},
		{`{"name":"a","payload":{"x":1}}`},
		{`{"name":"a","payload":{"x":1.0}}`},
		{`{"name":"a","payload":{"x":"1"}}`},
		{`{"name":"a","payload":{"x":null}}`},
		{`{"name":"a","payload":{"x":""}}`},
		{`{"name":"a","payload":{"x":"\\u0041"}}`},
		{`{"name":"a","payload":{"x":[]}}`},
		{`{"name":"a","payload":{"x":{}}}`},
		{`{"name":"a","payload":{"x":"\"},{"}}`},
		{`{"name":"a","payload":{"":""}}`},
		{`{"name":"a","max_retries":3}`, `{"max_retries": 3 ,"name":"a"}`},
		{`{"name":"a","max_retries":30}`},
		{`{"name":"a","timeout_ms":3}`},
		{`{"name":"a","delay_ms":3}`},
		{`{"name":"a","delay_ms":0}`},
		{`{"name":"a","max_retries":3,"timeout_ms":3}`},
		{`{"name":"a","queue":"low"}`, `{"name":"a","queue":"\u006cow"}`},
		{`{"name":"a","queue":"default"}`},
		{`{"name":"a","run_at":"2026-11-01T00:00:00Z"}`},
		{`{"name":"a","run_at":"2026-11-01T00:00:00+00:00"}`},
		{`{"name":"a\u000b"}`[:10] + ` max_retries3"}`},
	}
	seen := map[[32]byte]string{}
	for _, group := range groups {
		first := mustParse(t, group[0], keyHeader{true, "k"}).Hash
		if other, ok := seen[first]; ok {
			t.Errorf("%s and %s have one hash", group[0], other)
		}
		seen[first] = group[0]
		for _, body := range group[1:] {
			// The key is not part of the request, wherever it comes from.
			if got := mustParse(t, body, keyHeader{true, "k2"}).Hash; got != first {
				t.Errorf("%s and %s have two hashes", group[0], body)
			}
		}
	}
}

// TestFingerprintIsStable pins hashes: they are stored, so a change of the recipe
// makes every retry of an older request a 422.
func TestFingerprintIsStable(t *testing.T) {
	for body, want := range map[string]string{
		`{"name":"a"}`: "0cc5191702b7695959d3c4cbb0642f8d6b7222b8c734ca9fa0fd34bce410dbe4",
		`{"name":"process_video","payload":{"file":"clip.mp4","b":[1.50,"\u0041\n"]},"max_retries":3,"timeout_ms":5,"delay_ms":0,"queue":"low"}`: "5a736f17d6538ecd8ed14b33381c63382e340b87c434a0c0bee602c0568908d1",
		`{"name":"a","run_at":"2026-11-01t00:00:00z"}`: "639cbc569af7d79a2cf411bd59f02c9ee4e405812b1372106d3a145d16081174",
	} {
		hash := mustParse(t, body, keyHeader{true, "k"}).Hash
		if got := hex.EncodeToString(hash[:]); got != want {
			t.Errorf("hash of %s = %s, want %s", body, got, want)
		}
	}
}

// TestCanonicalTakesLinearTime gives the canonical form its worst cases, 4 MiB of each.
// They take a fraction of a second; looking for the end of each string or object again
// and again would take minutes.
func TestCanonicalTakesLinearTime(t *testing.T) {
	const size = 4 << 20
	for name, payload := range map[string]string{
		"escapes":           `{"a":"` + strings.Repeat(`\n`, size/2) + `"}`,
		"non-ASCII":         `{"a":"` + strings.Repeat(`é`, size/2) + `"}`,
		"unordered nesting": nested(`{"b":`, `,"a":0}`, maxDepth, `"`+strings.Repeat("x", size)+`"`),
		"descending names":  descending(size / 11),
		"equal names":       `{` + strings.Repeat(`"b":1,`, size/6) + `"a":2}`,
		"small arrays":      `{"a":[` + strings.Repeat(`[],`, size/3) + `1]}`,
	} {
		began := time.Now()
		canonical(payload)
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("%s: took %v", name, took)
		}
	}
}

// descending returns an object of n members in descending order.
func descending(n int) string {
	var b strings.Builder
	b.WriteByte('{')
	for i := range n {
		b.WriteString(`"`)
		b.WriteString(hex.EncodeToString([]byte{byte((n - i) >> 16), byte((n - i) >> 8), byte(n - i)}))
		b.WriteString(`":1,`)
	}
	b.WriteString(`"":0}`)
	return b.String()
}
