//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func needRedis(t *testing.T) string {
	t.Helper()
	program, _ := findRedis(t.Context())
	if program == "" {
		missing(t, errors.New("no redis-server 6.2 or newer"))
	}
	return program
}

func redisClient(t *testing.T, url string) *redis.Client {
	t.Helper()
	options, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	c := redis.NewClient(options)
	t.Cleanup(func() { c.Close() })
	return c
}

// deliver adds a message to the stream, reads it as a consumer of the group and
// leaves it unacknowledged. It returns how many such messages there are.
func deliver(t *testing.T, c *redis.Client) int64 {
	t.Helper()
	ctx := t.Context()
	if err := c.XGroupCreateMkStream(ctx, "s", "g", "0").Err(); err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
		t.Fatal(err)
	}
	if err := c.XAdd(ctx, &redis.XAddArgs{Stream: "s", Values: []string{"k", "v"}}).Err(); err != nil {
		t.Fatal(err)
	}
	got, err := c.XReadGroup(ctx, &redis.XReadGroupArgs{Group: "g", Consumer: "c", Streams: []string{"s", ">"}, Count: 10}).Result()
	if err != nil || len(got) != 1 || len(got[0].Messages) != 1 {
		t.Fatalf("XREADGROUP = %v, %v, want one new message", got, err)
	}
	pending, err := c.XPending(ctx, "s", "g").Result()
	if err != nil {
		t.Fatal(err)
	}
	return pending.Count
}

// redisPid asks the server at url for its process id.
func redisPid(t *testing.T, c *redis.Client) int {
	t.Helper()
	info, err := c.Info(t.Context(), "server").Result()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(info, "process_id:")
	pid, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(rest, "\n", 2)[0]))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestEmbeddedRedisKeepsStream(t *testing.T) {
	t.Parallel()
	needRedis(t)
	temp := serverTemp(t)
	ends := []struct {
		name string
		end  func(p *program)
	}{
		{"stop", func(p *program) { p.stop(t, syscall.SIGTERM) }},
		{"kill", func(p *program) {
			p.kill(t)
			if diesWithProgram {
				eventually(t, "redis stops by itself", func() bool { return !alive(p.server) })
			}
		}},
		{"kill and start at once", func(p *program) { p.kill(t) }},
		{"ctrl-c", func(p *program) { p.stop(t, syscall.SIGINT) }},
	}
	for n, end := range ends {
		p := startProgram(t, "redis", temp)
		c := redisClient(t, p.addr)
		p.server = redisPid(t, c)
		if got := deliver(t, c); got != int64(n+1) {
			t.Errorf("before %s: %d messages pending, want %d", end.name, got, n+1)
		}
		end.end(p)
		if strings.HasPrefix(end.name, "stop") && alive(p.server) {
			t.Error("the server outlived a clean stop")
		}
	}
}

func TestEmbeddedRedisKilled(t *testing.T) {
	t.Parallel()
	needRedis(t)
	temp := serverTemp(t)
	p := startProgram(t, "redis", temp)
	c := redisClient(t, p.addr)
	pid := redisPid(t, c)
	deliver(t, c)
	// appendfsync everysec still writes every command before it answers, so that
	// only a power cut can lose one.
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got, want := p.rest(t), "error embedded redis exited: signal: killed"; !strings.HasPrefix(got, want) {
		t.Errorf("helper said %q, want %q", got, want)
	}
	p = startProgram(t, "redis", temp)
	c = redisClient(t, p.addr)
	p.server = redisPid(t, c)
	if got := deliver(t, c); got != 2 {
		t.Errorf("%d messages pending, want 2", got)
	}
	_, line := launchProgram(t, "redis", temp)
	want := fmt.Sprintf("error %s/data/redis is in use by another nexusflow (process %d)", temp, p.cmd.Process.Pid)
	if !strings.HasPrefix(line, want) {
		t.Errorf("second program said %q, want %q", line, want)
	}
}

// Where the kernel does not stop the server of a killed program, the next start does.
func TestEmbeddedRedisLeftOver(t *testing.T) {
	t.Parallel()
	server := needRedis(t)
	temp := serverTemp(t)
	dir := filepath.Join(temp, "data", "redis")
	socket := filepath.Join(temp, socketName(dir))
	for _, path := range []string{dir, socket} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	socket = filepath.Join(socket, "redis.sock")
	left := exec.Command(server, "--port", "0", "--unixsocket", socket, "--dir", dir, "--appendonly", "yes", "--save", "")
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- left.Wait() }()
	eventually(t, "left over server up", func() bool {
		answer, _ := askRedis(socket, "PING", time.Second)
		return strings.HasPrefix(answer, "+PONG")
	})
	deliver(t, redisClient(t, "unix://"+socket))
	p := startProgram(t, "redis", temp)
	c := redisClient(t, p.addr)
	p.server = redisPid(t, c)
	if got := deliver(t, c); got != 2 {
		t.Errorf("%d messages pending, want 2", got)
	}
	if err := <-ended; err != nil {
		t.Errorf("the server left over ended with %v, want a clean stop", err)
	}
}

func TestMiniredis(t *testing.T) {
	t.Parallel()
	r, err := startMiniredis(discardLog())
	if err != nil {
		t.Fatal(err)
	}
	c := redisClient(t, r.url())
	if got := deliver(t, c); got != 1 {
		t.Errorf("%d messages pending, want 1", got)
	}
	// The lock of a dead holder must go by itself.
	if err := c.Set(t.Context(), "lock", "x", 300*time.Millisecond).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lock expired", func() bool { return errors.Is(c.Get(t.Context(), "lock").Err(), redis.Nil) })

	options, err := redis.ParseURL(r.url())
	if err != nil {
		t.Fatal(err)
	}
	stranger := redisClient(t, "redis://"+options.Addr)
	if err := stranger.Ping(t.Context()).Err(); err == nil || !strings.Contains(err.Error(), "NOAUTH") {
		t.Errorf("ping without the password = %v, want NOAUTH", err)
	}
	r.stop()
	r.stop()
	if err := r.wait(); err != nil {
		t.Errorf("wait after stop = %v, want nil", err)
	}
}
