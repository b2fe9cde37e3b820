package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"
)

// stall uploads the first n bytes of a batch of the largest size and holds the connection.
func (g *gateway) stall(t *testing.T, n int) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", g.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := fmt.Fprintf(conn, "POST /tasks/batch HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", maxBatchBytes, strings.Repeat(" ", n)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// Large bodies share a fixed amount of memory: one more waits for a while and is then told to
// come back. Small ones, however framed, those that are only announced, what is wrong before the
// body is read, a client that goes away and one that waits for a task's end take no part.
func TestBodyMemory(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	large := `{"tasks":[{"name":"process_video"}]` + strings.Repeat(" ", 2*maxPooledBody) + "}"

	waiting := make(chan answer, 1)
	go func() {
		waiting <- g.do(t, http.MethodPost, "/tasks", `{"name":"process_video"`+strings.Repeat(" ", maxPooledBody)+"}", "Content-Type", "application/json", "Prefer", "wait=20")
	}()
	eventually(t, "the task that is waited for is stored", func() bool { return g.number(t, "SELECT count(*) FROM tasks") == 1 })

	stalled := []net.Conn{g.stall(t, 0), g.stall(t, 100)}
	const whole = (bodyMemory - bodyTurn) / maxBatchBytes
	for range whole {
		stalled = append(stalled, g.stall(t, maxBatchBytes-bodyStep)) // holds that much
	}
	eventually(t, "a step for each is left", func() bool {
		if g.server.bodies.TryAcquire((whole + 1) * bodyStep) {
			g.server.bodies.Release((whole + 1) * bodyStep)
			return false
		}
		return true
	})
	for range whole + 1 { // of which the last one has to take the turn
		stalled = append(stalled, g.stall(t, maxPooledBody+1))
	}
	eventually(t, "no memory is left", func() bool {
		if g.server.bodies.TryAcquire(bodyStep) {
			g.server.bodies.Release(bodyStep)
			return false
		}
		if g.server.bodyTurn.TryAcquire(1) {
			g.server.bodyTurn.Release(1)
			return false
		}
		return true
	})
	if a := g.post(t, `{"name":"process_video"}`); a.status != http.StatusAccepted {
		t.Errorf("small body: %s", transcript(a))
	}
	chunked, err := g.try(t.Context(), http.MethodPost, "/tasks", io.MultiReader(strings.NewReader(`{"name":"process_video"}`)), "Content-Type", "application/json")
	if err != nil || chunked.status != http.StatusAccepted {
		t.Errorf("small chunked body: %v %s", err, transcript(chunked))
	}
	if a := g.do(t, http.MethodPost, "/tasks/batch", large, "Content-Type", "text/plain"); a.status != http.StatusUnsupportedMediaType {
		t.Errorf("large body of a wrong type: %s", transcript(a))
	}
	if a := g.do(t, http.MethodPost, "/tasks/batch", large, "Content-Type", "application/json"); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("a body without memory: %s", transcript(a))
	}
	go func() {
		time.Sleep(slotLimit / 4) // while the next request waits
		for _, c := range stalled {
			c.Close()
		}
	}()
	if a := g.do(t, http.MethodPost, "/tasks/batch", large, "Content-Type", "application/json"); a.status != http.StatusAccepted {
		t.Errorf("a body that has to wait for memory: %s", transcript(a))
	}
	g.exec(t, "UPDATE tasks SET status = 'completed', finished_at = now(), updated_at = now() WHERE status = 'pending'")
	if a := <-waiting; a.status != http.StatusAccepted {
		t.Errorf("waited for the end: %s", transcript(a))
	}
	eventually(t, "all memory is given back", func() bool {
		if !g.server.bodies.TryAcquire(bodyMemory - bodyTurn) {
			return false
		}
		g.server.bodies.Release(bodyMemory - bodyTurn)
		return true
	})
}

// Of bodies that hold all there is in parts, and each need more, one after the other gets on.
func TestBodyMemoryTurn(t *testing.T) {
	t.Parallel()
	from, turn := semaphore.NewWeighted(16*bodyStep), semaphore.NewWeighted(1)
	errs := make(chan error)
	begin := make(chan struct{})
	for range 16 {
		loan := bodyLoan{from: from, turn: turn}
		if err := loan.grow(t.Context(), bodyStep); err != nil {
			t.Fatal(err)
		}
		go func() {
			<-begin
			var err error
			for n := 1; n < maxBatchBytes/bodyStep && err == nil; n++ {
				err = loan.grow(t.Context(), bodyStep)
			}
			loan.giveBack()
			errs <- err
		}()
	}
	close(begin)
	for range 16 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if !from.TryAcquire(16*bodyStep) || !turn.TryAcquire(1) {
		t.Error("memory is not given back")
	}
}
