//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// slack is by how much a loaded machine may stretch a time that a test waits for. It
// never touches a time that must not be undercut.
const slack = 3

// allFaults reports whether the long tests are to run too.
func allFaults() bool { return os.Getenv("FAULTS") == "all" }

// longFault keeps a test out of the plain run, whose time is limited.
func longFault(t *testing.T) {
	t.Helper()
	if !allFaults() {
		t.Skip("runs with FAULTS=all")
	}
	t.Parallel()
}

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

// A bed holds what a fault test plays with: real servers, the links to them, the processes,
// and what was promised to clients.
type bed struct {
	t     testing.TB
	pg    *postgresServer
	rd    *redisServer
	name  string        // of the database
	db    *pgxpool.Pool // past the links
	redis *redis.Client // past the links
	probe *probe
	env   map[string]string
	http  *http.Client

	mu       sync.Mutex
	members  []*instance
	accepted map[uuid.UUID]bool // every id that got a 2xx
}

// A bedOption changes what newBed makes.
type bedOption func(*bedOptions)

type bedOptions struct {
	ownPostgres bool
	noSchema    bool
	redis       []string
	env         map[string]string
}

// ownPostgres is for tests that stop, freeze or reconfigure PostgreSQL.
func ownPostgres(o *bedOptions) { o.ownPostgres = true }

// noSchema leaves the database empty, without the audit.
func noSchema(o *bedOptions) { o.noSchema = true }

func withRedis(settings ...string) bedOption { return func(o *bedOptions) { o.redis = settings } }

// with sets environment variables of all processes.
func with(pairs ...string) bedOption {
	return func(o *bedOptions) {
		for i := 0; i < len(pairs); i += 2 {
			o.env[pairs[i]] = pairs[i+1]
		}
	}
}

// The settings of fault tests.
const (
	faultLease     = 2 * time.Second
	faultRepublish = 2 * time.Second
	faultIdle      = 2500 * time.Millisecond
	faultScan      = time.Second
	faultGrace     = 2 * time.Second
	faultMaxLost   = 3
)

func newBed(t testing.TB, options ...bedOption) *bed {
	t.Helper()
	o := bedOptions{env: map[string]string{
		"HTTP_ADDR":             "127.0.0.1:0",
		"LEASE":                 faultLease.String(),
		"SWEEP_INTERVAL":        "200ms",
		"REPUBLISH_AFTER":       faultRepublish.String(),
		"MAX_LOST":              fmt.Sprint(faultMaxLost),
		"PEL_SCAN_INTERVAL_S":   "1",
		"PEL_IDLE_THRESHOLD_MS": fmt.Sprint(faultIdle.Milliseconds()),
		"REQUEUE_BASE_DELAY_MS": "100",
		"REQUEUE_MAX_DELAY_MS":  "1000",
		"SHUTDOWN_GRACE":        faultGrace.String(),
		"WORKER_CONCURRENCY":    "4",
		"LOG_FORMAT":            "json",
		"LOG_LEVEL":             "debug",
	}}
	for _, option := range options {
		option(&o)
	}
	b := &bed{t: t, env: o.env, accepted: make(map[uuid.UUID]bool), http: &http.Client{Timeout: 20 * time.Second}}
	t.Cleanup(b.http.CloseIdleConnections)
	b.rd = startRedisServer(t, o.redis...)
	options2, err := redis.ParseURL(b.rd.url)
	if err != nil {
		t.Fatal(err)
	}
	b.redis = redis.NewClient(options2)
	t.Cleanup(func() { b.redis.Close() })
	b.makeDatabase(o)
	b.probe = startProbe(t)
	t.Cleanup(func() {
		if t.Failed() {
			b.showLogs()
		}
	})
	return b
}

// makeDatabase gives the bed a database with the audit in it.
func (b *bed) makeDatabase(o bedOptions) {
	b.t.Helper()
	var dsn string
	switch {
	case o.ownPostgres && o.noSchema:
		b.pg = startPostgresServer(b.t)
		b.pg.exec(b.t, "CREATE DATABASE fault")
		dsn = b.pg.dsn("fault")
	case o.ownPostgres:
		b.pg = startPostgresServer(b.t)
		dsn = b.pg.createDatabase(b.t, "fault")
	case o.noSchema:
		b.pg = testPostgres(b.t)
		dsn = emptyDatabase(b.t)
	default:
		b.pg = testPostgres(b.t)
		dsn = newDatabase(b.t)
	}
	if o.ownPostgres {
		// The test clusters may lose commits in a crash; a record may not.
		b.pg.exec(b.t, "ALTER DATABASE fault SET synchronous_commit = on")
	}
	_, b.name, _ = strings.Cut(strings.TrimPrefix(dsn, "postgres://"), "/")
	b.name, _, _ = strings.Cut(b.name, "?")
	pool, err := pgxpool.New(b.t.Context(), dsn)
	if err != nil {
		b.t.Fatal(err)
	}
	b.db = pool
	b.t.Cleanup(pool.Close)
	if !o.noSchema {
		b.installAudit()
	}
}

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

// member makes a process without starting it. Further settings are pairs.
func (b *bed) member(name string, settings ...string) *instance {
	b.t.Helper()
	return b.memberAt(name, "127.0.0.1", settings...)
}

