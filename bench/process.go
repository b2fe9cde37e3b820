package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// A process is a program that this run started.
type process struct {
	name   string
	cmd    *exec.Cmd
	addr   string // where it listens, "" when it serves no HTTP
	log    string // file with what it printed
	exited chan struct{}
	err    error // set before exited is closed

	beforeStop func(*process) // nil, or called before it is told to stop
}

// startProcess starts cmd with its output in dir/name.log.
func startProcess(dir, name string, cmd *exec.Cmd) (*process, error) {
	p := &process{name: name, cmd: cmd, log: filepath.Join(dir, name+".log"), exited: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	defer out.Close() // the child has its own copy
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stop ends the process with sig, by force after 15 s, and waits until it is gone.
func (p *process) stop(sig os.Signal) {
	if p.beforeStop != nil {
		p.beforeStop(p)
	}
	p.cmd.Process.Signal(sig) // an error means that it is gone
	select {
	case <-p.exited:
	case <-time.After(15 * time.Second):
		fmt.Fprintf(os.Stderr, "bench: %s does not stop, killed\n", p.name)
		p.cmd.Process.Kill()
		<-p.exited
	}
}

const (
	soon = 10 * time.Millisecond
	// rarely is for questions to PostgreSQL while it is measured: each steps over the index
	// entries of all rows that were worked off since the last VACUUM. What is measured
	// does not depend on when it is noticed.
	rarely = 250 * time.Millisecond
)

// waitUntil calls ready again and again, every so often, until it returns nil. It fails when the
// process ends or limit passes, with the last of its log.
func (p *process) waitUntil(ctx context.Context, limit, every time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended: %w; %s", p.name, errors.Join(p.err, err), p.tail())
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; %s", p.name, err, p.tail())
		case <-time.After(every):
		}
	}
}

// tail returns the end of the log.
func (p *process) tail() string {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-2000):])
}

// answers waits until path is answered with one of the wanted statuses.
func (p *process) answers(ctx context.Context, path string, want int) error {
	return p.waitUntil(ctx, 60*time.Second, soon, func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.addr+path, nil)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			return fmt.Errorf("GET %s: %s", path, answer.Status)
		}
		return nil
	})
}

// freeAddr returns a loopback address that nobody listens on just now.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// stopAll ends services as an operator would, one after the other.
func stopAll(services ...*process) {
	for _, p := range services {
		p.stop(syscall.SIGTERM)
	}
}
