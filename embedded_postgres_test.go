//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// diesWithProgram says that this system stops the server of a killed program.
const diesWithProgram = runtime.GOOS == "linux" || runtime.GOOS == "freebsd"

func TestEmbeddedPostgresKeepsRows(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	wantRows(t, p, 1)
	p.stop(t, syscall.SIGTERM)
	if alive(p.server) {
		t.Error("the server outlived a clean stop")
	}
	p = startProgram(t, "postgres", temp)
	wantRows(t, p, 2)
	p.stop(t, syscall.SIGINT) // to the whole group, as Ctrl-C
	entries, err := os.ReadDir(temp)
	if err != nil || len(entries) != 1 {
		t.Errorf("left in the temporary folder: %v, %v, want the data only", entries, err)
	}
}

func TestEmbeddedPostgresAfterKill(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	for n := range 3 {
		p := startProgram(t, "postgres", temp)
		wantRows(t, p, n+1)
		p.kill(t)
		if n == 0 && diesWithProgram {
			eventually(t, "postgres stops by itself", func() bool { return !alive(p.server) })
		}
		// The later rounds start at once, while the server may still be on its way out.
	}
}

func TestEmbeddedPostgresAfterKillOfBoth(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	for n := range 3 {
		p := startProgram(t, "postgres", temp)
		wantRows(t, p, n+1)
		// The server first: it must not see the program die.
		if err := syscall.Kill(p.server, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		p.kill(t)
	}
}

// A process of the dead server that lives on still has its memory: PostgreSQL
// refuses to start until it is gone, and so the start waits.
func TestEmbeddedPostgresAwaitsOldProcesses(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	wantRows(t, p, 1)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.server, p.server))
	if err != nil || len(strings.Fields(string(text))) == 0 {
		t.Skipf("this system does not list child processes: %v", err)
	}
	old, err := strconv.Atoi(strings.Fields(string(text))[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(old, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(p.server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.kill(t)
	began := time.Now()
	release := time.AfterFunc(2*time.Second, func() { syscall.Kill(old, syscall.SIGCONT) })
	defer release.Stop()
	p = startProgram(t, "postgres", temp)
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("started after %v, while a process of the old server was there", took)
	}
	wantRows(t, p, 2)
}

func TestEmbeddedPostgresEndsProgram(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	p := startProgram(t, "postgres", serverTemp(t))
	if err := syscall.Kill(p.server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got, want := p.rest(t), "error embedded postgres exited: signal: killed"; !strings.HasPrefix(got, want) {
		t.Errorf("helper said %q, want %q", got, want)
	}
}

func TestEmbeddedPostgresInUse(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	_, line := launchProgram(t, "postgres", temp)
	want := fmt.Sprintf("error %s/data/postgres is in use by another nexusflow (process %d)", temp, p.cmd.Process.Pid)
	if !strings.HasPrefix(line, want) {
		t.Errorf("second program said %q, want %q", line, want)
	}
	wantRows(t, p, 1) // the first is not disturbed
}

// A restarted container or machine gives the number in postmaster.pid to another program.
func TestEmbeddedPostgresStalePid(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	wantRows(t, p, 1)
	p.stop(t, syscall.SIGTERM)

	bystander := exec.Command("sleep", "600")
	if err := asServerUser(bystander); err != nil { // of the same uid, or PostgreSQL would see through it
		t.Fatal(err)
	}
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bystander.Process.Kill(); bystander.Wait() })
	dir := filepath.Join(temp, "data", "postgres")
	user, err := clusterUser(dir)
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(temp, socketName(dir))
	if err := makePrivate(socket, user); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("%d\n%s\n1700000000\n5432\n%s\n\n  123456    654321\nready   \n", bystander.Process.Pid, dir, socket)
	for _, path := range []string{filepath.Join(dir, "postmaster.pid"), filepath.Join(socket, ".s.PGSQL.5432.lock")} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := user.give(path); err != nil {
			t.Fatal(err)
		}
	}
	p = startProgram(t, "postgres", temp)
	wantRows(t, p, 2)
	if !alive(bystander.Process.Pid) {
		t.Error("the start killed a process that has nothing to do with it")
	}
}

