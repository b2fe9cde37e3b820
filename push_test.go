package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// endpointOf returns the handler for a URL as a file would name it.
func endpointOf(t *testing.T, rawURL string, secrets ...string) handlerFunc {
	t.Helper()
	p, err := newPusher(config{WebhookSecrets: secrets, WorkerConcurrency: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.client.CloseIdleConnections)
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	return p.endpoint(u)
}

func answering(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func TestPushOutcomes(t *testing.T) {
	t.Parallel()
	header := func(k, v string) http.Header { return http.Header{k: {v}} }
	const inAnHour = "a date one hour from now"
	past := time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)
	tests := []struct {
		name    string
		code    int
		header  http.Header
		body    string
		want    string // result as JSON, when there is no error
		wantErr string // what follows "post http://host: "

		wantPermanent bool
		wantAfter     time.Duration // of a retryAfterError, give or take a minute; 0: it is none
	}{
		{name: "json", code: 200, body: ` {"id": 12345678901234567890}` + "\n", want: `{"id":12345678901234567890}`},
		{name: "empty", code: 200, want: `null`},
		{name: "no content", code: 204, want: `null`},
		{name: "accepted with text", code: 202, body: "queued\n", want: `{"output":"queued"}`},
		{name: "not UTF-8", code: 200, body: "a\xffb", want: `{"output":"a` + "\uFFFD" + `b"}`},
		{name: "exactly the limit", code: 200, body: strings.Repeat("1", maxResultBytes), want: strings.Repeat("1", maxResultBytes)},
		{name: "too large", code: 200, body: strings.Repeat("1", maxResultBytes+1), wantErr: "result too large", wantPermanent: true},

		{name: "bad request", code: 400, body: "no such template\x00\n", wantErr: "answered 400 Bad Request: no such template", wantPermanent: true},
		{name: "unauthorized", code: 401, wantErr: "answered 401 Unauthorized", wantPermanent: true},
		{name: "not found", code: 404, wantErr: "answered 404 Not Found", wantPermanent: true},
		{name: "gone", code: 410, header: header("Retry-After", "5"), wantErr: "answered 410 Gone", wantPermanent: true},
		{name: "long refusal", code: 422, body: strings.Repeat("x", 1<<20), wantErr: "answered 422 Unprocessable Entity: " + strings.Repeat("x", maxErrorBody), wantPermanent: true},

		{name: "request timeout", code: 408, wantErr: "answered 408 Request Timeout"},
		{name: "too early", code: 425, wantErr: "answered 425 Too Early"},
		{name: "too many requests", code: 429, header: header("Retry-After", "7200"), wantErr: "answered 429 Too Many Requests", wantAfter: 2 * time.Hour},
		{name: "server error", code: 500, body: "oops", wantErr: "answered 500 Internal Server Error: oops"},
		{name: "unavailable until a date", code: 503, header: header("Retry-After", inAnHour), wantErr: "answered 503", wantAfter: time.Hour},
		{name: "unavailable until a past date", code: 503, header: header("Retry-After", past), wantErr: "answered 503"},
		{name: "retry after nonsense", code: 503, header: header("Retry-After", "-1"), wantErr: "answered 503"},
		{name: "retry after more than a day", code: 503, header: header("Retry-After", "99999999999999999999999"), wantErr: "answered 503", wantAfter: maxRetryAfter},
		{name: "code of no standard", code: 599, wantErr: "answered 599"},

		{name: "redirect", code: 302, header: header("Location", "https://user:hunter2@other.example/new?token=hunter2"),
			wantErr: "answered 302 Found to https://other.example/new; redirects are not followed", wantPermanent: true},
		{name: "redirect that would keep the method", code: 307, header: header("Location", "/new"), wantErr: "answered 307 Temporary Redirect to http://", wantPermanent: true},
		{name: "redirect to nowhere", code: 304, wantErr: "answered 304 Not Modified to nowhere", wantPermanent: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			s := answering(t, func(w http.ResponseWriter, r *http.Request) {
				calls.Add(1)
				maps.Copy(w.Header(), tt.header)
				if w.Header().Get("Retry-After") == inAnHour { // the table may be minutes old
					w.Header().Set("Retry-After", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
				}
				w.WriteHeader(tt.code)
				io.WriteString(w, tt.body)
			})
			host := strings.TrimPrefix(s.URL, "http://")
			run := endpointOf(t, "http://bob:hunter2@"+host+"/path?key=hunter2")
			result, err := run(t.Context(), handlerTask(`{}`))
			if n := calls.Load(); n != 1 {
				t.Errorf("%d calls, want 1", n)
			}
			if tt.wantErr == "" {
				if err != nil {
					t.Fatalf("run = %v, want no error", err)
				}
				if got := resultJSON(t, result); got != tt.want {
					t.Errorf("result = %.100s, want %.100s", got, tt.want)
				}
				return
			}
			if want := "post http://" + host + ": " + tt.wantErr; err == nil || !strings.HasPrefix(err.Error(), want) {
				t.Fatalf("err = %v, want %s", err, want)
			}
			if strings.Contains(err.Error(), "hunter2") || len(err.Error()) > maxErrorBytes {
				t.Errorf("err holds a secret or is too long: %v", err)
			}
			if isPermanent(err) != tt.wantPermanent {
				t.Errorf("permanent = %v, want %v", isPermanent(err), tt.wantPermanent)
			}
			var after time.Duration
			if e, ok := errors.AsType[*retryAfterError](err); ok {
				after = e.delay
			}
			if (after - tt.wantAfter).Abs() > time.Minute {
				t.Errorf("retry after %v, want %v", after, tt.wantAfter)
			}
		})
	}
}

func TestPushRequest(t *testing.T) {
	t.Parallel()
	const payload = `{"id": 12345678901234567890, "x": 0.10}`
	var got *http.Request
	var body []byte
	s := answering(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
	})
	task := handlerTask(payload)
	task.Name = "naïve name"
	task.Attempt, task.MaxRetries = 4, 7
	task.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	run := endpointOf(t, strings.Replace(s.URL, "//", "//bob:pw@", 1)+"/a?b=c")
	if _, err := run(t.Context(), task); err != nil {
		t.Fatal(err)
	}
	if string(body) != payload {
		t.Errorf("body = %s, want %s", body, payload)
	}
	if got.Method != "POST" || got.RequestURI != "/a?b=c" || got.ContentLength != int64(len(payload)) {
		t.Errorf("request is %s %s with %d bytes", got.Method, got.RequestURI, got.ContentLength)
	}
	id := task.ID.String()
	for name, want := range map[string]string{
		"Content-Type":       "application/json",
		"User-Agent":         "nexusflow/" + version(),
		"Idempotency-Key":    id,
		"X-Task-Id":          id,
		"X-Task-Name":        "naïve name",
		"X-Task-Attempt":     "4",
		"X-Task-Max-Retries": "7",
		"Traceparent":        task.Traceparent,
		"Authorization":      "Basic " + base64.StdEncoding.EncodeToString([]byte("bob:pw")),
		"Webhook-Id":         "",
		"Webhook-Signature":  "",
	} {
		if v := got.Header.Get(name); v != want {
			t.Errorf("%s = %q, want %q", name, v, want)
		}
	}
}

