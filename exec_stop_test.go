package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestCommandInterrupted ends the context of commands that behave well and badly.
func TestCommandInterrupted(t *testing.T) {
	t.Parallel()
	timeout := &timeoutError{after: 10 * time.Minute}
	const stubborn = `trap '' TERM; while :; do sleep 0.1; done`
	tests := []struct {
		name, script string
		cause        error
		min, max     time.Duration // from the end of the context to the return; max 0: before the first SIGKILL
		wantFile     bool          // whether the script came to write its second file
	}{
		{name: "time-out", script: `sleep 60`, cause: timeout},
		{name: "cancelled, children too", script: `sleep 60 | sleep 60 | sleep 60`, cause: errCancelRequested},
		{name: "tidies up and succeeds", script: `trap 'sleep 0.2; echo >"$2"; exit 0' TERM; sleep 60 & wait`,
			cause: errCancelRequested, wantFile: true},
		{name: "child of a killed shell tidies up",
			script: `sh -c 'trap "sleep 0.3; echo >\"\$1\"; exit" TERM; echo >"$1.ready"; while :; do sleep 0.05; done' sh "$2"; :`,
			cause:  errCancelRequested, wantFile: true},
		{name: "stopped by a signal", script: `kill -STOP $$`, cause: errShutdown, min: urgentGrace, max: termGrace},
		{name: "TERM ignored at shutdown", script: stubborn, cause: errShutdown, min: urgentGrace, max: termGrace},
		{name: "TERM ignored, lease lost", script: stubborn, cause: errLeaseLost, min: urgentGrace, max: termGrace},
		{name: "TERM ignored at time-out", script: stubborn, cause: timeout, min: termGrace, max: time.Minute},
		{name: "streams closed, TERM ignored", script: `exec <&- >&- 2>&-; ` + stubborn, cause: errShutdown,
			min: urgentGrace, max: termGrace},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			pidFile, file := filepath.Join(dir, "pid"), filepath.Join(dir, "file")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			done := make(chan error, 1)
			go func() {
				_, err := sh(`echo $$ >"$1"; `+tt.script, pidFile, file).run(ctx, handlerTask(`{}`))
				done <- err
			}()
			pid := pidIn(t, pidFile)
			if strings.Contains(tt.script, ".ready") {
				eventually(t, "grandchild ready", func() bool { _, err := os.Stat(file + ".ready"); return err == nil })
			} else {
				eventually(t, "trap set", func() bool { return quietShell(pid) })
			}
			start := time.Now()
			cancel(tt.cause)
			err := <-done
			took := time.Since(start)
			if err != tt.cause {
				t.Errorf("err = %v, want the cause %v itself", err, tt.cause)
			}
			if took < tt.min || took > cmp.Or(tt.max, termGrace) {
				t.Errorf("ended after %v, want %v to %v", took, tt.min, cmp.Or(tt.max, termGrace))
			}
			groupGone(t, pid)
			if _, err := os.Stat(file); (err == nil) != tt.wantFile {
				t.Errorf("tidied up = %v, want %v", err == nil, tt.wantFile)
			}
		})
	}
}

// quietShell reports whether the shell pid waits for a sleep or is stopped. Before that a
// signal may meet a process between fork and exec, which loses it.
func quietShell(pid int) bool {
	if runtime.GOOS != "linux" {
		return sleep(context.Background(), 300*time.Millisecond)
	}
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	names := []string{strconv.Itoa(pid)} // sh execs its very last command
	for _, p := range append(names, strings.Fields(string(children))...) {
		if name, _ := os.ReadFile("/proc/" + p + "/comm"); string(name) == "sleep\n" {
			return true
		}
	}
	return bytes.Contains(stat, []byte(") T "))
}
