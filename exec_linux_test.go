package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestCommandDiesWithTheServer kills a server that runs a command.
func TestCommandDiesWithTheServer(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pid")
	server := execHelper(t, "run", file)
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	pid := pidIn(t, file)
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	server.Wait() // reports the kill
	eventually(t, "end of the command", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) || dead(pid) })
}

// dead reports whether pid is a zombie that its new parent has not reaped yet.
func dead(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return strings.Contains(string(stat), ") Z ")
}

// TestCommandOutlivesThreads lets threads of the server end all the time, which must not
// reach the commands that it started (golang/go#27505).
func TestCommandOutlivesThreads(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var threads, commands sync.WaitGroup
	for range 2 {
		threads.Go(func() {
			for sleep(ctx, time.Millisecond) {
				done := make(chan struct{})
				go func() {
					defer close(done)
					runtime.LockOSThread() // never unlocked, so the thread ends here
				}()
				<-done
			}
		})
	}
	for range 8 {
		commands.Go(func() {
			for range 3 {
				if _, err := sh(`sleep 0.2`).run(t.Context(), handlerTask(`{}`)); err != nil {
					t.Errorf("run = %v, want success", err)
				}
			}
		})
	}
	commands.Wait()
	cancel()
	threads.Wait()
}

// TestCommandAsProcessOne runs a command in a process that inherits orphans, as process 1
// of a container does, and wants none of them left as a zombie.
func TestCommandAsProcessOne(t *testing.T) {
	t.Parallel()
	out, err := execHelper(t, "adopt", "").CombinedOutput()
	if err != nil {
		t.Errorf("helper: %v\n%s", err, out)
	}
}

const helperEnv = "NEXUSFLOW_EXEC_HELPER"

func execHelper(t *testing.T, mode, file string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), helperEnv+"="+mode, helperEnv+"_FILE="+file)
	return cmd
}

// runExecHelper is the other process of the tests above.
func runExecHelper(mode string) error {
	switch mode {
	case "run":
		_, err := sh(`echo $$ >"$1"; exec sleep 60`, os.Getenv(helperEnv+"_FILE")).run(context.Background(), handlerTask(`{}`))
		return err
	case "adopt":
		const setChildSubreaper = 36 // PR_SET_CHILD_SUBREAPER
		if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setChildSubreaper, 1, 0); errno != 0 {
			return errno
		}
		script := `sh -c 'sleep 60 & sleep 60 & wait' & sleep 60 & sleep 0.1; echo 1`
		if _, err := sh(script).run(context.Background(), handlerTask(`{}`)); err != nil {
			return err
		}
		if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != syscall.ECHILD {
			return fmt.Errorf("a child is left: %d, %v", pid, err)
		}
		return nil
	}
	return fmt.Errorf("unknown mode %q", mode)
}

// execHelperMain ends the process when it was started as a helper of these tests. TestMain
// calls it first.
func execHelperMain() {
	if mode := os.Getenv(helperEnv); mode != "" {
		if err := runExecHelper(mode); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}