// TestPushSignature uses the vector that the Standard Webhooks libraries test with.
func TestPushSignature(t *testing.T) {
	t.Parallel()
	const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	const want = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPusher(config{WebhookSecrets: []string{secret, string(raw), "another"}})
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Split(p.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", []byte(`{"test": 2432232314}`)), " ")
	if len(got) != 3 || got[0] != want || got[1] != want || got[2] == want {
		t.Errorf("signatures = %q, want twice %s and another", got, want)
	}

	var h http.Header
	s := answering(t, func(w http.ResponseWriter, r *http.Request) { h = r.Header })
	task := handlerTask(`{"a":1}`)
	if _, err := endpointOf(t, s.URL, secret)(t.Context(), task); err != nil {
		t.Fatal(err)
	}
	if want := p.signature(task.ID.String(), h.Get("webhook-timestamp"), task.Payload); !strings.HasPrefix(want, h.Get("webhook-signature")+" ") {
		t.Errorf("webhook-signature = %q, want the first of %q", h.Get("webhook-signature"), want)
	}
	if h.Get("webhook-id") != task.ID.String() {
		t.Errorf("webhook-id = %q, want the task's", h.Get("webhook-id"))
	}
}

func TestPushBadSecrets(t *testing.T) {
	t.Parallel()
	for _, secret := range []string{"", "whsec_", "whsec_hunter2!"} {
		_, err := newPusher(config{WebhookSecrets: []string{"good", secret}})
		if err == nil || !strings.HasPrefix(err.Error(), "WEBHOOK_SECRETS: secret 2: ") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("newPusher with %q = %v, want an error that names the second secret and does not quote it", secret, err)
		}
	}
}

