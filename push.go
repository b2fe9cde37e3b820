package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	pushConnectTimeout = 5 * time.Second
	maxRetryAfter      = 24 * time.Hour
	maxErrorBody       = 1 << 10  // of a refusal's body, shown in the error
	maxDrainBytes      = 64 << 10 // read and dropped so that a connection can be used again
	drainTimeout       = 100 * time.Millisecond
	refusalTimeout     = time.Second // what a peer gets to say why it refused
)

// A pusher hands tasks to HTTP endpoints. All endpoints share its connections.
type pusher struct {
	client  *http.Client
	secrets [][]byte // HMAC keys; none: requests are not signed
	agent   string
}

// newPusher returns a pusher that signs with cfg.WebhookSecrets. It keeps as many idle
// connections to a host as attempts can run at once; net/http would keep two.
func newPusher(cfg config) (*pusher, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = (&net.Dialer{Timeout: pushConnectTimeout}).DialContext
	transport.TLSHandshakeTimeout = pushConnectTimeout
	transport.MaxIdleConns = 0
	transport.IdleConnTimeout = idleTimeout
	transport.MaxIdleConnsPerHost = max(cfg.WorkerConcurrency, 2)
	transport.MaxResponseHeaderBytes = 64 << 10
	p := &pusher{
		client: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		agent: "nexusflow/" + version(),
	}
	for i, s := range cfg.WebhookSecrets {
		key, err := webhookKey(s)
		if err != nil {
			return nil, fmt.Errorf("WEBHOOK_SECRETS: secret %d: %w", i+1, err)
		}
		p.secrets = append(p.secrets, key)
	}
	return p, nil
}

// webhookKey returns the HMAC key of a secret: the base64 after "whsec_", which is
// how Standard Webhooks writes one, or the bytes of any other text.
func webhookKey(secret string) ([]byte, error) {
	key := []byte(secret)
	if encoded, ok := strings.CutPrefix(secret, "whsec_"); ok {
		var err error
		if key, err = base64.StdEncoding.DecodeString(encoded); err != nil {
			return nil, errors.New("want base64 after whsec_")
		}
	}
	if len(key) == 0 {
		return nil, errors.New("the secret is empty")
	}
	return key, nil
}

// endpoint returns the handler that posts a task's payload to u. The call lasts as long
// as its context. No error of it holds anything of u but scheme and host: what
// follows is often a password or a token, and errors are shown to clients.
func (p *pusher) endpoint(u *url.URL) handlerFunc {
	label := u.Scheme + "://" + u.Host
	return func(ctx context.Context, t task) (any, error) {
		req, err := p.request(ctx, u, t)
		if err != nil {
			return nil, fmt.Errorf("post %s: %w", label, err)
		}
		result, err := p.send(req)
		if ctx.Err() != nil && err != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("post %s: %w", label, err)
		}
		return result, nil
	}
}

// idleTimeout is shorter than the keep-alive of any common server: a call must not meet a connection
// that the peer is just closing.
const idleTimeout = time.Second

// request builds the call. Idempotency-Key stays the same over all attempts of a task,
// so that the receiver can leave out one that it has already done. net/http would take that name
// as leave to send again what a peer may have read and died of, on one kept connection after the
// other, within one attempt. Written small, which for HTTP is the same name, it is not; what
// never left is sent again all the same.
func (p *pusher) request(ctx context.Context, u *url.URL, t task) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(t.Payload))
	if err != nil {
		return nil, bareError(err)
	}
	id := t.ID.String()
	h := req.Header
	h.Set("Content-Type", "application/json")
	h.Set("User-Agent", p.agent)
	h["idempotency-key"] = []string{id}
	h.Set("X-Task-Id", id)
	h.Set("X-Task-Name", t.Name)
	h.Set("X-Task-Attempt", strconv.Itoa(int(t.Attempt)))
	h.Set("X-Task-Max-Retries", strconv.Itoa(int(t.MaxRetries)))
	if t.Traceparent != "" {
		h.Set("traceparent", t.Traceparent)
	}
	if len(p.secrets) > 0 {
		stamp := strconv.FormatInt(time.Now().Unix(), 10)
		h.Set("webhook-id", id)
		h.Set("webhook-timestamp", stamp)
		h.Set("webhook-signature", p.signature(id, stamp, t.Payload))
	}
	return req, nil
}

