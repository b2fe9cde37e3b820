//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// child is a server process of this program. Where the system allows it, the
// child is told to stop when the program dies, however it dies.
type child struct {
	name     string
	cmd      *exec.Cmd
	log      *serverLog
	stopping atomic.Bool
	done     chan struct{} // closed when the process has ended
	err      error         // how it ended; read it after done
}

// startChild starts cmd in a process group of its own, so that a Ctrl-C at the
// terminal reaches this program alone and the server outlives the tasks that
// are being finished. Output goes to log, which the child closes at its end.
func startChild(name string, cmd *exec.Cmd, log *serverLog) (*child, error) {
	c := &child{name: name, cmd: cmd, log: log, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = log.file, log.file
	cmd.Env = serverEnv()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	dieWithProgram(cmd.SysProcAttr)
	started := make(chan error)
	go func() {
		// The parent of Pdeathsig is the thread, not the process (golang/go#27505):
		// a thread that Go retires would take the server with it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		c.err = cmd.Wait()
		close(c.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, explainRoot(err))
	}
	return c, nil
}

// wait blocks until the process has ended. It returns nil after stop, and
// otherwise how the process ended and what it logged last.
func (c *child) wait() error {
	<-c.done
	if c.stopping.Load() {
		return nil
	}
	return c.exited()
}

// exited describes the end of a process that was not asked to end.
func (c *child) exited() error {
	how := "exit status 0"
	if c.err != nil {
		how = c.err.Error()
	}
	return fmt.Errorf("embedded %s exited: %s: %s", c.name, how, c.log.last())
}

// stop asks with the signal graceful, after eight seconds with hasty and two
// seconds later with SIGKILL, which none survives. It returns when the process has ended.
func (c *child) stop(graceful, hasty syscall.Signal) {
	c.stopping.Store(true)
	steps := []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{graceful, 8 * time.Second}, {hasty, 2 * time.Second}}
	for _, step := range steps {
		c.cmd.Process.Signal(step.signal) // an error means that it has ended
		select {
		case <-c.done:
			return
		case <-time.After(step.wait):
		}
	}
	c.cmd.Process.Kill()
	<-c.done
}

// runChild runs cmd to its end. When ctx ends first it kills cmd and all that cmd started.
func runChild(ctx context.Context, name string, cmd *exec.Cmd, log *serverLog) error {
	c, err := startChild(name, cmd, log)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-c.done
		return ctx.Err()
	}
	if c.err != nil {
		return fmt.Errorf("run %s: %w: %s", name, c.err, log.last())
	}
	return nil
}
