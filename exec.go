package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	termGrace   = 5 * time.Second // between SIGTERM and SIGKILL
	urgentGrace = 1 * time.Second // the same where the process or the lease is about to end
	pipeGrace   = 1 * time.Second // for streams that a process outside the group holds open
)

// Exit codes with a meaning, from sysexits.h. EX_TEMPFAIL (75) needs no mention: it is
// an error like any other.
const exitDataErr = 65

var errOutputTooLarge = fmt.Errorf("result too large: the command wrote more than %d bytes", maxResultBytes)

// A command is a program that runs once for every attempt, without a shell.
type command struct {
	argv []string
	env  []string // the server's environment, less its secrets and every TASK_ variable
}

func newCommand(argv []string) *command {
	secrets := secretSettings()
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return slices.Contains(secrets, name) || strings.HasPrefix(name, "TASK_")
	})
	return &command{argv, env}
}

// run runs the command for t: payload on standard input, result on standard output. The
// command has a process group of its own, and when run returns nothing of that group
// is left; only a process that has left the group can outlive it. When ctx ends, the
// group gets SIGTERM, then SIGKILL, and run returns the context's cause.
func (c *command) run(ctx context.Context, t task) (any, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	// The kernel sends the parent-death signal when the thread that started the child
	// ends, not the process (golang/go#27505). Locked, this thread lives as long as the
	// child does, and is busy with waiting for it in any case.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e, err := c.start(t)
	if err != nil {
		return nil, err
	}
	e.stream(t.Payload, cancel)
	state, err := e.wait(ctx)
	switch cause := context.Cause(ctx); {
	case e.interrupted && cause != errOutputTooLarge:
		return nil, cause
	case len(e.output) > maxResultBytes:
		return nil, permanent(errOutputTooLarge)
	case err != nil:
		return nil, fmt.Errorf("wait for %s: %w", c.argv[0], err)
	case !state.Success():
		return nil, exitError(state, e.tail.buf)
	}
	return resultOf(e.output), nil
}

// start starts the program. Nothing is left of it when that fails.
func (c *command) start(t task) (*execution, error) {
	cmd := exec.Command(c.argv[0], c.argv[1:]...)
	cmd.Env = append(slices.Clip(c.env),
		"TASK_ID="+t.ID.String(),
		"TASK_NAME="+t.Name,
		"TASK_ATTEMPT="+strconv.Itoa(int(t.Attempt)),
		"TASK_MAX_RETRIES="+strconv.Itoa(int(t.MaxRetries)),
		"TASK_QUEUE="+t.Queue,
		"TASK_IDEMPOTENCY_KEY="+t.IdempotencyKey,
		"TASK_TRACEPARENT="+t.Traceparent,
	)
	cmd.SysProcAttr = commandAttr()
	e := &execution{exited: make(chan struct{}), drained: make(chan struct{})}
	var errs [3]error
	e.stdinPipe, errs[0] = cmd.StdinPipe()
	e.stdoutPipe, errs[1] = cmd.StdoutPipe()
	e.stderrPipe, errs[2] = cmd.StderrPipe()
	if err := errors.Join(errs[:]...); err != nil {
		e.closePipes()
		return nil, fmt.Errorf("start %s: %w", c.argv[0], err) // the collector closes the far ends
	}
	if err := cmd.Start(); err != nil { // closes the pipes
		return nil, fmt.Errorf("start command: %w", err) // the error names the file
	}
	e.process = cmd.Process
	return e, nil
}

// An execution is one running command. Its exec.Cmd is not waited for: Wait closes the
// pipes when the program exits, and what was not read by then is lost.
type execution struct {
	process    *os.Process
	stdinPipe  io.WriteCloser
	stdoutPipe io.ReadCloser
	stderrPipe io.ReadCloser
	output     []byte     // of stdout; complete when drained is closed
	tail       tailBuffer // of stderr

	exited      chan struct{} // the program has ended, and may be waited for
	drained     chan struct{} // all three streams have ended
	interrupted bool          // the context ended first
}