func TestPushContextEnds(t *testing.T) {
	t.Parallel()
	for _, headersFirst := range []bool{false, true} {
		t.Run(fmt.Sprintf("headersFirst=%v", headersFirst), func(t *testing.T) {
			t.Parallel()
			arrived := make(chan struct{})
			s := answering(t, func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body) // only then does the server see the client go
				if headersFirst {
					w.WriteHeader(200)
					http.NewResponseController(w).Flush()
				}
				close(arrived)
				<-r.Context().Done()
			})
			ctx, cancel := context.WithCancelCause(t.Context())
			cause := &timeoutError{after: time.Minute}
			go func() {
				<-arrived
				cancel(cause)
			}()
			if _, err := endpointOf(t, s.URL)(ctx, handlerTask(`{}`)); err != cause {
				t.Errorf("err = %v, want the cause itself", err)
			}
		})
	}
}

// TestPushConnectionErrors wants a retry and no secrets after every kind of them.
func TestPushConnectionErrors(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	hangUp := answering(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	cutShort := answering(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		io.WriteString(w, `{"half":`)
	})
	for name, host := range map[string]string{
		"refused":   closed.Addr().String(),
		"hang up":   strings.TrimPrefix(hangUp.URL, "http://"),
		"cut short": strings.TrimPrefix(cutShort.URL, "http://"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := endpointOf(t, "http://bob:hunter2@"+host+"/hunter2?key=hunter2")(t.Context(), handlerTask(`{}`))
			if err == nil || !strings.HasPrefix(err.Error(), "post http://"+host+": ") || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("err = %v, want one that names only the host", err)
			}
			if _, ok := errors.AsType[*retryAfterError](err); ok || isPermanent(err) {
				t.Errorf("err = %#v, want an ordinary error", err)
			}
		})
	}
}