// Where the kernel does not stop the server of a killed program, the next start does.
func TestEmbeddedPostgresLeftOver(t *testing.T) {
	t.Parallel()
	bin := needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	wantRows(t, p, 1)
	p.stop(t, syscall.SIGTERM)

	dir := filepath.Join(temp, "data", "postgres")
	socket := filepath.Join(temp, "elsewhere")
	if err := os.Mkdir(socket, 0o700); err != nil {
		t.Fatal(err)
	}
	left := exec.Command(filepath.Join(bin, "postgres"), "-D", dir, "-k", socket, "-h", "")
	left.Dir, left.Stderr = temp, t.Output()
	if err := asServerUser(left, socket); err != nil {
		t.Fatal(err)
	}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- left.Wait() }()
	eventually(t, "left over server up", func() bool {
		_, err := os.Stat(filepath.Join(socket, ".s.PGSQL.5432"))
		return err == nil
	})
	p = startProgram(t, "postgres", temp)
	wantRows(t, p, 2)
	if err := <-ended; err != nil {
		t.Errorf("the server left over ended with %v, want a clean stop", err)
	}
}

func TestEmbeddedPostgresForeignData(t *testing.T) {
	t.Parallel()
	bin := needPostgres(t)
	_, version, err := majorVersion(t.Context(), bin)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, file, content string
		want                []string
	}{
		{"other major version", "PG_VERSION", "9.6\n", []string{"made by PostgreSQL 9.6", version}},
		{"not a cluster", "holiday.jpg", "sea", []string{"holds files but no PostgreSQL cluster"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			temp := serverTemp(t)
			dir := filepath.Join(temp, "data", "postgres")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, test.file), []byte(test.content), 0o644); err != nil {
				t.Fatal(err)
			}
			_, line := launchProgram(t, "postgres", temp)
			for _, want := range append(test.want, dir) {
				if !strings.HasPrefix(line, "error") || !strings.Contains(line, want) {
					t.Errorf("program said %q, want an error with %q", line, want)
				}
			}
			entries, err := os.ReadDir(dir)
			text, _ := os.ReadFile(filepath.Join(dir, test.file))
			if err != nil || len(entries) != 1 || string(text) != test.content {
				t.Errorf("data folder holds %v (%s = %q), %v, want it untouched", entries, test.file, text, err)
			}
		})
	}
}

// A start that fails must show why, and must not hold the lock.
func TestEmbeddedPostgresBrokenCluster(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	p := startProgram(t, "postgres", temp)
	wantRows(t, p, 1)
	p.stop(t, syscall.SIGTERM)
	conf := filepath.Join(temp, "data", "postgres", "postgresql.conf")
	good, err := os.ReadFile(conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(conf, append(good, "\nno_such_setting = 1\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	_, line := launchProgram(t, "postgres", temp)
	if !strings.HasPrefix(line, "error embedded postgres") || !strings.Contains(line, "no_such_setting") {
		t.Errorf("program said %q, want an error with the server's own words", line)
	}
	if err := os.WriteFile(conf, good, 0o600); err != nil {
		t.Fatal(err)
	}
	wantRows(t, startProgram(t, "postgres", temp), 2)
}

// A start that is interrupted while it makes the cluster leaves none behind.
func TestEmbeddedPostgresInterruptedInit(t *testing.T) {
	t.Parallel()
	needPostgres(t)
	temp := serverTemp(t)
	data := filepath.Join(temp, "data")
	cfg := config{DataDir: data, DataDirSet: true}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := startPostgres(ctx, discardLog(), cfg)
		done <- err
	}()
	eventually(t, "initdb at work", func() bool {
		found, _ := filepath.Glob(filepath.Join(data, "postgres.initdb-*", "base"))
		return len(found) > 0
	})
	cancel()
	if err := <-done; err == nil {
		t.Fatal("startPostgres went on after its context ended")
	}
	if _, err := os.Stat(filepath.Join(data, "postgres")); err == nil {
		t.Error("an interrupted initdb left a cluster")
	}
	// What a kill -9 leaves, the next start removes.
	if err := os.MkdirAll(filepath.Join(data, "postgres.initdb-killed", "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	wantRows(t, startProgram(t, "postgres", temp), 1)
	if found, _ := filepath.Glob(filepath.Join(data, "postgres.initdb-*")); len(found) > 0 {
		t.Errorf("left behind: %v", found)
	}
}

// TestStopIsBounded runs a child that ignores what it is asked.
func TestStopIsBounded(t *testing.T) {
	t.Parallel()
	log, err := openServerLog(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := startChild("deaf", exec.Command("sh", "-c", "trap '' INT QUIT TERM; echo deaf; while :; do sleep 0.2; done"), log)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "child is deaf", func() bool { return strings.Contains(log.last(), "deaf") })
	began := time.Now()
	c.stop(syscall.SIGTERM, syscall.SIGQUIT)
	if took := time.Since(began); took < 9*time.Second || took > 15*time.Second {
		t.Errorf("stop took %v, want about ten seconds", took)
	}
	if err := c.wait(); err != nil {
		t.Errorf("wait after stop = %v, want nil", err)
	}
}
