package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestAPIKeys(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	open := startGateway(t, dsn, nil)
	id := open.submitted(t, `{"name":"a"}`)
	full := func(c *config) { c.APIKeys = []string{"new", "old"} }
	both := func(c *config) { full(c); c.ReadAPIKeys = []string{"reader"} }
	for _, test := range []struct {
		set    func(*config)
		given  string
		method string
		status int
	}{
		{full, "", "POST", 401},
		{full, "Bearer new", "POST", 202},
		{full, "bearer old", "POST", 202},
		{full, "Bearer  old ", "POST", 202},
		{full, "Bearer ol", "POST", 401},
		{full, "Bearer oldd", "POST", 401},
		{full, "Bearer ", "POST", 401},
		{full, "Bearer", "POST", 401},
		{full, "old", "POST", 401},
		{full, "Basic old", "POST", 401},
		{full, "Bearer reader", "GET", 401},
		{full, "", "GET", 401},
		{full, "Bearer new", "GET", 200},
		{both, "Bearer new", "POST", 202},
		{both, "Bearer reader", "GET", 200},
		{both, "Bearer reader", "HEAD", 200},
		{both, "Bearer reader", "POST", 403},
		{both, "", "GET", 401},
		{both, "Bearer new,old", "GET", 401},
	} {
		// The gateways share a database, so that each may be asked for the same task.
		g := startGateway(t, dsn, test.set)
		path, body := "/tasks/"+id, ""
		if test.method == "POST" {
			path, body = "/tasks", `{"name":"a"}`
		}
		header := []string{"Content-Type", "application/json"}
		if test.given != "" {
			header = append(header, "Authorization", test.given)
		}
		a := g.do(t, test.method, path, body, header...)
		if a.status != test.status {
			t.Errorf("%s with %q = %d %s, want %d", test.method, test.given, a.status, a.body, test.status)
		}
		if got := a.header.Get("Www-Authenticate"); (got == "Bearer") != (a.status == 401) {
			t.Errorf("%s with %q = %d, WWW-Authenticate: %q", test.method, test.given, a.status, got)
		}
		if a.status > 400 && a.str("type") != "about:blank" {
			t.Errorf("%s with %q: %s, want about:blank", test.method, test.given, a.body)
		}
	}
}

func TestCrossOrigin(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for _, test := range []struct {
		header []string
		status int
	}{
		{nil, 202},
		{[]string{"Sec-Fetch-Site", "same-origin"}, 202},
		{[]string{"Sec-Fetch-Site", "none"}, 202},
		{[]string{"Sec-Fetch-Site", "cross-site"}, 403},
		{[]string{"Sec-Fetch-Site", "same-site"}, 403},
		{[]string{"Origin", "https://elsewhere.example"}, 403},
		{[]string{"Origin", g.URL}, 202},
	} {
		a := g.post(t, `{"name":"a"}`, test.header...)
		if a.status != test.status || a.status == 403 && (a.str("type") != problemURN+"cross-origin" || a.header.Get("Content-Type") != "application/problem+json") {
			t.Errorf("%v = %d %s, want %d", test.header, a.status, a.body, test.status)
		}
	}
	if a := g.do(t, "GET", "/health", "", "Sec-Fetch-Site", "cross-site"); a.status != 200 {
		t.Errorf("cross-site GET = %d, want 200", a.status)
	}
}

func TestRequestID(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for given, kept := range map[string]bool{
		"abc-1._X": true, strings.Repeat("a", 64): true, strings.Repeat("a", 65): false, "": false, "a b": false, "<a>": false, "é": false,
	} {
		a := g.do(t, "GET", "/none", "", "X-Request-Id", given)
		got := a.header.Get("X-Request-Id")
		if (got == given) != kept || got == "" || a.str("request_id") != got {
			t.Errorf("X-Request-Id %q became %q, in the problem %q", given, got, a.str("request_id"))
		}
	}
}

