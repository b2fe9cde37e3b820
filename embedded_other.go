//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package main

import (
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"runtime"
)

// serversRun says that this system cannot run servers as children of the program;
// its Redis is miniredis.
const serversRun = false

// errNoServers is why startPostgres refuses.
var errNoServers = errors.New("embedded postgres: not on " + runtime.GOOS + ": set DATABASE_URL to a running PostgreSQL, or use docker compose up")

type embeddedPostgres struct{}

func startPostgres(context.Context, *slog.Logger, config) (*embeddedPostgres, error) {
	return nil, errNoServers
}

func (*embeddedPostgres) dsn() string { return "" }
func (*embeddedPostgres) wait() error { return errNoServers }
func (*embeddedPostgres) stop()       {}

func startRedisChild(context.Context, *slog.Logger, config, string, string) (*embeddedRedis, error) {
	return nil, errNoServers
}

// asServerUser does nothing: a system without uids has none to change to.
func asServerUser(*exec.Cmd, ...string) error { return nil }

// openToServerUser does nothing, see asServerUser.
func openToServerUser(string) error { return nil }
