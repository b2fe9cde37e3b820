package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5"
)

// The servers that all tests share are started by the first test that needs them. Each
// test has a database and a stream name of its own there.
var (
	sharedPostgres = sync.OnceValues(startSharedPostgres)
	sharedRedis    = sync.OnceValues(startSharedRedis)
	atExit         []func() // what TestMain calls last, newest first
	atExitLock     sync.Mutex
	databases      atomic.Int64 // how many database names were given out
)

func TestMain(m *testing.M) {
	execHelperMain()
	embeddedHelperMain()
	removeLeftovers()
	code := m.Run()
	atExitLock.Lock()
	for i := len(atExit) - 1; i >= 0; i-- {
		atExit[i]()
	}
	os.Exit(code)
}

func whenDone(f func()) {
	atExitLock.Lock()
	defer atExitLock.Unlock()
	atExit = append(atExit, f)
}

// testLease is the lease of tests that do not choose one.
const testLease = 2 * time.Second

// eventually waits until ok reports true, asking every 10 ms, and fails the test
// after 15 s with what was waited for and, when state is given, how things stood then.
func eventually(t testing.TB, what string, ok func() bool, state ...func() any) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(15 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			var last strings.Builder
			for _, s := range state {
				fmt.Fprintf(&last, "; last state: %v", s())
			}
			t.Fatalf("not within 15 s: %s%s", what, last.String())
		}
	}
}

// discardLog returns a logger for what nobody reads.
func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

// testLog returns a logger whose lines are shown when the test fails.
func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// missing ends a test that needs a server which is not installed: it fails under
// REQUIRE_SERVERS=1, as in CI, and is skipped elsewhere.
func missing(t testing.TB, err error) {
	t.Helper()
	if os.Getenv("REQUIRE_SERVERS") == "1" {
		t.Fatalf("REQUIRE_SERVERS=1: %v", err)
	}
	t.Skipf("SKIPPED, NOT TESTED: %v", err)
}

// errNotInstalled marks that a server's program was not found.
var errNotInstalled = errors.New("not installed")

// newDatabase returns the DSN of a database with the current schema and no rows, which
// is dropped when the test ends.
func newDatabase(t testing.TB) string {
	t.Helper()
	return createDatabase(t, "TEMPLATE nexusflow_template")
}

// emptyDatabase returns the DSN of a database without any table.
func emptyDatabase(t testing.TB) string {
	t.Helper()
	return createDatabase(t, "TEMPLATE template0")
}

func createDatabase(t testing.TB, options string) string {
	t.Helper()
	s := testPostgres(t)
	name := "test_" + strconv.FormatInt(databases.Add(1), 10)
	s.exec(t, "CREATE DATABASE "+name+" "+options)
	t.Cleanup(func() { s.exec(t, "DROP DATABASE "+name+" WITH (FORCE)") })
	return s.dsn(name)
}