// memberAt is member with its servers at another loopback address.
func (b *bed) memberAt(name, host string, settings ...string) *instance {
	b.t.Helper()
	if host == "::1" {
		host = "[::1]"
	}
	m := &instance{
		bed:  b,
		name: name,
		pg:   newLink(b.t, host+":0", b.pg.socket),
		rd:   newLink(b.t, host+":0", b.rd.socket),
		env:  maps.Clone(b.env),
		log:  new(instanceLog),
	}
	m.handlers(fmt.Sprintf(`{"probe": {"url": %q}}`, b.probe.url(name)))
	m.env["DATABASE_URL"] = m.pg.dsn(b.name)
	m.env["REDIS_URL"] = "redis://" + m.rd.addr + "/0"
	for i := 0; i < len(settings); i += 2 {
		m.env[settings[i]] = settings[i+1]
	}
	b.mu.Lock()
	b.members = append(b.members, m)
	b.mu.Unlock()
	b.t.Cleanup(func() {
		if m.alive() {
			m.kill()
		}
	})
	return m
}

// handlers writes the handlers file of the process' next start.
func (m *instance) handlers(content string) {
	m.bed.t.Helper()
	file := filepath.Join(m.bed.t.TempDir(), m.name+".json")
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		m.bed.t.Fatal(err)
	}
	m.env["HANDLERS_FILE"] = file
}

// started makes processes and returns when they are ready.
func (b *bed) started(names ...string) []*instance {
	b.t.Helper()
	members := make([]*instance, len(names))
	for i, name := range names {
		members[i] = b.member(name)
		members[i].launch()
	}
	for _, m := range members {
		m.waitReady()
	}
	return members
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

// within waits until ok reports true and fails the test when limit has passed; it
// returns how long it waited.
func (b *bed) within(limit time.Duration, what string, ok func() bool, state ...func() any) time.Duration {
	b.t.Helper()
	begin := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	end := time.After(limit)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			var last strings.Builder
			for _, s := range state {
				fmt.Fprintf(&last, "; last state: %v", s())
			}
			b.t.Fatalf("not within %v: %s%s", limit, what, last.String())
		}
	}
	return time.Since(begin)
}

// soon is within for what comes by the protocol after d at most; a loaded machine may take
// a multiple.
func (b *bed) soon(d time.Duration, what string, ok func() bool, state ...func() any) {
	b.t.Helper()
	took := b.within(slack*d, what, ok, state...)
	b.t.Logf("%s after %v; promised %v", what, took.Round(time.Millisecond), d)
}

// during checks for a while that ok stays true.
func (b *bed) during(d time.Duration, what string, ok func() bool) {
	b.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(d); ; {
		if !ok() {
			b.t.Fatalf("no longer so: %s", what)
		}
		select {
		case <-tick.C:
		case <-end:
			return
		}
	}
}

// pause lets time pass that a test needs to pass: a fault that lasts, a lease that runs out.
func (b *bed) pause(d time.Duration) { <-time.After(d) }

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

// showLogs prints how each process' log ended, or all logs to FAULT_LOGS if that names a folder.
func (b *bed) showLogs() {
	const shown = 40
	for _, m := range b.members {
		lines := m.log.allLines()
		if dir := os.Getenv("FAULT_LOGS"); dir != "" {
			file := filepath.Join(dir, strings.ReplaceAll(b.t.Name(), "/", "_")+"-"+m.name+".log")
			os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"+m.log.stderr.String()), 0o644)
		}
		b.t.Logf("log of %s, %d lines, ends so:\n%s\n%s", m.name, len(lines), strings.Join(lines[max(0, len(lines)-shown):], "\n"), m.log.stderr.String())
	}
}

// query is a query past the links whose one value is read into dest.
func (b *bed) query(dest any, sql string, args ...any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	if err := b.db.QueryRow(ctx, sql, args...).Scan(dest); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

func (b *bed) exec(sql string, args ...any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	if _, err := b.db.Exec(ctx, sql, args...); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

// number returns the one number that a query yields.
func (b *bed) number(sql string, args ...any) int {
	b.t.Helper()
	var n int
	b.query(&n, sql, args...)
	return n
}

// A rowState is what tests look at in a row.
type rowState struct {
	Status               string
	Attempt, Retry, Lost int
	Result, Error        string
}

func (b *bed) row(id uuid.UUID) rowState {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	var r rowState
	err := b.db.QueryRow(ctx, `SELECT status, attempt, retry_count, lost_count, COALESCE(result::text, ''), COALESCE(error_message, '')
		FROM tasks WHERE task_id = $1`, id).Scan(&r.Status, &r.Attempt, &r.Retry, &r.Lost, &r.Result, &r.Error)
	if err != nil {
		b.t.Fatalf("read row %s: %v", id, err)
	}
	return r
}

// countOf returns how many of the tasks have a status.
func (b *bed) countOf(ids []uuid.UUID, status string) int {
	b.t.Helper()
	return b.number("SELECT count(*) FROM tasks WHERE task_id = ANY($1) AND status = $2", ids, status)
}

// allAre reports whether all the tasks have a status.
func (b *bed) allAre(ids []uuid.UUID, status string) func() bool {
	return func() bool { return b.countOf(ids, status) == len(ids) }
}