// stream serves the three pipes until the other ends are closed or closePipes is called.
// It cancels when there is more output than a result may hold.
func (e *execution) stream(payload []byte, cancel context.CancelCauseFunc) {
	var streams sync.WaitGroup
	streams.Go(func() {
		e.stdinPipe.Write(payload) // a program that does not read its input may be right
		e.stdinPipe.Close()
	})
	streams.Go(func() {
		e.output, _ = io.ReadAll(io.LimitReader(e.stdoutPipe, maxResultBytes+1))
		if len(e.output) > maxResultBytes {
			cancel(errOutputTooLarge)
		}
	})
	streams.Go(func() { io.Copy(&e.tail, e.stderrPipe) })
	go func() {
		streams.Wait()
		close(e.drained)
	}()
}

// wait returns when the program has ended, its group is gone and its streams are closed.
// It must run on the thread that started the program.
func (e *execution) wait(ctx context.Context) (*os.ProcessState, error) {
	var stopper sync.WaitGroup
	stopper.Go(func() { e.stopAtEnd(ctx) })
	state, err := waitCommand(e.process, func() {
		close(e.exited)
		stopper.Wait()
		e.signal(syscall.SIGKILL)
	})
	grace := pipeGrace
	if e.interrupted {
		grace = 0 // nobody wants the output any more
	}
	late := time.AfterFunc(grace, e.closePipes)
	<-e.drained
	late.Stop()
	e.closePipes()
	return state, err
}

// stopAtEnd returns when the program has exited. When ctx ends before, it asks the group
// to stop and gives it a grace to do so: until the program has exited and nobody
// holds its streams any more, because what a shell script started may need that
// time as well.
func (e *execution) stopAtEnd(ctx context.Context) {
	select {
	case <-e.exited:
		return
	case <-ctx.Done():
	}
	e.interrupted = true
	grace := termGrace
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errOutputTooLarge):
		e.signal(syscall.SIGKILL)
		return
	case errors.Is(cause, errShutdown), errors.Is(cause, errLeaseLost), errors.Is(cause, errTrustEnded):
		grace = urgentGrace
	}
	e.signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	for _, done := range []chan struct{}{e.exited, e.drained} {
		select {
		case <-done:
		case <-timer.C:
			e.signal(syscall.SIGKILL)
			return
		}
	}
}

// signal sends sig to the whole group. The group being gone is not an error.
func (e *execution) signal(sig syscall.Signal) { syscall.Kill(-e.process.Pid, sig) }

func (e *execution) closePipes() {
	for _, c := range []io.Closer{e.stdinPipe, e.stdoutPipe, e.stderrPipe} {
		if c != nil {
			c.Close()
		}
	}
}

// exitError says how a program ended that did not succeed.
func exitError(state *os.ProcessState, stderr []byte) error {
	text := cleanText(stderr)
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		// Standard error follows rather than replaces this: without the signal,
		// nobody would see that the kernel ended it for want of memory.
		err := fmt.Errorf("killed by signal %d (%v)", ws.Signal(), ws.Signal())
		if text != "" {
			err = fmt.Errorf("%w: %s", err, text)
		}
		return err
	}
	if text == "" {
		text = state.String()
	}
	err := errors.New(text)
	if state.ExitCode() == exitDataErr {
		return permanent(err)
	}
	return err
}

// A tailBuffer keeps the end of what is written to it: at least the last maxErrorBytes,
// and never more than twice that.
type tailBuffer struct{ buf []byte }

func (b *tailBuffer) Write(p []byte) (int, error) {
	b.buf = append(b.buf, p[max(0, len(p)-2*maxErrorBytes):]...)
	if over := len(b.buf) - 2*maxErrorBytes; over > 0 {
		b.buf = b.buf[:copy(b.buf, b.buf[over:])]
	}
	return len(p), nil
}