// TestPushCallsOnce has a peer that dies of a request it has read, on connections that were kept:
// one attempt is one call. It is not sent again on the next kept connection.
func TestPushCallsOnce(t *testing.T) {
	t.Parallel()
	var arrivals sync.WaitGroup
	var deadly atomic.Int32
	s := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); string(body) == `{"die":true}` {
			deadly.Add(1)
			panic(http.ErrAbortHandler)
		}
		arrivals.Done()
		arrivals.Wait()
	})
	run := endpointOf(t, s.URL)
	const callers = 8
	arrivals.Add(callers)
	var calls sync.WaitGroup
	for range callers {
		calls.Go(func() {
			if _, err := run(t.Context(), handlerTask(`{}`)); err != nil {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	if _, err := run(t.Context(), handlerTask(`{"die":true}`)); err == nil {
		t.Error("the peer hung up, and the call succeeded")
	}
	if n := deadly.Load(); n != 1 {
		t.Errorf("one attempt made %d calls", n)
	}
}

// TestPushConnectTimeout calls a server whose queue of connections is full, so that the
// kernel leaves the call unanswered.
func TestPushConnectTimeout(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: a full queue drops connections only on Linux")
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	syscall.CloseOnExec(fd)
	defer syscall.Close(fd)
	if err := cmp.Or(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for { // fill the queue
		conn, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			break
		}
		defer conn.Close()
	}
	start := time.Now()
	_, err = endpointOf(t, "http://"+addr)(t.Context(), handlerTask(`{}`))
	if err == nil || !strings.Contains(err.Error(), "i/o timeout") || isPermanent(err) {
		t.Errorf("err = %v, want a time-out that is not permanent", err)
	}
	if took := time.Since(start); took < connectTimeout || took > 2*connectTimeout {
		t.Errorf("gave up after %v, want %v", took, connectTimeout)
	}
}

// TestPushKeepsConnections makes eight calls at once, again and again, and wants nothing
// left when the connections are closed. It is not parallel: it counts goroutines.
func TestPushKeepsConnections(t *testing.T) {
	const callers, rounds = 8, 25
	before := runtime.NumGoroutine()
	var opened atomic.Int32
	var together atomic.Pointer[sync.WaitGroup] // lets nobody go before all calls of a round are there
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		round := together.Load()
		round.Done()
		round.Wait()
		if r.Header.Get("X-Task-Attempt") == "2" {
			http.Error(w, strings.Repeat("busy ", 2000), http.StatusServiceUnavailable)
		}
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	s.Start()
	p, err := newPusher(config{WorkerConcurrency: callers})
	if err != nil {
		t.Fatal(err)
	}
	u, _ := url.Parse(s.URL)
	run := p.endpoint(u)
	for i := range rounds {
		var arrivals, calls sync.WaitGroup
		arrivals.Add(callers)
		together.Store(&arrivals)
		for range callers {
			calls.Go(func() {
				task := handlerTask(`{}`)
				task.Attempt = int32(1 + i%2)
				if _, err := run(t.Context(), task); (err != nil) != (task.Attempt == 2) {
					t.Errorf("attempt %d: %v", task.Attempt, err)
				}
			})
		}
		calls.Wait()
	}
	if n := opened.Load(); n > 5*callers {
		t.Errorf("%d rounds of %d calls opened %d connections", rounds, callers, n)
	}
	p.client.CloseIdleConnections()
	s.Close()
	eventually(t, "goroutines back to their number", func() bool { return runtime.NumGoroutine() <= before })
}

func TestPushPayloadOfManyBytes(t *testing.T) {
	t.Parallel()
	s := answering(t, func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	payload := `{"x":"` + strings.Repeat("y", maxResultBytes-8) + `"}`
	result, err := endpointOf(t, s.URL)(t.Context(), handlerTask(payload))
	if err != nil {
		t.Fatal(err)
	}
	if got := string(result.(json.RawMessage)); got != payload {
		t.Errorf("result has %d bytes and differs from the payload of %d", len(got), len(payload))
	}
}

// A peer that dawdles after its answer is known changes nothing about it and holds no slot.
func TestPushDawdlingPeer(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	t.Cleanup(func() { close(goOn) })
	for code, want := range map[int]string{404: "answered 404", 302: "redirects are not followed", 200: "result too large"} {
		t.Run(strconv.Itoa(code), func(t *testing.T) {
			s := answering(t, func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(code)
				if code == 200 {
					w.Write(make([]byte, maxResultBytes+4))
				}
				w.(http.Flusher).Flush()
				select {
				case <-goOn:
				case <-r.Context().Done():
				}
			})
			ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, &timeoutError{30 * time.Second})
			defer cancel()
			_, err := endpointOf(t, s.URL)(ctx, handlerTask(`{}`))
			if !isPermanent(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("err = %v, want a permanent one with %q", err, want)
			}
		})
	}
}