// testPools returns the pools of a new database.
func testPools(t testing.TB) *pools {
	t.Helper()
	p, err := openPools(t.Context(), newDatabase(t), testLease)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// testPostgres returns the shared cluster.
func testPostgres(t testing.TB) *postgresServer {
	t.Helper()
	s, err := sharedPostgres()
	if errors.Is(err, errNotInstalled) {
		missing(t, err)
	}
	if err != nil {
		t.Fatalf("start shared PostgreSQL: %v", err)
	}
	return s
}

// startSharedPostgres starts the cluster that lives as long as the test binary, and makes
// the template that newDatabase copies.
func startSharedPostgres() (*postgresServer, error) {
	s, err := newPostgresServer()
	if err != nil {
		return nil, err
	}
	whenDone(s.remove)
	if err := s.start(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := s.query(ctx, "CREATE DATABASE nexusflow_template"); err != nil {
		return nil, err
	}
	return s, migrate(ctx, discardLog(), s.dsn("nexusflow_template"))
}

// startPostgresServer starts a cluster for one test that stops, kills or reconfigures
// it. It has no database of ours yet.
func startPostgresServer(t testing.TB) *postgresServer {
	t.Helper()
	s, err := newPostgresServer()
	if errors.Is(err, errNotInstalled) {
		missing(t, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.remove)
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	return s
}

// A postgresServer is a private cluster, reachable by a socket in its own folder.
type postgresServer struct {
	bin    string
	dir    string   // holds data and the socket
	socket string   // the socket's path, for a proxy
	env    []string // beside the environment, from the next start on
	proc   *serverProcess
}

func newPostgresServer() (*postgresServer, error) {
	bin, err := findPostgres(os.Getenv("EMBEDDED_POSTGRES_BIN"))
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL %w: %w", errNotInstalled, err)
	}
	dir, err := serverDir()
	if err != nil {
		return nil, err
	}
	s := &postgresServer{bin: bin, dir: dir, socket: filepath.Join(dir, ".s.PGSQL.5432")}
	cmd := exec.Command(filepath.Join(bin, "initdb"), "--pgdata", filepath.Join(dir, "data"),
		"--username", "nexusflow", "--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions")
	cmd.Dir = dir
	if err := asServerUser(cmd, dir); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	return s, nil
}

// start starts the stopped server, with further settings in the form "name=value", and
// returns when it answers. After a kill it may have to wait for orphaned backends.
func (s *postgresServer) start(settings ...string) error {
	args := []string{"-D", filepath.Join(s.dir, "data")}
	for _, set := range append([]string{
		"listen_addresses=", "unix_socket_directories=" + s.dir, "max_connections=300",
		"dynamic_shared_memory_type=mmap", "fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=64MB", "max_wal_size=256MB", "log_checkpoints=off",
	}, settings...) {
		args = append(args, "-c", set)
	}
	limit := time.Now().Add(30 * time.Second)
	for {
		proc, err := startServer(func() (*exec.Cmd, error) {
			cmd := exec.Command(filepath.Join(s.bin, "postgres"), args...)
			cmd.Dir = s.dir
			cmd.Env = append(os.Environ(), s.env...)
			apart(cmd)
			return cmd, asServerUser(cmd)
		})
		if err != nil {
			return fmt.Errorf("start postgres: %w", err)
		}
		s.proc = proc
		ready := proc.answers(limit, func(ctx context.Context) error { return s.query(ctx, "SELECT 1") })
		if ready == nil {
			return nil
		}
		proc.signal(syscall.SIGQUIT)
		<-proc.done
		if time.Now().After(limit) {
			return fmt.Errorf("start postgres: %w: %s", ready, proc.out.String())
		}
	}
}

// stop shuts the server down, cutting its connections off.
func (s *postgresServer) stop() { s.proc.end(syscall.SIGINT) }

// crash ends the server as a power cut would.
func (s *postgresServer) crash() { s.proc.end(syscall.SIGQUIT) }

// restart stops the server and starts it again.
func (s *postgresServer) restart(t testing.TB, settings ...string) {
	t.Helper()
	s.stop()
	if err := s.start(settings...); err != nil {
		t.Fatal(err)
	}
}

func (s *postgresServer) remove() {
	if s.proc != nil {
		s.crash()
	}
	os.RemoveAll(s.dir)
}

// dsn names one of the server's databases.
func (s *postgresServer) dsn(database string) string {
	return "postgres://nexusflow@/" + database + "?host=" + s.dir
}

// query runs statements in the maintenance database on a connection of their own.
func (s *postgresServer) query(ctx context.Context, statements string) error {
	conn, err := pgx.Connect(ctx, s.dsn("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, statements)
	return err
}

// exec is query for tests and their cleanups.
func (s *postgresServer) exec(t testing.TB, statements string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
	defer cancel()
	if err := s.query(ctx, statements); err != nil {
		t.Fatalf("%s: %v", statements, err)
	}
}

// createDatabase makes a database with the current schema on a private server.
func (s *postgresServer) createDatabase(t testing.TB, name string) string {
	t.Helper()
	s.exec(t, "CREATE DATABASE "+name)
	if err := migrate(t.Context(), discardLog(), s.dsn(name)); err != nil {
		t.Fatal(err)
	}
	return s.dsn(name)
}

// newRedisURL returns the URL of the Redis that all tests share: use streamName, and
// flush nothing.
func newRedisURL(t testing.TB) string {
	t.Helper()
	url, err := sharedRedis()
	if err != nil {
		t.Fatalf("start shared Redis: %v", err)
	}
	if os.Getenv("REQUIRE_SERVERS") == "1" && !strings.HasPrefix(url, "unix:") {
		missing(t, fmt.Errorf("redis-server %w", errNotInstalled))
	}
	return url
}

// streamName returns a stream name that no other test uses.
func streamName(t testing.TB) string {
	return t.Name() + "-" + rand.Text()[:8]
}

func startSharedRedis() (string, error) {
	s, err := newRedisServer()
	if errors.Is(err, errNotInstalled) {
		fmt.Fprintln(os.Stderr, "redis-server is not installed: tests use miniredis")
		m := miniredis.NewMiniRedis()
		whenDone(m.Close)
		return "redis://" + m.Addr(), m.Start()
	}
	if err != nil {
		return "", err
	}
	whenDone(s.remove)
	return s.url, s.start()
}

// startRedisServer starts a Redis for one test that stops, fills or flushes it. It
// keeps nothing on disk, so a restart finds it empty.
func startRedisServer(t testing.TB, settings ...string) *redisServer {
	t.Helper()
	s, err := newRedisServer(settings...)
	if errors.Is(err, errNotInstalled) {
		missing(t, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.remove)
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	return s
}

// A redisServer is a private Redis on a socket in its own folder.
type redisServer struct {
	url      string
	socket   string
	bin      string
	dir      string
	settings []string
	proc     *serverProcess
}

func newRedisServer(settings ...string) (*redisServer, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		bin, err = exec.LookPath("valkey-server")
	}
	if err != nil {
		return nil, fmt.Errorf("redis-server %w: %w", errNotInstalled, err)
	}
	dir, err := serverDir()
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "redis.sock")
	return &redisServer{url: "unix://" + socket, socket: socket, bin: bin, dir: dir, settings: settings}, nil
}

// start starts the stopped server and returns when it answers.
func (s *redisServer) start() error {
	proc, err := startServer(func() (*exec.Cmd, error) {
		cmd := exec.Command(s.bin, append([]string{"--port", "0", "--unixsocket", s.socket, "--dir", s.dir, "--save", "", "--appendonly", "no"}, s.settings...)...)
		apart(cmd)
		return cmd, nil
	})
	if err != nil {
		return fmt.Errorf("start redis-server: %w", err)
	}
	s.proc = proc
	return proc.answers(time.Now().Add(15*time.Second), func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", s.socket)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "PING\r\n"); err != nil {
			return err
		}
		// Any answer will do: with a password it is NOAUTH.
		_, err = conn.Read(make([]byte, 1))
		return err
	})
}

// stop ends the server; everything in it is lost.
func (s *redisServer) stop() { s.proc.end(syscall.SIGKILL) }

// restart stops the server and starts it again, empty.
func (s *redisServer) restart(t testing.TB) {
	t.Helper()
	s.stop()
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
}

func (s *redisServer) remove() {
	if s.proc != nil {
		s.stop()
	}
	os.RemoveAll(s.dir)
}

// A serverProcess is a child and what it printed.
type serverProcess struct {
	cmd  *exec.Cmd
	out  *bytes.Buffer // not to be read before done
	done chan struct{} // closed once the process is gone
	err  error         // why it ended; set before done
}

// startServer starts the command that make returns. It does so on a thread that
// stays until the child is gone: the signal that ends a child with its parent
// follows the parent's thread (golang/go#27505).
func startServer(command func() (*exec.Cmd, error)) (*serverProcess, error) {
	p := &serverProcess{out: new(bytes.Buffer), done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		defer close(p.done)
		runtime.LockOSThread()
		cmd, err := command()
		if err == nil {
			p.cmd = cmd
			if cmd.Stdout == nil {
				cmd.Stdout, cmd.Stderr = p.out, p.out
			}
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	return p, <-started
}

// answers waits until ask succeeds, the process ends or the limit passes.
func (p *serverProcess) answers(limit time.Time, ask func(context.Context) error) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		err := ask(ctx)
		cancel()
		if err == nil {
			return nil
		}
		if time.Now().After(limit) {
			return err
		}
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("it ended: %w", errors.Join(p.err, err))
		}
	}
}

func (p *serverProcess) signal(sig os.Signal) { p.cmd.Process.Signal(sig) }

// end signals the process and waits until it is gone.
func (p *serverProcess) end(sig os.Signal) {
	p.signal(sig)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

// serverDirs is where servers keep their data: in memory where that is possible.
func serverDirs() string {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		return "/dev/shm"
	}
	return os.TempDir()
}

// serverDir makes a folder for one server. Its name carries our process id, for removeLeftovers.
func serverDir() (string, error) {
	return os.MkdirTemp(serverDirs(), fmt.Sprintf("nexusflow-test-%d-", os.Getpid()))
}

// removeLeftovers deletes the folders of test binaries that were killed. Their
// servers died with them.
func removeLeftovers() {
	dirs, _ := filepath.Glob(filepath.Join(serverDirs(), "nexusflow-test-*"))
	for _, dir := range dirs {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "nexusflow-test-"), "-")
		n, err := strconv.Atoi(pid)
		if err != nil {
			continue
		}
		owner, err := os.FindProcess(n)
		if err == nil && errors.Is(owner.Signal(syscall.Signal(0)), os.ErrProcessDone) {
			os.RemoveAll(dir)
		}
	}
}
