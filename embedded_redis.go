package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// embeddedRedis is a running private Redis: a server process, or miniredis inside this program.
type embeddedRedis struct {
	address  string // what url returns
	waitFunc func() error
	stopFunc func()
}

// startRedis starts redis-server or valkey-server on a unix socket, with its data
// in cfg's data folder, and where none is installed miniredis, which forgets
// everything when the program ends. Either may come up empty: PostgreSQL is the
// record, and the sweep puts what is missing back into the stream. ctx bounds
// the start only.
func startRedis(ctx context.Context, log *slog.Logger, cfg config) (*embeddedRedis, error) {
	program, version := findRedis(ctx)
	if program == "" {
		return startMiniredis(log)
	}
	return startRedisChild(ctx, log, cfg, program, version)
}

// url returns where it listens, in the form that go-redis' ParseURL takes.
func (r *embeddedRedis) url() string { return r.address }

// wait blocks until it has ended. It returns nil after stop; any other end is an
// error, with which the program must end too.
func (r *embeddedRedis) wait() error { return r.waitFunc() }

// stop shuts it down and returns, after about ten seconds at the latest, when it
// is gone and its data free for another program.
func (r *embeddedRedis) stop() { r.stopFunc() }

// redisVersion matches what redis-server --version and valkey-server --version print.
var redisVersion = regexp.MustCompile(`v=((\d+)\.(\d+)\S*)`)

// findRedis returns the path and version of an installed server that has all the
// stream commands: XAUTOCLAIM came with 6.2. The path is empty when there is none.
func findRedis(ctx context.Context) (program, version string) {
	if !serversRun {
		return "", ""
	}
	for _, name := range []string{"redis-server", "valkey-server"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		out, err := exec.CommandContext(ctx, path, "--version").Output()
		m := redisVersion.FindStringSubmatch(string(out))
		if err != nil || m == nil {
			continue
		}
		major, _ := strconv.Atoi(m[2]) // digits, as matched
		minor, _ := strconv.Atoi(m[3])
		if major > 6 || major == 6 && minor >= 2 {
			return path, m[1]
		}
	}
	return "", ""
}

// startMiniredis starts miniredis on a loopback port. It differs from Redis in
// what reclaiming touches: XCLAIM ignores its minimum idle time, and nothing is
// kept over a restart.
func startMiniredis(log *slog.Logger) (*embeddedRedis, error) {
	m := miniredis.NewMiniRedis()
	// Unlike the socket of a server in its private folder, the port is open to every user of this machine.
	password := rand.Text()
	m.RequireAuth(password)
	if err := m.StartAddr("127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("start miniredis: %w", err)
	}
	stopping := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() { passTime(m, stopping) })
	log.Info("embedded redis ready", "service", "miniredis without persistence", "cause", "no redis-server 6.2 or newer is installed", "addr", m.Addr())
	return &embeddedRedis{
		address:  "redis://:" + password + "@" + m.Addr(),
		waitFunc: func() error { <-stopping; return nil },
		stopFunc: sync.OnceFunc(func() { close(stopping); clock.Wait(); m.Close() }),
	}, nil
}

// passTime makes keys expire, which miniredis leaves to its user (alicebob/miniredis#149).
func passTime(m *miniredis.Miniredis, stopping <-chan struct{}) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-stopping:
			return
		case now := <-tick.C:
			m.FastForward(now.Sub(last))
			last = now
		}
	}
}
