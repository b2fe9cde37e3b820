//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

// embeddedHelperMain turns this test binary into a program with an embedded
// server when the environment says so, and returns otherwise. Tests kill it
// as they could not kill themselves. It prints "ready", the address and the
// server's process id, or "error" and a text; SIGTERM and SIGINT stop it.
func embeddedHelperMain() {
	kind := os.Getenv("EMBEDDED_HELPER")
	if kind == "" {
		return
	}
	if err := embeddedHelper(kind, os.Getenv("EMBEDDED_HELPER_DATA")); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("stopped")
	os.Exit(0)
}

func embeddedHelper(kind, data string) error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg := config{DataDir: data, DataDirSet: true}
	var wait func() error
	var stop func()
	var drain func() error
	switch kind {
	case "postgres":
		p, err := startPostgres(ctx, log, cfg)
		if err != nil {
			return err
		}
		wait, stop = p.wait, p.stop
		drain = func() error { return p.try(context.WithoutCancel(ctx), "nexusflow", "SELECT 1") }
		fmt.Printf("ready\t%s\t%d\n", p.dsn(), p.server.cmd.Process.Pid)
	case "redis":
		r, err := startRedis(ctx, log, cfg)
		if err != nil {
			return err
		}
		wait, stop = r.wait, r.stop
		drain = func() error { return nil }
		fmt.Printf("ready\t%s\t0\n", r.url())
	default:
		return fmt.Errorf("unknown helper %q", kind)
	}
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	select {
	case err := <-ended:
		stop()
		return err
	case <-ctx.Done():
	}
	// The server must have been spared the signal of a Ctrl-C, which the whole
	// process group gets: tasks that are being finished still need it.
	if err := drain(); err != nil {
		return err
	}
	stop()
	return <-ended
}

// program is a running helper.
type program struct {
	cmd    *exec.Cmd
	out    *bufio.Reader
	addr   string // DSN or URL of its server
	server int    // the server's process id
}

// serverTemp returns a folder for data that the server user can reach, in memory where possible.
func serverTemp(t *testing.T) string {
	t.Helper()
	parent := "/tmp"
	if info, err := os.Stat("/dev/shm"); err == nil && info.Mode().Perm()&0o007 == 0o007 {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "nf-embedded-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err = filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// launchProgram starts a helper on the data folder below temp and returns its first line.
func launchProgram(t *testing.T, kind, temp string) (*program, string) {
	t.Helper()
	p := &program{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), "EMBEDDED_HELPER="+kind, "EMBEDDED_HELPER_DATA="+filepath.Join(temp, "data"), "TMPDIR="+temp)
	p.cmd.Stderr = t.Output()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(stdout)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
		if p.server != 0 {
			eventually(t, "server gone", func() bool { return !alive(p.server) })
		}
	})
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("%s helper said nothing: %v", kind, err)
	}
	return p, strings.TrimSpace(line)
}

// startProgram starts a helper whose server must come up.
func startProgram(t *testing.T, kind, temp string) *program {
	t.Helper()
	p, line := launchProgram(t, kind, temp)
	fields := strings.Split(line, "\t")
	if fields[0] != "ready" {
		t.Fatalf("%s helper said %q, want ready", kind, line)
	}
	p.addr = fields[1]
	p.server, _ = strconv.Atoi(fields[2])
	return p
}

// kill ends the program as kill -9 does.
func (p *program) kill(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.cmd.Wait()
}

// stop sends sig to the program's whole process group, as a terminal does, and
// wants a clean end.
func (p *program) stop(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(-p.cmd.Process.Pid, sig); err != nil {
		t.Fatal(err)
	}
	if rest := p.rest(t); rest != "stopped" {
		t.Errorf("helper said %q, want stopped", rest)
	}
}

// rest returns what the program says until it ends.
func (p *program) rest(t *testing.T) string {
	t.Helper()
	text, err := io.ReadAll(p.out)
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Wait()
	return strings.TrimSpace(string(text))
}

// alive reports whether the process runs; a zombie does not.
func alive(pid int) bool {
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
		_, rest, _ := bytes.Cut(stat, []byte(") "))
		return !bytes.HasPrefix(rest, []byte("Z"))
	}
	err := syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// addRow stores one more row and returns how many there are.
func addRow(t *testing.T, dsn string) int {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	for _, statement := range []string{"CREATE TABLE IF NOT EXISTS kept (n int)", "INSERT INTO kept VALUES (1)"} {
		if _, err := conn.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	var n int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM kept").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// wantRows adds a row and wants n of them.
func wantRows(t *testing.T, p *program, n int) {
	t.Helper()
	if got := addRow(t, p.addr); got != n {
		t.Errorf("rows = %d, want %d", got, n)
	}
}