// signature signs as Standard Webhooks 1.0 says, once for every secret: a receiver
// accepts any that it knows, so that secrets can be rotated.
func (p *pusher) signature(id, stamp string, body []byte) string {
	var list []string
	for _, key := range p.secrets {
		mac := hmac.New(sha256.New, key)
		io.WriteString(mac, id+"."+stamp+".") // a hash never returns an error
		mac.Write(body)
		list = append(list, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}
	return strings.Join(list, " ")
}

// send makes the call and turns the answer into a result or an error that says what
// follows from it.
func (p *pusher) send(req *http.Request) (any, error) {
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, bareError(err)
	}
	defer drain(resp.Body)

	switch code := resp.StatusCode; {
	case code >= 200 && code <= 299:
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxResultBytes+1))
		if err != nil {
			return nil, fmt.Errorf("read answer: %w", err)
		}
		if len(body) > maxResultBytes {
			return nil, permanent(fmt.Errorf("result too large: the answer has more than %d bytes", maxResultBytes))
		}
		return resultOf(body), nil
	case code >= 300 && code <= 399:
		return nil, permanent(fmt.Errorf("answered %s to %s; redirects are not followed", statusOf(resp), redirectTarget(resp)))
	case code == http.StatusRequestTimeout, code == http.StatusTooEarly, code == http.StatusTooManyRequests, code >= 500:
		err := refusal(resp)
		if d := retryDelay(resp.Header.Get("Retry-After"), time.Now()); d > 0 {
			err = retryAfter(err, d)
		}
		return nil, err
	}
	return nil, permanent(refusal(resp))
}

// drain reads what is left of a body, so that the connection can be used again, and
// closes it. The answer is known by then: a peer that dawdles must not hold the slot.
func drain(body io.ReadCloser) {
	patience := time.AfterFunc(drainTimeout, func() { body.Close() })
	defer patience.Stop()
	io.CopyN(io.Discard, body, maxDrainBytes)
	body.Close()
}

// bareError drops the method and the URL that net/http puts before an error.
func bareError(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}

// statusOf is the status line's code with its usual words, whatever the peer wrote there.
func statusOf(resp *http.Response) string {
	return strings.TrimSpace(strconv.Itoa(resp.StatusCode) + " " + http.StatusText(resp.StatusCode))
}

// refusal is the error for an answer that is not a success: its status and how its body begins.
func refusal(resp *http.Response) error {
	patience := time.AfterFunc(refusalTimeout, func() { resp.Body.Close() })
	defer patience.Stop()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what came is enough for a message
	if text := cleanText(body); text != "" {
		return fmt.Errorf("answered %s: %s", statusOf(resp), text)
	}
	return fmt.Errorf("answered %s", statusOf(resp))
}

// redirectTarget is where a redirect leads, without user, password and query.
func redirectTarget(resp *http.Response) string {
	u, err := resp.Location()
	if err != nil {
		return "nowhere"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// retryDelay reads a Retry-After header: seconds or a date. It is 0 when there is none,
// it cannot be read or it has passed, so that the usual back-off applies: retrying at
// once would spend all retries on one hiccup.
func retryDelay(header string, now time.Time) time.Duration {
	header = strings.TrimSpace(header)
	if n, err := strconv.ParseUint(header, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		return time.Duration(min(n, uint64(maxRetryAfter/time.Second))) * time.Second
	}
	at, err := http.ParseTime(header)
	if err != nil {
		return 0
	}
	return min(max(at.Sub(now), 0), maxRetryAfter)
}
