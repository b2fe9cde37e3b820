package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// A client is one keep-alive connection. It writes requests by hand and reads no more
// of an answer than it must, so that the load costs as little as possible of the
// processors it shares with what is measured.
type client struct {
	conn net.Conn
	in   *bufio.Reader
	out  []byte
	body []byte
}

func dial(ctx context.Context, addr string) (*client, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return &client{conn: conn, in: bufio.NewReaderSize(conn, 8<<10)}, nil
}

func (c *client) close() { c.conn.Close() }

// appendPayload appends the payload that all tasks of a run have, about 100 bytes of JSON.
func appendPayload(b []byte, seq int) []byte {
	b = strconv.AppendInt(append(b, `{"seq":`...), int64(seq), 10)
	b = strconv.AppendInt(append(b, `,"file":"uploads/clip-`...), int64(seq), 10)
	return append(b, `.mp4","codec":"h264","user":"u-4711","w":1280,"h":720}`...)
}

const taskName = "process_video"

// post submits a task and returns the body of the answer, valid until the next request.
// An empty key is none.
func (c *client) post(seq int, key string) ([]byte, error) {
	c.body = append(c.body[:0], `{"name":"`+taskName+`","payload":`...)
	c.body = append(appendPayload(c.body, seq), '}')
	c.out = append(c.out[:0], "POST /tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "...)
	c.out = strconv.AppendInt(c.out, int64(len(c.body)), 10)
	if key != "" {
		c.out = append(append(c.out, "\r\nIdempotency-Key: "...), key...)
	}
	c.out = append(append(c.out, "\r\n\r\n"...), c.body...)
	status, err := c.roundTrip()
	if err == nil && status != 202 {
		err = fmt.Errorf("POST /tasks: status %d: %s", status, c.body)
	}
	return c.body, err
}

// get reads a task and returns the body of the answer, valid until the next request.
func (c *client) get(id string) ([]byte, error) {
	c.out = append(append(append(c.out[:0], "GET /tasks/"...), id...), " HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"...)
	status, err := c.roundTrip()
	if err == nil && status != 200 {
		err = fmt.Errorf("GET /tasks/%s: status %d: %s", id, status, c.body)
	}
	return c.body, err
}

// roundTrip sends out and reads an answer that states its length into body.
func (c *client) roundTrip() (status int, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return 0, err
	}
	if _, err := c.conn.Write(c.out); err != nil {
		return 0, fmt.Errorf("send request: %w", err)
	}
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return 0, fmt.Errorf("read answer: %w", err)
	}
	if len(line) < 12 {
		return 0, fmt.Errorf("read answer: %q", line)
	}
	status, err = strconv.Atoi(string(line[9:12]))
	if err != nil {
		return 0, fmt.Errorf("read answer: %w", err)
	}
	length := -1
	for {
		line, err = c.in.ReadSlice('\n')
		if err != nil {
			return 0, fmt.Errorf("read answer: %w", err)
		}
		if len(line) <= 2 {
			break
		}
		const name = "content-length:"
		if len(line) > len(name) && bytes.EqualFold(line[:len(name)], []byte(name)) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(line[len(name):]))); err != nil {
				return 0, fmt.Errorf("read answer: %w", err)
			}
		}
	}
	if length < 0 {
		return 0, fmt.Errorf("read answer: status %d without Content-Length", status)
	}
	c.body = slices.Grow(c.body[:0], length)[:length]
	if _, err := io.ReadFull(c.in, c.body); err != nil {
		return 0, fmt.Errorf("read answer: %w", err)
	}
	return status, nil
}

// load is a closed loop: each connection posts again as soon as it is answered.
type load struct {
	addr  string
	conns int
	span  time.Duration // how long; 0 = until count
	count int           // how many tasks; 0 = until span is over
	keys  bool          // a fresh Idempotency-Key on every request
}

// posted is what a load did.
type posted struct {
	tasks    int
	took     time.Duration
	p50, p99 time.Duration
}

// sample is p with the processor time that was used meanwhile.
func (p posted) sample(c cpu) sample {
	return sample{rate: float64(p.tasks) / p.took.Seconds(), p50: p.p50, p99: p.p99, tasks: p.tasks, cpu: c}
}

// run posts until span or count is reached; any answer but 202 is an error.
func (l load) run(ctx context.Context) (posted, error) {
	clients := make([]*client, l.conns)
	for i := range clients {
		c, err := dial(ctx, l.addr)
		if err != nil {
			return posted{}, err
		}
		defer c.close()
		clients[i] = c
	}
	prefix := fmt.Sprintf("%x-", time.Now().UnixNano()) // of keys that were never used
	return closedLoop(ctx, l.conns, l.span, l.count, func(i, seq int) error {
		key := ""
		if l.keys {
			key = prefix + strconv.Itoa(seq)
		}
		_, err := clients[i].post(seq, key)
		return err
	})
}

// closedLoop has each of a number of workers call again as soon as the call before has
// returned, until span is over or count calls are made; 0 is no limit. The first error ends it.
func closedLoop(ctx context.Context, workers int, span time.Duration, count int, call func(worker, seq int) error) (posted, error) {
	var (
		wg     sync.WaitGroup
		next   atomic.Int64
		failed atomic.Pointer[error]
		times  = make([][]time.Duration, workers)
		begin  = time.Now()
	)
	over := func(now time.Time, seq int) bool {
		return span > 0 && now.Sub(begin) >= span || count > 0 && seq > count || failed.Load() != nil || ctx.Err() != nil
	}
	for i := range workers {
		wg.Go(func() {
			now := time.Now()
			for {
				seq := int(next.Add(1))
				if over(now, seq) {
					return
				}
				if err := call(i, seq); err != nil {
					failed.CompareAndSwap(nil, &err)
					return
				}
				end := time.Now()
				times[i] = append(times[i], end.Sub(now))
				now = end
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	if err := failed.Load(); err != nil {
		return posted{}, *err
	}
	all := slices.Concat(times...)
	return posted{tasks: len(all), took: took, p50: quantile(all, 0.5), p99: quantile(all, 0.99)}, ctx.Err()
}

// quantile sorts times and returns their q-quantile; 0 when there are none.
func quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	slices.Sort(times)
	return times[min(len(times)-1, int(q*float64(len(times))))]
}

// openLoop begins total calls, rate a second, whether or not earlier ones have returned,
// and waits for all of them. The first error ends it.
func openLoop(ctx context.Context, rate, total int, call func(seq int) error) error {
	var (
		wg     sync.WaitGroup
		failed atomic.Pointer[error]
		tick   = time.NewTicker(time.Second / time.Duration(rate))
	)
	defer tick.Stop()
	for seq := range total {
		select {
		case <-tick.C:
		case <-ctx.Done():
			wg.Wait()
			return ctx.Err()
		}
		if failed.Load() != nil {
			break
		}
		wg.Go(func() {
			if err := call(seq); err != nil {
				failed.CompareAndSwap(nil, &err)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// connections lends clients to the calls of an open loop.
type connections struct {
	addr string
	free chan *client
}

func newConnections(addr string) *connections {
	return &connections{addr: addr, free: make(chan *client, 256)}
}

func (p *connections) take(ctx context.Context) (*client, error) {
	select {
	case c := <-p.free:
		return c, nil
	default:
		return dial(ctx, p.addr)
	}
}

func (p *connections) give(c *client) {
	select {
	case p.free <- c:
	default:
		c.close()
	}
}

func (p *connections) close() {
	for {
		select {
		case c := <-p.free:
			c.close()
		default:
			return
		}
	}
}
