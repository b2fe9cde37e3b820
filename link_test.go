package main

import (
	"bytes"
	"net"
	"regexp"
	"sync"
	"testing"
	"time"
)

// A link is the network between one process and one server: a TCP proxy in front of the
// server's socket that can be made to misbehave in every way that a network does.
type link struct {
	addr   string
	target string // path of the server's socket

	mu        sync.Mutex
	changed   *sync.Cond // mode
	listener  net.Listener
	mode      linkMode
	delay     time.Duration // in mode slow, before each chunk of bytes
	wires     map[*wire]struct{}
	closed    bool
	lose      string            // the next request of this kind loses its reply; "" = none
	late      time.Duration     // or has it so much later
	lost      int               // how many replies were lost or late
	queryName map[string]string // of prepared statements: as PostgreSQL knows them, as we do
}

type linkMode int

const (
	pass      linkMode = iota
	refused            // no connection is accepted
	blackHole          // connections live and no byte moves; what was sent arrives after the end
	slow
)

// A wire is one connection through a link.
type wire struct {
	client, server net.Conn
	loseReply      bool
	late           time.Duration
}

func (w *wire) cut() {
	w.client.Close()
	w.server.Close()
}

// newLink listens on an address until the test ends, for the server whose socket is target.
func newLink(t testing.TB, listen, target string) *link {
	t.Helper()
	l := &link{target: target, wires: make(map[*wire]struct{}), queryName: make(map[string]string)}
	l.changed = sync.NewCond(&l.mu)
	listener, err := net.Listen("tcp", listen)
	if err != nil { // a machine without IPv6
		t.Skipf("SKIPPED, NOT TESTED: %v", err)
	}
	l.addr = listener.Addr().String()
	l.listener = listener
	go l.accept(listener)
	t.Cleanup(l.close)
	return l
}

// dsn names a database of the server behind the link.
func (l *link) dsn(database string) string {
	return "postgres://nexusflow@" + l.addr + "/" + database + "?sslmode=disable"
}

func (l *link) port() int {
	return l.listener.Addr().(*net.TCPAddr).Port
}

func (l *link) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		go l.connect(client)
	}
}

func (l *link) connect(client net.Conn) {
	server, err := net.Dial("unix", l.target)
	if err != nil {
		client.Close()
		return
	}
	w := &wire{client: client, server: server}
	l.mu.Lock()
	if l.closed || l.mode == refused {
		l.mu.Unlock()
		w.cut()
		return
	}
	l.wires[w] = struct{}{}
	l.mu.Unlock()
	go l.pump(w, true)
	l.pump(w, false)
	w.cut()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.wires, w)
}

// pump moves bytes in one direction until the wire is cut.
func (l *link) pump(w *wire, requests bool) {
	from, to := w.server, w.client
	if requests {
		from, to = to, from
	}
	defer w.cut()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil || !l.let(w, buf[:n], requests) {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// let waits until the link lets a chunk pass and reports whether it does at all.
func (l *link) let(w *wire, chunk []byte, request bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.mode == blackHole && !l.closed {
		l.changed.Wait()
	}
	if l.mode == slow {
		// A link that gets faster meanwhile ends the wait only for what follows.
		delay := l.delay
		l.mu.Unlock()
		<-time.After(delay)
		l.mu.Lock()
	}
	if l.closed || l.mode == refused {
		return false
	}
	if request {
		l.learn(chunk)
		if l.lose != "" && l.isLost(chunk) {
			l.lose, w.loseReply, w.late = "", true, l.late
		}
		return true
	}
	if w.loseReply {
		l.lost++
		w.loseReply = false
		l.mu.Unlock()
		<-time.After(w.late)
		l.mu.Lock()
		return w.late > 0
	}
	return true
}

var (
	parsedStatement = regexp.MustCompile(`(stmtcache_[0-9a-f]+)\x00-- name: (\w+)`)
	boundStatement  = regexp.MustCompile(`\x00(stmtcache_[0-9a-f]+)\x00`)
)

// learn notes under which name a statement is prepared.
func (l *link) learn(chunk []byte) {
	if !bytes.Contains(chunk, []byte("stmtcache_")) {
		return
	}
	for _, m := range parsedStatement.FindAllSubmatch(chunk, -1) {
		l.queryName[string(m[1])] = string(m[2])
	}
}

// isLost reports whether a request is of the kind whose reply is to be lost: a command of
// Redis, the execution of a prepared statement by its name in queries/, or the text of
// one that is not prepared, such as "commit".
func (l *link) isLost(chunk []byte) bool {
	for _, m := range boundStatement.FindAllSubmatch(chunk, -1) {
		if l.queryName[string(m[1])] == l.lose {
			return true
		}
	}
	return (chunk[0] == '*' || chunk[0] == 'Q') && bytes.Contains(chunk, []byte(l.lose))
}

// set changes how the link behaves from now on. Refusing cuts what is connected.
func (l *link) set(mode linkMode) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	before := l.mode
	l.mode = mode
	l.changed.Broadcast()
	l.mu.Unlock()
	switch {
	case mode == refused:
		l.listener.Close()
		l.cut()
	case before == refused:
		l.listen()
	}
}

// listen takes the link's address again, which nobody else is likely to have taken meanwhile.
func (l *link) listen() {
	for range 500 {
		listener, err := net.Listen("tcp", l.addr)
		if err == nil {
			l.mu.Lock()
			l.listener = listener
			l.mu.Unlock()
			go l.accept(listener)
			return
		}
		<-time.After(20 * time.Millisecond)
	}
	panic("the address of a link was taken: " + l.addr)
}

// setSlow delays every chunk of bytes in both directions.
func (l *link) setSlow(delay time.Duration) {
	l.mu.Lock()
	l.delay = delay
	l.mu.Unlock()
	l.set(slow)
}

// cut closes what is connected now.
func (l *link) cut() { l.each((*wire).cut) }

// reset is cut with RST instead of FIN.
func (l *link) reset() {
	l.each(func(w *wire) {
		w.client.(*net.TCPConn).SetLinger(0)
		w.cut()
	})
}

func (l *link) each(f func(*wire)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w := range l.wires {
		f(w)
	}
}

// loseReply passes the next request of a kind on and cuts the connection instead of
// delivering what the server answers.
func (l *link) loseReply(kind string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lose, l.late = kind, 0
}

// delayReply passes the next request of a kind on and what the server answers so much later.
func (l *link) delayReply(kind string, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lose, l.late = kind, delay
}

// repliesLost returns how many replies were lost or late.
func (l *link) repliesLost() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	l.listener.Close()
	l.cut()
}
