//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// clearStale makes way for a start. This program holds the lock of the data, so a
// postmaster.pid is left over from a program that was killed. The process it
// names is stopped only if it is a server on this very data: after a reboot or in
// a restarted container the number belongs to something else, which a blind
// pg_ctl stop would interrupt.
func (p *embeddedPostgres) clearStale(ctx context.Context) error {
	pidFile := filepath.Join(p.dir, "postmaster.pid")
	text, err := os.ReadFile(pidFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read postmaster.pid: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err == nil && isPostgresOn(ctx, pid, p.dir) {
		p.log.Info("stopping postgres left over from an earlier run", "path", p.dir, "pid", pid)
		if err := p.stopLeftOver(ctx, pid); err != nil {
			return err
		}
	}
	// PostgreSQL would trust the number in these files and refuse to start. Its check
	// of the shared memory, which needs none of them, still guards data in use.
	socket := filepath.Join(p.socket, ".s.PGSQL.5432")
	for _, path := range []string{pidFile, socket, socket + ".lock"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("clear left over file: %w", err)
		}
	}
	return nil
}

// stopLeftOver stops the server pid on the cluster and waits for its end.
func (p *embeddedPostgres) stopLeftOver(ctx context.Context, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "pg_ctl"), "stop", "-D", p.dir, "-m", "fast", "-w", "-t", "50")
	cmd.Dir, cmd.Env = p.dir, serverEnv()
	p.user.run(cmd)
	out, err := cmd.CombinedOutput()
	// It may have been on its way out, told by the kernel of its program's death:
	// then pg_ctl complains of the missing file a moment before the process is gone.
	for range 100 {
		if !isPostgresOn(ctx, pid, p.dir) {
			return nil
		}
		if !sleep(ctx, 50*time.Millisecond) {
			break
		}
	}
	return fmt.Errorf("stop postgres left over from an earlier run, process %d on %s: %v: %s", pid, p.dir, err, out)
}

// isPostgresOn reports whether process pid is the main process of a server on the cluster dir.
func isPostgresOn(ctx context.Context, pid int, dir string) bool {
	if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
		args := strings.Split(string(text), "\x00")
		if !isPostgresName(args[0]) {
			return false
		}
		for i, arg := range args[:len(args)-1] {
			if arg == "-D" && sameFolder(args[i+1], dir) {
				return true
			}
		}
		return sameFolder(fmt.Sprintf("/proc/%d/cwd", pid), dir) // started by hand, the folder from PGDATA
	}
	out, err := exec.CommandContext(ctx, "ps", "-ww", "-o", "args=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return false
	}
	line := strings.TrimSpace(string(out)) + " "
	program, rest, _ := strings.Cut(line, " -D ")
	return isPostgresName(program) && strings.HasPrefix(rest, dir+" ")
}

func isPostgresName(program string) bool {
	name := filepath.Base(program)
	return name == "postgres" || name == "postmaster"
}

func sameFolder(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}
