//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
)

// builtBinary is the program under test, built once with the same race detection as the tests.
var builtBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "nexusflow-built-")
	if err != nil {
		return "", err
	}
	whenDone(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "nexusflow")
	args := []string{"build", "-o", path}
	if raceEnabled {
		args = append(args, "-race")
	}
	if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return path, nil
})

// An instance is one process of the built binary. It may be started again after it ended.
type instance struct {
	bed    *bed
	name   string
	pg, rd *link
	env    map[string]string
	log    *instanceLog

	mu        sync.Mutex
	proc      *serverProcess
	disturbed []stretch // when it was dead, stopped or cut off
	troubles  int       // how many faults last, each of which may disturb it
}

// A stretch is a time in which something was wrong; end is zero while it lasts.
type stretch struct{ begin, end time.Time }

// handlers writes the handlers file of the process' next start.
func (m *instance) handlers(content string) {
	m.bed.t.Helper()
	file := filepath.Join(m.bed.t.TempDir(), m.name+".json")
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		m.bed.t.Fatal(err)
	}
	m.env["HANDLERS_FILE"] = file
}

// launch starts the process and returns at once.
func (m *instance) launch() {
	m.bed.t.Helper()
	path, err := builtBinary()
	if err != nil {
		m.bed.t.Fatal(err)
	}
	m.log.restarted()
	proc, err := startServer(func() (*exec.Cmd, error) {
		cmd := exec.Command(path)
		cmd.Dir = m.bed.t.TempDir()
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir(), "GORACE=halt_on_error=1"}
		for name, value := range m.env {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		cmd.Stdout, cmd.Stderr = m.log, &m.log.stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		return cmd, nil
	})
	if err != nil {
		m.bed.t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.proc = proc
}

func (m *instance) start() {
	m.bed.t.Helper()
	m.launch()
	m.waitReady()
}

// waitReady returns when the process takes tasks and Redis is up for it.
func (m *instance) waitReady() {
	m.bed.t.Helper()
	m.bed.within(60*time.Second, m.name+" ready", func() bool {
		code, body := m.get("/readyz")
		return code == http.StatusOK && strings.Contains(body, `"ok"`)
	})
}

func (m *instance) process() *serverProcess {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proc
}

func (m *instance) alive() bool {
	proc := m.process()
	if proc == nil {
		return false
	}
	select {
	case <-proc.done:
		return false
	default:
		return true
	}
}

// signal sends a signal to the process; a dead one is left alone.
func (m *instance) signal(sig syscall.Signal) {
	if proc := m.process(); proc != nil {
		proc.signal(sig)
	}
}

// kill ends the process as a power cut would, and returns when it is gone.
func (m *instance) kill() {
	m.disturb()
	m.process().end(syscall.SIGKILL)
	m.calm()
}

// freeze stops the process until thaw, as the pause of a virtual machine would.
func (m *instance) freeze() {
	m.disturb()
	m.signal(syscall.SIGSTOP)
}

func (m *instance) thaw() {
	m.signal(syscall.SIGCONT)
	m.calm()
}

// wait returns the exit code of a process that is about to end, or fails the test.
func (m *instance) wait(limit time.Duration) int {
	m.bed.t.Helper()
	proc := m.process()
	select {
	case <-proc.done:
	case <-time.After(limit):
		m.bed.t.Fatalf("%s has not ended within %v", m.name, limit)
	}
	return proc.cmd.ProcessState.ExitCode()
}

// stop ends the process as a supervisor does and returns how long it took and its exit code.
func (m *instance) stop() (time.Duration, int) {
	m.bed.t.Helper()
	begin := time.Now()
	m.signal(syscall.SIGTERM)
	code := m.wait(slack * (faultGrace + 2*time.Second))
	return time.Since(begin), code
}

// disturb notes that from now on the process may be taken for dead.
func (m *instance) disturb() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.troubles++; m.troubles == 1 {
		m.disturbed = append(m.disturbed, stretch{begin: time.Now()})
	}
}

