package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var testLimits = limits{maxTimeout: 24 * time.Hour, queues: []string{"default", "low"}}

// mustParse parses a body that has to be valid.
func mustParse(t *testing.T, body string, key keyHeader) submission {
	t.Helper()
	sub, err := parseSubmission([]byte(body), key, testLimits)
	if err != nil {
		t.Fatalf("parseSubmission(%.200q) = %v", body, err)
	}
	return sub
}

func TestParseSubmission(t *testing.T) {
	runAt := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	tests := []struct {
		name, body string
		want       submission
	}{
		{"name alone", `{"name":"a"}`, submission{Name: "a", Payload: "{}"}},
		{"null payload", `{"name":"a","payload":null}`, submission{Name: "a", Payload: "{}"}},
		{"line break after it", "{\"name\":\"a\"}\n", submission{Name: "a", Payload: "{}"}},
		{"everything null", `{"name":"a","payload":null,"idempotency_key":null,"max_retries":null,"timeout_ms":null,"delay_ms":null,"queue":null,"run_at":null}`, submission{Name: "a", Payload: "{}"}},
		{"payload as received", ` { "payload" : { "b" : 1.50 , "a" : [ ] } , "name" : "a" } `, submission{Name: "a", Payload: `{ "b" : 1.50 , "a" : [ ] }`}},
		{"everything", `{"name":"a","payload":{"x":1},"max_retries":7,"timeout_ms":1500,"delay_ms":250,"queue":"low"}`,
			submission{Name: "a", Payload: `{"x":1}`, MaxRetries: new(int32(7)), TimeoutMS: new(int64(1500)), DelayMS: new(int64(250)), Queue: "low"}},
		{"least", `{"name":"a","max_retries":0,"timeout_ms":1,"delay_ms":0}`,
			submission{Name: "a", Payload: "{}", MaxRetries: new(int32(0)), TimeoutMS: new(int64(1)), DelayMS: new(int64(0))}},
		{"most", `{"name":"a","max_retries":100,"timeout_ms":86400000,"delay_ms":31536000000}`,
			submission{Name: "a", Payload: "{}", MaxRetries: new(int32(100)), TimeoutMS: new(int64(86_400_000)), DelayMS: new(int64(31_536_000_000))}},
		{"minus zero", `{"name":"a","max_retries":-0}`, submission{Name: "a", Payload: "{}", MaxRetries: new(int32(0))}},
		{"run_at", `{"name":"a","run_at":"` + runAt.Format(time.RFC3339) + `"}`, submission{Name: "a", Payload: "{}", RunAt: &runAt}},
		{"run_at with an offset", `{"name":"a","run_at":"` + runAt.In(time.FixedZone("", -5*3600)).Format(time.RFC3339) + `"}`, submission{Name: "a", Payload: "{}", RunAt: &runAt}},
		{"run_at in small letters", `{"name":"a","run_at":"` + strings.ToLower(runAt.Format(time.RFC3339)) + `"}`, submission{Name: "a", Payload: "{}", RunAt: &runAt}},
		{"run_at in the past", `{"name":"a","run_at":"1999-12-31T23:59:59.123456Z"}`, submission{Name: "a", Payload: "{}", RunAt: new(time.Date(1999, 12, 31, 23, 59, 59, 123456000, time.UTC))}},
		{"longest name", `{"name":"` + strings.Repeat("ü", maxNameLen) + `"}`, submission{Name: strings.Repeat("ü", maxNameLen), Payload: "{}"}},
		{"longest name, escaped", `{"name":"` + strings.Repeat(`\ud83d\ude00`, maxNameLen) + `"}`, submission{Name: strings.Repeat("😀", maxNameLen), Payload: "{}"}},
		{"spaces around the name", `{"name":" a b "}`, submission{Name: " a b ", Payload: "{}"}},
		{"escapes in the name", `{"name":"a\u0041\"\\\/"}`, submission{Name: `aA"\/`, Payload: "{}"}},
		{"escaped member names", `{"\u006eame":"a","p\u0061yload":{"x":1}}`, submission{Name: "a", Payload: `{"x":1}`}},
		{"the last name wins", `{"name":"a","name":"b"}`, submission{Name: "b", Payload: "{}"}},
		{"the last name wins over a wrong one", `{"name":1,"n\u0061me":"b"}`, submission{Name: "b", Payload: "{}"}},
		{"the last payload wins", `{"name":"a","payload":{"x":1},"payload":{"x":2}}`, submission{Name: "a", Payload: `{"x":2}`}},
		{"the last payload wins over an unstorable one", `{"name":"a","payload":{"x":"\u0000"},"payload":{"x":2}}`, submission{Name: "a", Payload: `{"x":2}`}},
		{"the last payload is null", `{"name":"a","payload":{"x":1},"payload":null}`, submission{Name: "a", Payload: `{}`}},
		{"the last delay is null", `{"name":"a","delay_ms":5,"delay_ms":null,"run_at":"1999-12-31T23:59:59Z"}`, submission{Name: "a", Payload: `{}`, RunAt: new(time.Date(1999, 12, 31, 23, 59, 59, 0, time.UTC))}},
	}
	for _, tt := range tests {
		got, err := parseSubmission([]byte(tt.body), keyHeader{}, testLimits)
		if err != nil {
			t.Errorf("%s: parseSubmission(%.200q) error = %v", tt.name, tt.body, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: parseSubmission(%.200q) differs (-want +got):\n%s", tt.name, tt.body, diff)
		}
	}
}

func TestParseSubmissionStorable(t *testing.T) {
	for name, doc := range storableDocs {
		body := `{"name":"a","payload":{"p":` + doc + `}}`
		if strings.HasPrefix(name, "deepest") {
			body = `{"name":"a","payload":` + nested(`{"a":`, `}`, maxDepth-1, `[]`) + `}`
		}
		if _, err := parseSubmission([]byte(body), keyHeader{}, testLimits); err != nil {
			t.Errorf("%s: parseSubmission error = %v, want nil", name, err)
		}
	}
	for _, tt := range refusedDocs {
		payload := `{"p":` + tt.doc + `}`
		got, err := parseSubmission([]byte(`{"name":"a","payload":`+payload+`}`), keyHeader{}, testLimits)
		errs, ok := errors.AsType[fieldErrors](err)
		if !ok || len(errs) != 1 || errs[0].Type != "json_unstorable" || !strings.Contains(errs[0].Msg, tt.want) {
			t.Errorf("%s: parseSubmission = %.200v, %v, want one json_unstorable error with %q", tt.name, got, err, tt.want)
			continue
		}
		if diff := cmp.Diff([]any{"body", "payload"}, errs[0].Loc); diff != "" {
			t.Errorf("%s: loc differs (-want +got):\n%s", tt.name, diff)
		}
	}
	for _, tt := range brokenDocs {
		body := `{"name":1,"no":2,"payload":` + tt.doc + `}`
		_, err := parseSubmission([]byte(body), keyHeader{}, testLimits)
		if _, ok := errors.AsType[*syntaxError](err); !ok {
			t.Errorf("%s: parseSubmission(%.200q) error = %v, want a syntax error", tt.name, body, err)
		}
		_, err = parseSubmission([]byte(tt.doc), keyHeader{present: true}, testLimits)
		if got, ok := errors.AsType[*syntaxError](err); !ok || got.Offset != tt.want {
			t.Errorf("%s: parseSubmission(%.200q) error = %v, want a syntax error at byte %d", tt.name, tt.doc, err, tt.want)
		}
	}
}

func TestParseSubmissionFieldErrors(t *testing.T) {
	type wants = []string // "type member" of each error, in order
	ahead := func(d time.Duration) string { return time.Now().Add(d).Format(time.RFC3339) }
	tests := []struct {
		name, body string
		want       wants
	}{
		{"array", `[]`, wants{"model_attributes_type"}},
		{"null", `null`, wants{"model_attributes_type"}},
		{"string", `"{}"`, wants{"model_attributes_type"}},
		{"a million deep", nested("[", "]", 1_000_000), wants{"model_attributes_type"}},
		{"empty object", `{}`, wants{"missing name"}},
		{"the transcript's", `{"payload":[1],"max_retries":"x"}`, wants{"missing name", "dict_type payload", "int_type max_retries"}},
		{"everything at once", `{"z":1,"run_at":"soon","queue":"no","delay_ms":-1,"timeout_ms":0,"max_retries":101,"idempotency_key":5,"payload":"x","name":""}`,
			wants{"string_too_short name", "dict_type payload", "string_type idempotency_key", "less_than_equal max_retries", "greater_than_equal timeout_ms",
				"greater_than_equal delay_ms", "literal_error queue", "value_error run_at", "datetime_parsing run_at", "extra_forbidden z"}},
		{"all that is wrong with a payload", `{"name":"a","payload":{"a":"\u0000\ud800","b":1e500,"c":` + nested("[", "]", 200) + `}}`,
			wants{"json_unstorable payload", "json_unstorable payload", "json_unstorable payload", "json_unstorable payload"}},

		{"name null", `{"name":null}`, wants{"string_type name"}},
		{"name a number", `{"name":1}`, wants{"string_type name"}},
		{"name too long", `{"name":"` + strings.Repeat("ü", maxNameLen+1) + `"}`, wants{"string_too_long name"}},
		{"name too long, escaped", `{"name":"` + strings.Repeat(`\u0041`, maxNameLen+1) + `"}`, wants{"string_too_long name"}},
		{"name white space", `{"name":" \u00a0\u3000"}`, wants{"string_pattern_mismatch name"}},
		{"name with a line break", `{"name":"a\nb"}`, wants{"string_pattern_mismatch name"}},
		{"name with NUL", `{"name":"a\u0000"}`, wants{"string_pattern_mismatch name"}},
		{"name with DEL", "{\"name\":\"a\x7f\"}", wants{"string_pattern_mismatch name"}},
		{"name with C1", `{"name":"a\u009b31m"}`, wants{"string_pattern_mismatch name"}},
		{"name with a line separator", `{"name":"a\u2028b"}`, wants{"string_pattern_mismatch name"}},
		{"name with a paragraph separator", "{\"name\":\"a\u2029b\"}", wants{"string_pattern_mismatch name"}},
		{"name with half a surrogate pair", `{"name":"a\ud83d"}`, wants{"json_unstorable name"}},
		{"the last name is wrong", `{"name":"a","name":7}`, wants{"string_type name"}},

		{"payload an array", `{"name":"a","payload":[]}`, wants{"dict_type payload"}},
		{"payload a string", `{"name":"a","payload":"{}"}`, wants{"dict_type payload"}},
		{"the last payload is unstorable", `{"name":"a","payload":{},"payload":{"a":"\u0000"}}`, wants{"json_unstorable payload"}},
		{"deep payload", `{"name":"a","payload":` + nested(`{"a":`, `}`, 150_000, `1`) + `}`, wants{"json_unstorable payload"}},
		{"large payload", `{"name":"a","payload":{"a":"` + strings.Repeat("x", maxBodyBytes) + `"}}`, wants{"json_unstorable payload"}},

		{"max_retries 3.0", `{"name":"a","max_retries":3.0}`, wants{"int_type max_retries"}},
		{"max_retries 1e1", `{"name":"a","max_retries":1e1}`, wants{"int_type max_retries"}},
		{"max_retries text", `{"name":"a","max_retries":"3"}`, wants{"int_type max_retries"}},
		{"max_retries true", `{"name":"a","max_retries":true}`, wants{"int_type max_retries"}},
		{"max_retries object", `{"name":"a","max_retries":{}}`, wants{"int_type max_retries"}},
		{"max_retries -1", `{"name":"a","max_retries":-1}`, wants{"greater_than_equal max_retries"}},
		{"max_retries 101", `{"name":"a","max_retries":101}`, wants{"less_than_equal max_retries"}},
		{"max_retries beyond int32", `{"name":"a","max_retries":4294967296}`, wants{"less_than_equal max_retries"}},
		{"max_retries beyond int64", `{"name":"a","max_retries":18446744073709551616}`, wants{"less_than_equal max_retries"}},
		{"max_retries below int64", `{"name":"a","max_retries":-` + strings.Repeat("9", 2000) + `}`, wants{"greater_than_equal max_retries"}},
		{"timeout_ms 0", `{"name":"a","timeout_ms":0}`, wants{"greater_than_equal timeout_ms"}},
		{"timeout_ms too long", `{"name":"a","timeout_ms":86400001}`, wants{"less_than_equal timeout_ms"}},
		{"delay_ms negative", `{"name":"a","delay_ms":-1}`, wants{"greater_than_equal delay_ms"}},
		{"delay_ms too long", `{"name":"a","delay_ms":31536000001}`, wants{"less_than_equal delay_ms"}},
		{"delay_ms and run_at", `{"name":"a","delay_ms":0,"run_at":"` + ahead(time.Hour) + `"}`, wants{"value_error run_at"}},

		{"queue unknown", `{"name":"a","queue":"other"}`, wants{"literal_error queue"}},
		{"queue empty", `{"name":"a","queue":""}`, wants{"literal_error queue"}},
		{"queue a number", `{"name":"a","queue":1}`, wants{"string_type queue"}},

		{"run_at a number", `{"name":"a","run_at":1700000000}`, wants{"string_type run_at"}},
		{"run_at empty", `{"name":"a","run_at":""}`, wants{"datetime_parsing run_at"}},
		{"run_at a date", `{"name":"a","run_at":"2026-12-01"}`, wants{"datetime_parsing run_at"}},
		{"run_at without an offset", `{"name":"a","run_at":"2026-12-01T00:00:00"}`, wants{"datetime_parsing run_at"}},
		{"run_at with a space", `{"name":"a","run_at":"2026-12-01 00:00:00Z"}`, wants{"datetime_parsing run_at"}},
		{"run_at with a comma", `{"name":"a","run_at":"2026-12-01T00:00:00,5Z"}`, wants{"datetime_parsing run_at"}},
		{"run_at with a one-digit hour", `{"name":"a","run_at":"2026-12-01T0:00:00Z"}`, wants{"datetime_parsing run_at"}},
		{"run_at on no day", `{"name":"a","run_at":"2026-02-30T00:00:00Z"}`, wants{"datetime_parsing run_at"}},
		{"run_at too far ahead", `{"name":"a","run_at":"` + ahead(maxDelay+2*time.Minute) + `"}`, wants{"less_than_equal run_at"}},
		{"run_at in the year 9999", `{"name":"a","run_at":"9999-12-31T23:59:59Z"}`, wants{"less_than_equal run_at"}},

		{"upper case (case 63)", `{"name":"a","NAME":"b"}`, wants{"extra_forbidden NAME"}},
		{"upper case payload (case 63)", `{"PAYLOAD":{"x":1},"name":"a"}`, wants{"extra_forbidden PAYLOAD"}},
		{"Kelvin sign", `{"name":"a","idempotency_\u212aey":"b"}`, wants{"extra_forbidden idempotency_\u212aey"}},
		{"misspelt (case 71)", `{"name":"a","max_retires":9}`, wants{"extra_forbidden max_retires"}},
		{"misspelt key", `{"name":"a","idempotencyKey":"k"}`, wants{"extra_forbidden idempotencyKey"}},
		{"unknown and null", `{"name":"a","x":null}`, wants{"extra_forbidden x"}},
		{"unknown twice", `{"name":"a","x":1,"x":2,"\u0078":3}`, wants{"extra_forbidden x"}},
		{"empty member name", `{"name":"a","":1}`, wants{"extra_forbidden "}},
		{"member name not for showing", `{"name":"a","a\u0000\n\u2028b\ud800":1}`, wants{"extra_forbidden a\ufffd\ufffd\ufffdb\ufffd"}},
		{"long member name", `{"name":"a","` + strings.Repeat("ü", 300_000) + `":1}`, wants{"extra_forbidden " + strings.Repeat("ü", 64)}},

		{"key too long (row 29)", `{"name":"a","idempotency_key":"` + strings.Repeat("k", maxKeyLen+1) + `"}`, wants{"string_too_long idempotency_key"}},
		{"key non-ASCII (row 30)", `{"name":"a","idempotency_key":"café"}`, wants{"string_pattern_mismatch idempotency_key"}},
		{"key with a control character", `{"name":"a","idempotency_key":"k\n1"}`, wants{"string_pattern_mismatch idempotency_key"}},
		{"key with NUL", `{"name":"a","idempotency_key":"k\u0000"}`, wants{"string_pattern_mismatch idempotency_key"}},
		{"key with half a surrogate pair", `{"name":"a","idempotency_key":"k\ud800"}`, wants{"string_pattern_mismatch idempotency_key"}},
		{"key a number", `{"name":"a","idempotency_key":7}`, wants{"string_type idempotency_key"}},
		{"blank key and no name", `{"idempotency_key":""}`, wants{"missing name"}},
	}
	for _, tt := range tests {
		// The key of the header changes nothing: that of the body must be valid all the same.
		for _, key := range []keyHeader{{}, {present: true}, {present: true, key: "h"}} {
			if key.present && len(tt.body) > 10_000 {
				break // once is enough for the large ones
			}
			_, err := parseSubmission([]byte(tt.body), key, testLimits)
			errs, ok := errors.AsType[fieldErrors](err)
			if !ok {
				t.Errorf("%s: parseSubmission(%.200q) error = %v, want field errors", tt.name, tt.body, err)
				continue
			}
			var got wants
			for _, e := range errs {
				got = append(got, strings.TrimSpace(fmt.Sprintf("%s %v", e.Type, append(e.Loc, "")[1])))
				if e.Msg == "" || e.Loc[0] != "body" {
					t.Errorf("%s: error %+v lacks a message or a place", tt.name, e)
				}
			}
			want := slices.Clone(tt.want)
			for i := range want {
				want[i] = strings.TrimSpace(want[i])
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: errors of %.200q differ (-want +got):\n%s", tt.name, tt.body, diff)
			}
		}
	}
}

// TestFieldErrorJSON pins what clients read.
func TestFieldErrorJSON(t *testing.T) {
	_, err := parseSubmission([]byte(`{"payload":[1],"max_retries":"x","timeout_ms":0,"delay_ms":99999999999,"queue":"x"}`), keyHeader{}, testLimits)
	got, err := json.Marshal(err)
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"type":"missing","loc":["body","name"],"msg":"Field required"},` +
		`{"type":"dict_type","loc":["body","payload"],"msg":"Input should be a valid dictionary"},` +
		`{"type":"int_type","loc":["body","max_retries"],"msg":"Input should be a valid integer"},` +
		`{"type":"greater_than_equal","loc":["body","timeout_ms"],"msg":"Input should be greater than or equal to 1"},` +
		`{"type":"less_than_equal","loc":["body","delay_ms"],"msg":"Input should be less than or equal to 31536000000"},` +
		`{"type":"literal_error","loc":["body","queue"],"msg":"Input should be one of: default, low"}]`
	if string(got) != want {
		t.Errorf("errors = %s\nwant     %s", got, want)
	}
}

func TestManyUnknownMembers(t *testing.T) {
	var body strings.Builder
	body.WriteString(`{"name":"a"`)
	for i := range 50_000 {
		fmt.Fprintf(&body, `,"x%d":0`, i)
	}
	body.WriteString(`}`)
	_, err := parseSubmission([]byte(body.String()), keyHeader{}, testLimits)
	if errs, ok := errors.AsType[fieldErrors](err); !ok || len(errs) != maxUnknown {
		t.Errorf("%d errors, want %d", len(errs), maxUnknown)
	}
}

func TestQueueNames(t *testing.T) {
	for queue, want := range map[string]bool{
		"a": true, "a-b_c9": true, strings.Repeat("q", 64): true,
		"": false, "A": false, "a b": false, "a.b": false, "ä": false, `a\u0000`: false, strings.Repeat("q", 65): false,
	} {
		sub, err := parseSubmission([]byte(`{"name":"a","queue":"`+queue+`"}`), keyHeader{}, limits{maxTimeout: time.Hour})
		if (err == nil) != want || want && sub.Queue != queue {
			t.Errorf("queue %q = %q, %v, want valid %v", queue, sub.Queue, err, want)
		}
	}
}

// TestRunAtAhead has the clock in the call: a year ahead by a client's clock that is
// half a minute fast is still taken.
func TestRunAtAhead(t *testing.T) {
	body := fmt.Sprintf(`{"name":"a","run_at":"%s"}`, time.Now().Add(maxDelay+clockSlack/2).Format(time.RFC3339Nano))
	if sub := mustParse(t, body, keyHeader{}); sub.RunAt == nil {
		t.Error("RunAt = nil")
	}
}

func TestSubmissionKey(t *testing.T) {
	long := strings.Repeat("k", maxKeyLen)
	tests := []struct {
		name   string
		header []string
		member string // JSON of idempotency_key, "" = not sent
		want   string
		blank  bool // a *keyError is wanted
	}{
		{"row 22: none", nil, ``, "", false},
		{"row 23: body null", nil, `null`, "", false},
		{"row 18: body", nil, `"k"`, "k", false},
		{"body with spaces around", nil, `"  k \t"`, "k", false},
		{"body with spaces inside", nil, `"k 1"`, "k 1", false},
		{"body with escapes", nil, `"\u006b\/"`, "k/", false},
		{"body with quotes", nil, `"\"k\""`, `"k"`, false},
		{"row 28: longest body", nil, `"` + long + `"`, long, false},
		{"longest body, spaces around", nil, `" ` + long + ` "`, long, false},
		{"row 28: longest header", []string{long}, ``, long, false},
		{"header", []string{"h"}, ``, "h", false},
		{"row 19: quoted header", []string{`"h"`}, ``, "h", false},
		{"rows 16 and 17: both", []string{"h"}, `"k"`, "h", false},
		{"header and blank body", []string{"h"}, `" "`, "h", false},
		{"header and null body", []string{"h"}, `null`, "h", false},
		{"row 25: blank header and body", []string{""}, `"k"`, "k", false},
		{"row 24: blank header", []string{" "}, ``, "", true},
		{"blank header and null body", []string{""}, `null`, "", true},
		{"row 26: empty body", nil, `""`, "", true},
		{"row 26: spaces in the body (case 79)", nil, `"  "`, "", true},
		{"both blank", []string{""}, `""`, "", true},
		{"blank wins over an earlier one", nil, `"k","idempotency_key":""`, "", true},
		{"null wins over an earlier one", nil, `"","idempotency_key":null`, "", false},
	}
	for _, tt := range tests {
		header, err := parseKeyHeader(tt.header)
		if err != nil {
			t.Fatalf("%s: parseKeyHeader(%q) = %v", tt.name, tt.header, err)
		}
		body := `{"name":"a"}`
		if tt.member != "" {
			body = `{"name":"a","idempotency_key":` + tt.member + `}`
		}
		got, err := parseSubmission([]byte(body), header, testLimits)
		if _, blank := errors.AsType[*keyError](err); blank != tt.blank || !blank && err != nil {
			t.Errorf("%s: error = %v, want a key error %v", tt.name, err, tt.blank)
		}
		if got.Key != tt.want {
			t.Errorf("%s: key = %q, want %q", tt.name, got.Key, tt.want)
		}
		if hashed := got.Hash != [32]byte{}; hashed != (tt.want != "") {
			t.Errorf("%s: hashed = %v with key %q", tt.name, hashed, got.Key)
		}
	}
}

func FuzzParseSubmission(f *testing.F) {
	for _, doc := range storableDocs {
		f.Add([]byte(`{"name":"a","payload":{"p":`+doc+`}}`), "k", true)
	}
	for _, tt := range refusedDocs {
		if len(tt.doc) < 10_000 {
			f.Add([]byte(`{"name":"a","payload":{"p":`+tt.doc+`}}`), "k", true)
		}
	}
	for _, tt := range brokenDocs {
		if len(tt.doc) < 10_000 {
			f.Add([]byte(`{"name":"a","payload":`+tt.doc+`}`), "", true)
			f.Add([]byte(tt.doc), "", false)
		}
	}
	f.Add([]byte(`{"name":"a","payload":{"b":1,"a":{"d":[1,{}],"c":"\u0041"}},"idempotency_key":" k ","max_retries":3,"timeout_ms":1,"delay_ms":5,"queue":"low"}`), "", true)
	f.Add([]byte(`{"name":"a","run_at":"2026-12-01T00:00:00.5+01:00","delay_ms":null}`), "k", true)
	f.Fuzz(func(t *testing.T, body []byte, key string, present bool) {
		if !isPrintable(key) || len(key) > maxKeyLen {
			key = ""
		}
		header := keyHeader{present || key != "", key}
		received := bytes.Clone(body)
		sub, err := parseSubmission(body, header, testLimits)
		if !bytes.Equal(body, received) {
			t.Fatalf("the body was changed to %q", body)
		}
		valid := json.Valid(body) && utf8.Valid(body)
		if err != nil {
			checkRefusal(t, body, valid, err)
			return
		}
		if !valid {
			t.Errorf("%q passed, but is no JSON in UTF-8", body)
		}
		if err := checkStorable([]byte(sub.Payload)); err != nil || sub.Payload[0] != '{' {
			t.Errorf("payload %q of %q: %v", sub.Payload, body, err)
		}
		if sub.Name == "" || utf8.RuneCountInString(sub.Name) > maxNameLen || !utf8.ValidString(sub.Name) || strings.ContainsFunc(sub.Name, isControl) {
			t.Errorf("name %q of %q", sub.Name, body)
		}
		if !isPrintable(sub.Key) || len(sub.Key) > maxKeyLen || sub.Key == "" && header.present {
			t.Errorf("key %q of %q with header %+v", sub.Key, body, header)
		}
		var indented bytes.Buffer
		if err := json.Indent(&indented, body, "\t", "  "); err != nil {
			t.Fatalf("indent %q: %v", body, err)
		}
		again, err := parseSubmission(indented.Bytes(), header, testLimits)
		if err != nil {
			// White space counts where the printed length is estimated, and for nothing else.
			if !strings.Contains(err.Error(), "print as more") {
				t.Errorf("%q was refused when indented: %v", body, err)
			}
			return
		}
		if again.Hash != sub.Hash || again.Name != sub.Name || again.Key != sub.Key {
			t.Errorf("%q and its indented form differ: %+v, %+v", body, sub, again)
		}
		checkCanonical(t, sub.Payload)
	})
}

// checkRefusal holds an error against the contract of parseSubmission.
func checkRefusal(t *testing.T, body []byte, valid bool, err error) {
	t.Helper()
	switch err := err.(type) {
	case *syntaxError:
		if valid {
			t.Errorf("%q: %v, but encoding/json takes it", body, err)
		}
		if err.Offset < 0 || err.Offset > len(body) {
			t.Errorf("%q: offset %d is outside", body, err.Offset)
		}
	case fieldErrors:
		if len(err) == 0 {
			t.Errorf("%q: no field errors in %#v", body, err)
		}
		if out, err := json.Marshal(err); err != nil || !utf8.Valid(out) {
			t.Errorf("%q: error as JSON = %q, %v", body, out, err)
		}
	case *keyError:
	default:
		t.Errorf("%q: error is a %T", body, err)
	}
}

// benchmarkPayloads are objects such that a request with name and payload has about the
// length that is their key.
func benchmarkPayloads() map[string]string {
	member := func(i int) string {
		return fmt.Sprintf(`"key%d":{"path":"/srv/videos/%d/clip.mp4","size":%d,"ratio":1.7778,"tags":["a","b"],"done":false}`, i, i, 1000003*i)
	}
	object := func(n int) string {
		members := make([]string, n)
		for i := range members {
			members[i] = member(i)
		}
		return "{" + strings.Join(members, ",") + "}"
	}
	return map[string]string{"100B": `{"file":"clip.mp4","width":1920,"height":1080,"codec":"h264"}`, "1kB": object(9), "100kB": object(950)}
}

func BenchmarkParseSubmission(b *testing.B) {
	for name, payload := range benchmarkPayloads() {
		body := []byte(`{"name":"process_video","payload":` + payload + `}`)
		for _, key := range []string{"", "8e03978e-40d5-43e8-bc93-6894a57f9324"} {
			label := name + "/key=no"
			if key != "" {
				label = name + "/key=yes"
			}
			b.Run(label, func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := parseSubmission(body, keyHeader{key != "", key}, testLimits); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkEncodingJSON is what parseSubmission is compared with: the least that
// encoding/json can do, with nothing checked that it does not check by itself.
func BenchmarkEncodingJSON(b *testing.B) {
	for name, payload := range benchmarkPayloads() {
		body := []byte(`{"name":"process_video","payload":` + payload + `}`)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				var req struct {
					Name       string          `json:"name"`
					Payload    json.RawMessage `json:"payload"`
					Key        *string         `json:"idempotency_key"`
					MaxRetries *int32          `json:"max_retries"`
					TimeoutMS  *int64          `json:"timeout_ms"`
					DelayMS    *int64          `json:"delay_ms"`
					Queue      *string         `json:"queue"`
					RunAt      *time.Time      `json:"run_at"`
				}
				dec := json.NewDecoder(bytes.NewReader(body))
				dec.DisallowUnknownFields()
				if err := dec.Decode(&req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
