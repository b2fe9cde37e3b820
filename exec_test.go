package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// sh returns a command that runs script; its $1, $2 ... are args.
func sh(script string, args ...string) *command {
	return newCommand(append([]string{"sh", "-c", script, "sh"}, args...))
}

func handlerTask(payload string) task {
	return task{
		ID:      uuid.MustParse("01890a5d-ac96-774b-bcce-b302099a8057"),
		Name:    "test",
		Payload: json.RawMessage(payload),
		Queue:   defaultQueue,
		Attempt: 1, MaxRetries: 3,
	}
}

func isPermanent(err error) bool {
	_, ok := errors.AsType[*permanentError](err)
	return ok
}

func resultJSON(t *testing.T, result any) string {
	t.Helper()
	data, err := json.Marshal(result)
	if err != nil {
		t.Fatalf("marshal result: %v", err)
	}
	return string(data)
}

// pidIn returns the process id in a file, waiting for the file to be there.
func pidIn(t *testing.T, file string) int {
	t.Helper()
	var pid int
	eventually(t, "process id in "+filepath.Base(file), func() bool {
		data, _ := os.ReadFile(file)
		if !bytes.HasSuffix(data, []byte("\n")) {
			return false
		}
		var err error
		if pid, err = strconv.Atoi(strings.TrimSpace(string(data))); err != nil {
			t.Fatalf("process id: %v", err)
		}
		return true
	})
	return pid
}

// groupGone fails the test when a process of the group that pid led is left. One that has
// only not been reaped yet by the system's first process does not count.
func groupGone(t *testing.T, pid int) {
	t.Helper()
	eventually(t, fmt.Sprintf("end of process group %d", pid), func() bool {
		if err := syscall.Kill(-pid, 0); runtime.GOOS != "linux" || err != nil {
			return errors.Is(err, syscall.ESRCH)
		}
		group := strconv.Itoa(pid)
		return !slices.ContainsFunc(processes(), func(p procStat) bool { return p.group == group && p.state != "Z" })
	})
}

// A procStat is a line of the system's list.
type procStat struct{ state, parent, group string }

// processes lists the system's processes; it finds none where there is no /proc.
func processes() (list []procStat) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		data, _ := os.ReadFile(file) // a process may end meanwhile
		_, rest, _ := strings.Cut(string(data), ") ")
		if f := strings.Fields(rest); len(f) > 2 {
			list = append(list, procStat{f[0], f[1], f[2]})
		}
	}
	return list
}

