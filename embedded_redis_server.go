//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// serversRun says that this system can run servers as children of the program.
const serversRun = true

// startRedisChild runs program on the data in DATA_DIR/redis, as the user of this program.
func startRedisChild(ctx context.Context, log *slog.Logger, cfg config, program, version string) (_ *embeddedRedis, err error) {
	began := time.Now()
	data, err := dataFolder(cfg)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(data, "redis")
	lock, err := lockData(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("make data folder: %w", err)
	}
	folder, err := socketFolder(dir, nil)
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(folder, "redis.sock")
	if err := shutDownRedis(ctx, log, socket); err != nil {
		return nil, err
	}
	server, err := launchRedis(ctx, program, dir, socket)
	if err != nil {
		return nil, err
	}
	log.Info("embedded redis ready", "service", program, "version", version, "path", dir, "addr", socket, "took_ms", time.Since(began).Milliseconds())
	return &embeddedRedis{
		address:  (&url.URL{Scheme: "unix", Path: socket}).String(),
		waitFunc: server.wait,
		stopFunc: func() {
			server.stop(syscall.SIGTERM, syscall.SIGTERM)
			server.log.close()
			os.Remove(folder) // of use to nobody now; a kill -9 leaves it for the next start
			lock.Close()
		},
	}, nil
}

// launchRedis starts the server and waits until it has loaded its data.
func launchRedis(ctx context.Context, program, dir, socket string) (*child, error) {
	log, err := openServerLog(dir + ".log")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, "--port", "0", "--unixsocket", socket, "--unixsocketperm", "700", "--dir", dir,
		"--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
		"--daemonize", "no", "--logfile", "")
	cmd.Dir = dir
	server, err := startChild("redis", cmd, log)
	if err != nil {
		log.close()
		return nil, err
	}
	for {
		answer, _ := askRedis(socket, "PING", time.Second) // refused, or LOADING, until it is ready
		if strings.HasPrefix(answer, "+PONG") {
			return server, nil
		}
		select {
		case <-server.done:
			err = server.exited()
			log.close()
			return nil, err
		case <-ctx.Done():
			server.stop(syscall.SIGTERM, syscall.SIGTERM)
			log.close()
			return nil, fmt.Errorf("wait for redis: %w", ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// shutDownRedis ends a server on the socket that has outlived the program which
// started it, because two must not append to the same file. This program holds the
// lock of the data, so nobody else uses it. No server there is no error.
func shutDownRedis(ctx context.Context, log *slog.Logger, socket string) error {
	const most = 15 * time.Second
	deadline := time.Now().Add(most)
	for n := 0; ; n++ {
		answer, err := askRedis(socket, "SHUTDOWN", most)
		if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
			if n > 0 {
				log.Info("stopped redis left over from an earlier run", "addr", socket)
			}
			return nil
		}
		// It says nothing and hangs up when it obeys; the next connection is refused.
		if answer != "" || time.Now().After(deadline) || !sleep(ctx, 20*time.Millisecond) {
			return fmt.Errorf("stop redis left over from an earlier run on %s: %v %s", socket, err, strings.TrimSpace(answer))
		}
	}
}

// askRedis sends one command and returns the first line of the answer, at the
// latest after the time limit.
func askRedis(socket, command string, limit time.Duration) (string, error) {
	conn, err := net.DialTimeout("unix", socket, limit)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return "", err
	}
	line := make([]byte, 256)
	n, err := conn.Read(line)
	return string(line[:n]), err
}
