package main

import (
	"bytes"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
)

// A swallower is a proxy before PostgreSQL that, when armed, passes one request on, waits for
// the reply, and cuts the connection instead of delivering it.
type swallower struct {
	dir       string // holds the socket
	armed     atomic.Bool
	swallowed atomic.Int32
}

func startSwallower(t *testing.T, server string) *swallower {
	t.Helper()
	dir, err := os.MkdirTemp("", "nx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, ".s.PGSQL.5432"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	p := &swallower{dir: dir}
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			back, err := net.Dial("unix", server)
			if err != nil {
				client.Close()
				continue
			}
			go p.serve(client, back)
		}
	}()
	return p
}

// arm makes the proxy lose the reply to the next INSERT of a connection that ran one before.
func (p *swallower) arm() { p.armed.Store(true) }

func (p *swallower) serve(client, back net.Conn) {
	defer client.Close()
	defer back.Close()
	var lose atomic.Bool
	go func() {
		defer back.Close()
		buf := make([]byte, 64<<10)
		prepared := false
		for {
			n, err := client.Read(buf)
			if err != nil {
				return
			}
			if bytes.Contains(buf[:n], []byte("INSERT INTO tasks")) {
				prepared = true
			}
			// A statement is prepared once; afterwards the message that binds its arguments
			// (B) comes first.
			if prepared && buf[0] == 'B' && p.armed.CompareAndSwap(true, false) {
				lose.Store(true)
			}
			if _, err := back.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := back.Read(buf)
		if err != nil {
			return
		}
		if lose.Load() {
			p.swallowed.Add(1)
			return
		}
		if _, err := client.Write(buf[:n]); err != nil && err != io.EOF {
			return
		}
	}
}