func TestCommandOutcomes(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, script, payload string
		want                  string // result as JSON, when there is no error
		wantErr               string
		wantPermanent         bool
	}{
		{name: "no output", script: `true`, want: `null`},
		{name: "blank output", script: `printf ' \n\n'`, want: `null`},
		{name: "object", script: `printf '{"a": 1}\n'`, want: `{"a":1}`},
		{name: "scalar", script: `echo 42`, want: `42`},
		{name: "json null", script: `echo null`, want: `null`},
		{name: "text", script: `echo "hello <world>"`, want: `{"output":"hello \u003cworld\u003e"}`},
		{name: "several lines", script: `printf 'a\n b\n'`, want: `{"output":"a\n b"}`},
		{name: "two json values are text", script: `echo 1; echo 2`, want: `{"output":"1\n2"}`},
		{name: "invalid UTF-8", script: `printf 'a\377b'`, want: `{"output":"a` + "\uFFFD" + `b"}`},
		{name: "invalid UTF-8 in JSON", script: `printf '{"a":"\377"}'`, want: `{"a":"` + "\uFFFD" + `"}`},
		{name: "binary", script: `printf 'a\000\377b'`, want: `{"output":"a\u0000` + "\uFFFD" + `b"}`},
		{name: "payload is stdin, digits kept", script: `cat`,
			payload: `{"id": 12345678901234567890, "x": 0.10, "y": 9007199254740993}`,
			want:    `{"id":12345678901234567890,"x":0.10,"y":9007199254740993}`},
		{name: "stdin ends", script: `cat >/dev/null; echo '"eof"'`, payload: `{}`, want: `"eof"`},
		{name: "stdin never read", script: `echo 1`, payload: bigPayload(1 << 20), want: `1`},
		{name: "stdin closed", script: `exec <&-; sleep 0.1; echo 1`, payload: bigPayload(1 << 20), want: `1`},
		{name: "stderr of a success is dropped", script: `echo note >&2; echo 1`, want: `1`},
		{name: "stderr is the message", script: `echo out; echo "no such user" >&2; exit 1`, wantErr: "no such user"},
		{name: "no stderr", script: `exit 3`, wantErr: "exit status 3"},
		{name: "stderr of no text", script: `printf '\000 \n' >&2; exit 3`, wantErr: "exit status 3"},
		{name: "tempfail", script: `exit 75`, wantErr: "exit status 75"},
		{name: "data error", script: `echo "bad input" >&2; exit 65`, wantErr: "bad input", wantPermanent: true},
		{name: "data error without text", script: `exit 65`, wantErr: "exit status 65", wantPermanent: true},
		{name: "killed", script: `kill -9 $$`, wantErr: "killed by signal 9 (killed)"},
		{name: "killed, with stderr", script: `echo working >&2; kill -SEGV $$`, wantErr: "killed by signal 11 (segmentation fault): working"},
		{name: "unreadable stderr", script: `printf 'a\000b\377c' >&2; exit 1`, wantErr: "ab\uFFFDc"},
		{name: "one byte too much", script: `head -c 1048577 /dev/zero | tr '\0' 1`, wantErr: "result too large", wantPermanent: true},
		{name: "endless output", script: `yes`, wantErr: "result too large", wantPermanent: true},
		{name: "endless output, TERM ignored", script: `trap '' TERM; while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done`,
			wantErr: "result too large", wantPermanent: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "pid")
			c := sh(`echo $$ >"$1"; `+tt.script, file)
			result, err := c.run(t.Context(), handlerTask(tt.payload))
			groupGone(t, pidIn(t, file))
			if tt.wantErr == "" {
				if err != nil {
					t.Fatalf("run = %v, want no error", err)
				}
				if got := resultJSON(t, result); got != tt.want {
					t.Errorf("result = %s, want %s", got, tt.want)
				}
				return
			}
			if err == nil || !strings.HasPrefix(err.Error(), tt.wantErr) {
				t.Errorf("err = %v, want %s", err, tt.wantErr)
			}
			if isPermanent(err) != tt.wantPermanent {
				t.Errorf("permanent = %v, want %v", isPermanent(err), tt.wantPermanent)
			}
		})
	}
}

// bigPayload returns a JSON object of at least n bytes.
func bigPayload(n int) string { return `{"x":"` + strings.Repeat("x", n) + `"}` }

