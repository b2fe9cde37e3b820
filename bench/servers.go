package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// A store is a PostgreSQL or Redis of this run.
type store struct {
	*process
	addr    string
	version string
}

// startPostgres makes a cluster in dir/postgres and starts it, as durable as
// PostgreSQL is by default: a commit is on disk before it is reported.
func startPostgres(ctx context.Context, dir string) (*store, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	home := filepath.Join(dir, "postgres")
	if err := os.Mkdir(home, 0o755); err != nil {
		return nil, fmt.Errorf("make folder for postgres: %w", err)
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	data := filepath.Join(home, "data")
	initdb := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", "bench", "--auth=trust", "-E", "UTF8", "--no-locale")
	postgres := exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-p", port, "-k", home,
		"-c", "listen_addresses=127.0.0.1", "-c", "max_connections=300", "-c", "fsync=on", "-c", "synchronous_commit=on")
	for _, cmd := range []*exec.Cmd{initdb, postgres} {
		cmd.Dir = home
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
		if err := dropRoot(cmd, home); err != nil {
			return nil, err
		}
	}
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	p, err := startProcess(dir, "postgres", postgres)
	if err != nil {
		return nil, err
	}
	s := &store{process: p, addr: addr}
	err = p.waitUntil(ctx, 60*time.Second, soon, func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, s.url("postgres"))
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		return conn.QueryRow(ctx, "SHOW server_version").Scan(&s.version)
	})
	if err != nil {
		p.stop(syscall.SIGINT)
		return nil, err
	}
	return s, nil
}

func (s *store) url(database string) string {
	return fmt.Sprintf("postgres://bench@%s/%s?sslmode=disable", s.addr, database)
}

// findPostgres returns the folder with initdb and postgres: PG_BIN, that of PATH, or the
// newest that a package put elsewhere.
func findPostgres() (string, error) {
	if dir := os.Getenv("PG_BIN"); dir != "" {
		return dir, nil
	}
	if initdb, err := exec.LookPath("initdb"); err == nil {
		if initdb, err = filepath.EvalSymlinks(initdb); err == nil {
			return filepath.Dir(initdb), nil
		}
	}
	var found []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin/initdb", "/usr/pgsql-*/bin/initdb", "/usr/libexec/postgresql*/initdb", "/usr/local/pgsql/bin/initdb"} {
		list, _ := filepath.Glob(pattern) // the patterns are well formed
		found = append(found, list...)
	}
	if len(found) == 0 {
		return "", errors.New("find postgres: not installed (PG_BIN names its folder)")
	}
	version := func(path string) float64 {
		v, _ := strconv.ParseFloat(strings.Trim(path, "abcdefghijklmnopqrstuvwxyz/-"), 64)
		return v
	}
	return filepath.Dir(slices.MaxFunc(found, func(a, b string) int { return cmp.Compare(version(a), version(b)) })), nil
}

// dropRoot makes cmd run as postgres, else nobody, when this program is root, which
// PostgreSQL refuses, and gives that user the folder.
func dropRoot(cmd *exec.Cmd, folder string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			return fmt.Errorf("look up user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			return fmt.Errorf("look up user %s: %w", name, err)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
		return os.Chown(folder, int(uid), int(gid))
	}
	return errors.New("run postgres as root: it refuses, and there is neither a user postgres nor nobody")
}

// startRedis starts a Redis without persistence, which favours asynq: its tasks live nowhere else.
func startRedis(ctx context.Context, dir string) (*store, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	p, err := startProcess(dir, "redis", exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no"))
	if err != nil {
		return nil, err
	}
	s := &store{process: p, addr: addr}
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	err = p.waitUntil(ctx, 20*time.Second, soon, func(ctx context.Context) error {
		info, err := client.Info(ctx, "server").Result()
		if err != nil {
			return err
		}
		_, rest, _ := strings.Cut(info, "redis_version:")
		s.version, _, _ = strings.Cut(rest, "\r\n")
		return nil
	})
	if err != nil {
		p.stop(syscall.SIGTERM)
		return nil, err
	}
	return s, nil
}