// 404, 405 and redirects come in the form of all errors, and a path that is known says which
// methods it knows.
func TestUnmatched(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	for _, test := range []struct {
		method, path string
		status       int
		header, want string
	}{
		{"PUT", "/tasks", 405, "Allow", "GET, HEAD, POST"},
		{"OPTIONS", "/tasks", 405, "Allow", "GET, HEAD, POST"},
		{"DELETE", "/tasks/x", 405, "Allow", "GET, HEAD"},
		{"POST", "/health", 405, "Allow", "GET, HEAD"},
		{"POST", "/readyz", 405, "Allow", "GET, HEAD"},
		{"BREW", "/livez", 405, "Allow", "GET, HEAD"},
		{"GET", "/", 404, "", ""},
		{"GET", "/task", 404, "", ""},
		{"GET", "/tasks/a/b", 404, "", ""},
		{"POST", "/TASKS", 404, "", ""},
		{"GET", "//none", 307, "Location", "/none"},
		{"POST", "/tasks/", 401, "", ""},
	} {
		a := g.do(t, test.method, test.path, "")
		if a.status != test.status || test.header != "" && a.header.Get(test.header) != test.want {
			t.Errorf("%s %s = %d %v %s, want %d with %s: %s", test.method, test.path, a.status, a.header, a.body, test.status, test.header, test.want)
		}
		if a.status >= 400 && (a.header.Get("Content-Type") != "application/problem+json" || a.str("type") != "about:blank" || a.str("status") != fmt.Sprint(a.status)) {
			t.Errorf("%s %s: %s", test.method, test.path, a.body)
		}
		for header, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"} {
			if got := a.header.Get(header); got != want {
				t.Errorf("%s %s: %s: %s, want %s", test.method, test.path, header, got, want)
			}
		}
	}
	if a := g.do(t, "GET", "/tasks//x", "", "Authorization", "Bearer secret"); a.status != 307 || a.header.Get("Location") != "/tasks/x" {
		t.Errorf("GET /tasks//x = %d %v, want 307 to /tasks/x", a.status, a.header)
	}
	for _, test := range []struct{ method, query, want string }{
		{"POST", "", ""},
		{"GET", "?status=failed&name=a%20b", "?status=failed&name=a%20b"},
		{"GET", "?name=\u00e9\u20ac", "?name=%C3%A9%E2%82%AC"},
	} {
		a := g.do(t, test.method, "/tasks/"+test.query, "", "Authorization", "Bearer secret")
		if a.status != 308 || a.header.Get("Location") != "/tasks"+test.want {
			t.Errorf("%s /tasks/%s = %d %v, want 308 to /tasks%s", test.method, test.query, a.status, a.header, test.want)
		}
	}
}

// What net/http refuses by itself never reaches us, and must not be a 5xx.
func TestRawRequests(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	for request, want := range map[string]int{
		"POST /tasks HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a\x01b\r\n\r\n":                400,
		"POST /tasks HTTP/1.1\r\n\r\n":                                                      400,
		"POST /tasks HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n": 400,
		"nonsense\r\n\r\n": 400,
		"GET /tasks/x HTTP/1.1\r\nHost: x\r\nA: " + strings.Repeat("a", 30<<10) + "\r\n\r\n": 431,
	} {
		if a := g.raw(t, request); a.status != want {
			t.Errorf("%.60q = %d %s, want %d", request, a.status, a.body, want)
		}
	}
}

func TestPanic(t *testing.T) {
	t.Parallel()
	var lines lineLog
	g := startGatewayLog(t, newDatabase(t), nil, lines.logger())
	g.server.mux.HandleFunc("GET /early", func(http.ResponseWriter, *http.Request) { panic("early bug") })
	g.server.mux.HandleFunc("GET /late", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "half an answ")
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Errorf("flush: %v", err)
		}
		panic("late bug")
	})
	a := g.do(t, "GET", "/early", "")
	if a.status != 500 || a.str("type") != "about:blank" || strings.Contains(a.body, "bug") || strings.Contains(a.body, "goroutine") {
		t.Errorf("panic = %d %s, want a 500 that says nothing", a.status, a.body)
	}
	if _, err := g.try(t.Context(), "GET", "/late", nil); err == nil {
		t.Error("an answer that broke off looks whole")
	}
	if n := lines.count("panic in request"); n != 2 {
		t.Errorf("%d lines about panics, want 2", n)
	}
	if n := lines.count(`"status":500`); n != 1 {
		t.Errorf("%d request lines with 500, want 1", n)
	}
	if a := g.do(t, "GET", "/health", ""); a.status != 200 {
		t.Errorf("afterwards = %d, want 200", a.status)
	}
}