func TestCommandOutputOfExactlyTheLimit(t *testing.T) {
	t.Parallel()
	result, err := sh(`head -c 1048576 /dev/zero | tr '\0' 1`).run(t.Context(), handlerTask(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := len(result.(json.RawMessage)); got != maxResultBytes {
		t.Errorf("result has %d bytes, want %d", got, maxResultBytes)
	}
}

func TestCommandKeepsTheEndOfStderr(t *testing.T) {
	t.Parallel()
	script := `head -c 50000000 /dev/zero | tr '\0' x >&2; printf '\303\251 the end\n' >&2; exit 1`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := sh(script).run(t.Context(), handlerTask(`{}`))
	runtime.ReadMemStats(&after)
	text := err.Error()
	if !strings.HasSuffix(text, "xé the end") || len(text) < maxErrorBytes-10 || len(text) > maxErrorBytes {
		t.Errorf("message has %d bytes and ends in %q", len(text), text[max(0, len(text)-20):])
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 40<<20 {
		t.Errorf("50 MB of stderr allocated %d MB", grown>>20)
	}

	// A cut in the middle of a character leaves no half of it.
	_, err = sh(`i=0; while [ $i -lt 3001 ]; do printf '\342\202\254' >&2; i=$((i+1)); done; exit 1`).run(t.Context(), handlerTask(`{}`))
	if text := err.Error(); !utf8.ValidString(text) || strings.Trim(text, "€") != "" {
		t.Errorf("message holds more than whole characters: %q", text)
	}
}

func TestCommandArgumentsMeetNoShell(t *testing.T) {
	t.Parallel()
	result, err := newCommand([]string{"printf", "%s", `"$(id); a  b|*"`}).run(t.Context(), handlerTask(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := resultJSON(t, result), `"$(id); a  b|*"`; got != want {
		t.Errorf("result = %s, want %s", got, want)
	}
}

func TestCommandThatCannotStart(t *testing.T) {
	t.Parallel()
	_, err := newCommand([]string{"./no-such-program"}).run(t.Context(), handlerTask(`{}`))
	if err == nil || !strings.Contains(err.Error(), "no-such-program") || isPermanent(err) {
		t.Errorf("err = %v, want one that names the program and is not permanent", err)
	}
}

func TestCommandEnvironment(t *testing.T) {
	for _, name := range secretSettings() {
		t.Setenv(name, "very-secret")
	}
	t.Setenv("TASK_TIMEOUT", "inherited")
	t.Setenv("TASK_ID", "inherited")
	t.Setenv("STREAM_NAME", "not secret")
	task := handlerTask(`{}`)
	task.Name = "odd name\u00e9"
	task.Attempt = 2
	task.IdempotencyKey = "k=1"
	task.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	result, err := sh(`env; pwd`).run(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	var got struct{ Output string }
	if err := json.Unmarshal([]byte(resultJSON(t, result)), &got); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(got.Output, "\n")
	has := map[string]bool{}
	for _, line := range lines {
		has[line] = true
	}
	dir, _ := os.Getwd()
	for _, want := range []string{
		"TASK_ID=" + task.ID.String(), "TASK_NAME=odd name\u00e9", "TASK_ATTEMPT=2", "TASK_MAX_RETRIES=3", "TASK_QUEUE=default",
		"TASK_IDEMPOTENCY_KEY=k=1", "TASK_TRACEPARENT=" + task.Traceparent, "STREAM_NAME=not secret", dir,
	} {
		if !has[want] {
			t.Errorf("environment has no line %q", want)
		}
	}
	for _, unwanted := range []string{"very-secret", "inherited"} {
		if strings.Contains(got.Output, unwanted) {
			t.Errorf("environment holds %q", unwanted)
		}
	}
}

func TestCommandWithEndedContextDoesNotStart(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "started")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errShutdown)
	if _, err := sh(`echo >"$1"`, file).run(ctx, handlerTask(`{}`)); err != errShutdown {
		t.Errorf("err = %v, want %v", err, errShutdown)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("the command ran")
	}
}

// TestCommandGrandchildren leaves processes behind that hold the pipes open.
func TestCommandGrandchildren(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pid")
	start := time.Now()
	result, err := sh(`echo $$ >"$1"; sleep 60 & sleep 60 & echo '{"ok":1}'`, file).run(t.Context(), handlerTask(`{}`))
	if err != nil || resultJSON(t, result) != `{"ok":1}` {
		t.Errorf("run = %v, %v, want the result", result, err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("held for %v", took)
	}
	groupGone(t, pidIn(t, file))

	if _, err := exec.LookPath("setsid"); err != nil {
		t.Skip("SKIPPED: setsid is not installed, so nothing can leave the process group")
	}
	start = time.Now()
	script := `setsid sh -c 'echo $$ >"$1"; exec sleep 60' sh "$1" & while ! [ -s "$1" ]; do sleep 0.01; done; echo '{"ok":2}'`
	escaped := filepath.Join(t.TempDir(), "pid")
	result, err = sh(script, escaped).run(t.Context(), handlerTask(bigPayload(1<<20)))
	syscall.Kill(pidIn(t, escaped), syscall.SIGKILL)
	if err != nil || resultJSON(t, result) != `{"ok":2}` {
		t.Errorf("run = %v, %v, want the result", result, err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("held for %v", took)
	}
}

// TestCommandLeaksNothing is not parallel: it counts what the whole process has. The
// collector is off, because it would close forgotten files.
func TestCommandLeaksNothing(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	one := func(i int) {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		script := []string{`cat`, `exit 1`, `sleep 60 & echo 1`, `echo $$; exec sleep 60`, `exit 65`}[i%5]
		if i%5 == 3 {
			time.AfterFunc(20*time.Millisecond, func() { cancel(errCancelRequested) })
		}
		_, err := sh(script).run(ctx, handlerTask(`{"a":1}`))
		if wantErr := i%5 == 1 || i%5 == 3 || i%5 == 4; (err != nil) != wantErr {
			t.Errorf("%s: err = %v", script, err)
		}
	}
	for i := range 5 {
		one(i)
	}
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 50 {
				one(worker + i)
			}
		})
	}
	wg.Wait()
	eventually(t, "goroutines back to their number", func() bool { return runtime.NumGoroutine() <= goroutines })
	if n := openFiles(t); n > files {
		t.Errorf("%d files are open, before there were %d", n, files)
	}
	self := strconv.Itoa(os.Getpid())
	eventually(t, "no zombies", func() bool {
		return !slices.ContainsFunc(processes(), func(p procStat) bool { return p.parent == self && p.state == "Z" })
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/dev/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