// calm ends what disturb began; a lease later the process must behave.
func (m *instance) calm() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.troubles--; m.troubles == 0 {
		m.disturbed[len(m.disturbed)-1].end = time.Now().Add(faultLease)
	}
}

// wasDisturbed reports whether something was wrong with the process at any time between two.
func (m *instance) wasDisturbed(begin, end time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.disturbed, func(s stretch) bool {
		return s.begin.Before(end) && (s.end.IsZero() || s.end.After(begin))
	})
}

// address waits for the listener's address, which the process logs.
func (m *instance) address() string {
	for _, line := range m.log.lines() {
		var l struct{ Msg, Addr string }
		if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "listening" {
			return l.Addr
		}
	}
	return ""
}

// get returns the answer to a request; code 0 when there was none.
func (m *instance) get(path string) (int, string) {
	addr := m.address()
	if addr == "" {
		return 0, ""
	}
	resp, err := m.bed.http.Get("http://" + addr + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

// A submitted is the answer to a POST of a task; code 0 when there was none.
type submitted struct {
	code int
	id   uuid.UUID
	body string
	took time.Duration
}

// post submits a task and notes the promise that a 2xx is.
func (m *instance) post(body string, headers ...string) submitted {
	begin := time.Now()
	addr := m.address()
	if addr == "" {
		return submitted{}
	}
	req, err := http.NewRequestWithContext(m.bed.t.Context(), http.MethodPost, "http://"+addr+"/tasks", strings.NewReader(body))
	if err != nil {
		m.bed.t.Error(err)
		return submitted{}
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := m.bed.http.Do(req)
	if err != nil {
		return submitted{body: err.Error(), took: time.Since(begin)}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	s := submitted{code: resp.StatusCode, body: string(text), took: time.Since(begin)}
	if err != nil || s.code < 200 || s.code > 299 {
		return s
	}
	var task struct {
		ID uuid.UUID `json:"task_id"`
	}
	if err := json.Unmarshal(text, &task); err != nil {
		m.bed.t.Errorf("read answer to POST: %v: %s", err, text)
		return s
	}
	s.id = task.ID
	m.bed.mu.Lock()
	defer m.bed.mu.Unlock()
	m.bed.accepted[s.id] = true
	return s
}

// submit posts one task that must be accepted.
func (m *instance) submit(body string) uuid.UUID {
	m.bed.t.Helper()
	s := m.post(body)
	if s.code != http.StatusAccepted {
		m.bed.t.Fatalf("POST to %s = %d %s, want 202", m.name, s.code, s.body)
	}
	return s.id
}

// submitMany posts n tasks, eight at a time, all of which must be accepted.
func (m *instance) submitMany(n int, body string) []uuid.UUID {
	m.bed.t.Helper()
	ids := make([]uuid.UUID, n)
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(n, 8) {
		wg.Go(func() {
			for i := range next {
				if s := m.post(body); s.code == http.StatusAccepted {
					ids[i] = s.id
				} else {
					m.bed.t.Errorf("POST to %s = %d %s, want 202", m.name, s.code, s.body)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	if m.bed.t.Failed() {
		m.bed.t.FailNow()
	}
	return ids
}

// An instanceLog is what a process printed, of all its lives.
type instanceLog struct {
	mu     sync.Mutex
	out    bytes.Buffer
	life   int // where the present life begins
	stderr lockedBuffer
}

func (l *instanceLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(p)
}

func (l *instanceLog) restarted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.life = l.out.Len()
}

// lines returns the whole lines of the present life.
func (l *instanceLog) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return whole(l.out.Bytes()[l.life:])
}

// allLines returns the whole lines of all lives.
func (l *instanceLog) allLines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return whole(l.out.Bytes())
}

func whole(text []byte) []string {
	end := bytes.LastIndexByte(text, '\n')
	if end < 0 {
		return nil
	}
	return strings.Split(string(text[:end]), "\n")
}

// count returns how many lines of all lives hold all the words.
func (l *instanceLog) count(words ...string) int {
	n := 0
	for _, line := range l.allLines() {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			n++
		}
	}
	return n
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