// Field case 136 and style.md: one line for each request, with the route and not the
// path, and nothing that a caller wants to keep to himself.
func TestRequestLog(t *testing.T) {
	t.Parallel()
	var lines lineLog
	g := startGatewayLog(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"apisecret"} }, lines.logger())
	auth := []string{"Authorization", "Bearer apisecret"}
	id := g.submitted(t, `{"name":"a","payload":{"password":"zzz"}}`, append(auth, "Idempotency-Key", "keysecret", "X-Request-Id", "req-1")...)
	g.post(t, `{"name":"\u001b[31m\n","payload":{"password":"zzz"}}`, append(auth, "Idempotency-Key", "\"keysecret")...)
	g.do(t, "GET", "/tasks/"+id, "", auth...)
	g.do(t, "GET", "/secretpath", "")
	g.do(t, "BREW", "/tasks", "")
	g.do(t, "GET", "/livez", "")
	type line struct {
		Level, Msg, Method, Route string
		Status                    int
		TookUS                    *int64 `json:"took_us"`
		RequestID                 string `json:"request_id"`
	}
	var got []string
	for _, text := range lines.all() {
		var l line
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Errorf("line %q: %v", text, err)
		}
		for _, secret := range []string{"zzz", "keysecret", "apisecret", "secretpath", id, "\x1b", "BREW"} {
			if strings.Contains(text, secret) {
				t.Errorf("line shows %q: %s", secret, text)
			}
		}
		if l.Msg == "request" {
			if l.TookUS == nil || l.RequestID == "" {
				t.Errorf("line without took_us or request_id: %s", text)
			}
			got = append(got, fmt.Sprint(l.Level, " ", l.Method, " ", l.Route, " ", l.Status))
		}
	}
	want := "INFO POST /tasks 202|INFO POST /tasks 400|INFO GET /tasks/{task_id} 200|INFO GET other 404|INFO other other 405|DEBUG GET /livez 200"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("request lines\n%s, want\n%s", s, want)
	}
}

func TestErrorLogLevel(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"http: TLS handshake error from 1.2.3.4:5: EOF\n":     `"level":"DEBUG"`,
		"http: Accept error: too many open files; retrying\n": `"level":"ERROR"`,
	} {
		var lines lineLog
		if _, err := (errorLog{lines.logger()}).Write([]byte(text)); err != nil || lines.count(want) != 1 || lines.count(`"msg":"http server"`) != 1 {
			t.Errorf("%q became %v, %v", text, lines.all(), err)
		}
	}
}

func TestAppendString(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for r := range rune(0x300) {
		all.WriteRune(r)
	}
	for _, s := range []string{"", all.String(), "<a href=\"x\">&</a>", "\u2028\u2029😀", "a\xffb", "\ud7ff\ue000\U0010ffff"} {
		var back string
		if err := json.Unmarshal(appendString(nil, s), &back); err != nil || back != strings.ToValidUTF8(s, "\uFFFD") {
			t.Errorf("appendString(%q) = %s, %v", s, appendString(nil, s), err)
		}
	}
	if got := string(appendString(nil, "<&>\u2028")); got != "\"<&>\u2028\"" {
		t.Errorf("appendString escapes more than it must: %s", got)
	}
}

// The recorder that unmatched uses must not pass a body on.
func TestUnmatchedWritesOneBody(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	unmatched(w, httptest.NewRequest("GET", "/x", nil), http.NotFoundHandler())
	if w.Code != 404 || !json.Valid(w.Body.Bytes()) {
		t.Errorf("unmatched = %d %q", w.Code, w.Body)
	}
}
