//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// embeddedPostgres is a private PostgreSQL cluster and its running server, which
// listens on a unix socket only.
type embeddedPostgres struct {
	log     *slog.Logger
	dir     string   // the cluster, DATA_DIR/postgres
	bin     string   // folder of the programs
	version string   // of the programs, such as 15.18
	user    *account // whom the server runs as
	socket  string   // folder of the socket
	lock    *os.File
	server  *child
}

// errDataInUse says that processes of an earlier server still use the data.
var errDataInUse = errors.New("processes of an earlier server still use the data")

// startPostgres starts a server on the cluster in cfg's data folder and makes the
// cluster when there is none. It returns when the database takes connections;
// recovery after a crash may take it a while. ctx bounds the start only: the
// server runs until stop is called or the program ends. A folder that holds
// anything but a cluster of the same major version is reported and left alone.
func startPostgres(ctx context.Context, log *slog.Logger, cfg config) (*embeddedPostgres, error) {
	began := time.Now()
	data, err := dataFolder(cfg)
	if err != nil {
		return nil, err
	}
	p := &embeddedPostgres{log: log, dir: filepath.Join(data, "postgres")}
	p.lock, err = lockData(p.dir)
	if err != nil {
		return nil, err
	}
	if err := p.start(ctx, cfg); err != nil {
		p.lock.Close()
		return nil, err
	}
	log.Info("embedded postgres ready", "version", p.version, "path", p.dir, "addr", p.socket, "took_ms", time.Since(began).Milliseconds())
	return p, nil
}

// start finds programs that fit the cluster, makes the cluster if absent and runs the server.
func (p *embeddedPostgres) start(ctx context.Context, cfg config) error {
	major, err := clusterMajor(p.dir)
	if err != nil {
		return err
	}
	p.bin, p.version, err = choosePostgres(ctx, p.log, cfg, p.dir, major)
	if err != nil {
		return err
	}
	p.user, err = clusterUser(p.dir)
	if err != nil {
		return err
	}
	if err := p.user.reach(filepath.Dir(p.dir)); err != nil {
		return fmt.Errorf("%w: set DATA_DIR to a folder that is open to it, such as %s", err, rootDataDir)
	}
	if major == "" {
		if err := p.initCluster(ctx); err != nil {
			return err
		}
	}
	p.socket, err = socketFolder(p.dir, p.user)
	if err != nil {
		return err
	}
	// After a kill -9 of the whole tree the server's children need a moment to
	// notice; until then PostgreSQL itself refuses to start a second server.
	deadline := time.Now().Add(15 * time.Second)
	for {
		if err := p.clearStale(ctx); err != nil {
			return err
		}
		err := p.launch(ctx)
		if !errors.Is(err, errDataInUse) || time.Now().After(deadline) || !sleep(ctx, 300*time.Millisecond) {
			return err
		}
	}
}

// clusterMajor returns the major version of the cluster in dir, or "" when dir is
// absent or empty. Anything else is not ours to touch.
func clusterMajor(dir string) (string, error) {
	text, err := os.ReadFile(filepath.Join(dir, "PG_VERSION"))
	if err == nil {
		return strings.TrimSpace(string(text)), nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read cluster version: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read data folder: %w", err)
	}
	if len(entries) > 0 {
		return "", fmt.Errorf("%s holds files but no PostgreSQL cluster: move them away or set another DATA_DIR", dir)
	}
	return "", nil
}

// choosePostgres returns the folder and version of the programs to run: the
// preferred ones, or with a cluster of version major the first that fit it. Only
// when nothing here does are they fetched.
func choosePostgres(ctx context.Context, log *slog.Logger, cfg config, dir, major string) (bin, version string, err error) {
	candidates := append(installedPostgres(), fetchedPostgres(filepath.Dir(dir))...)
	if cfg.EmbeddedPostgresBin != "" {
		bin, err := findPostgres(cfg.EmbeddedPostgresBin)
		if err != nil {
			return "", "", err
		}
		candidates = []string{bin}
	}
	var seen []string
	for _, bin := range candidates {
		has, version, err := majorVersion(ctx, bin)
		if err != nil {
			seen = append(seen, err.Error())
			continue
		}
		if major == "" || has == major {
			return bin, version, nil
		}
		seen = append(seen, "PostgreSQL "+version+" in "+bin)
	}
	fetchable, _, _ := strings.Cut(fetchVersion, ".")
	if cfg.EmbeddedPostgresBin == "" && (len(candidates) == 0 && major == "" || major == fetchable) {
		bin, err := fetchPostgres(ctx, log, cfg.EmbeddedPostgresURL, filepath.Dir(dir))
		if err != nil {
			return "", "", err
		}
		_, version, err := majorVersion(ctx, bin)
		return bin, version, err
	}
	found := cmp.Or(strings.Join(seen, " and "), "none installed")
	if major == "" {
		return "", "", fmt.Errorf("choose PostgreSQL: %s", found)
	}
	return "", "", fmt.Errorf("%s was made by PostgreSQL %s, but found was %s; nothing was changed: install PostgreSQL %s, or name the folder of its programs in EMBEDDED_POSTGRES_BIN, or set another DATA_DIR",
		dir, major, found, major)
}

// initCluster makes the cluster in a folder beside and renames it into place, so
// that a kill at any line leaves no half cluster under the final name.
func (p *embeddedPostgres) initCluster(ctx context.Context) error {
	left, _ := filepath.Glob(p.dir + ".initdb-*") // of starts that were killed
	for _, dir := range left {
		os.RemoveAll(dir)
	}
	log, err := openServerLog(p.dir + ".log")
	if err != nil {
		return err
	}
	defer log.close()
	dir, err := os.MkdirTemp(filepath.Dir(p.dir), "postgres.initdb-")
	if err != nil {
		return fmt.Errorf("make cluster: %w", err)
	}
	defer os.RemoveAll(dir) // gone after the rename
	if err := p.user.give(dir); err != nil {
		return err
	}
	// Whoever can open the socket is trusted: the folder it is in is closed to others.
	cmd := exec.Command(filepath.Join(p.bin, "initdb"), "-D", dir, "-U", "nexusflow", "-E", "UTF8", "--locale=C",
		"--auth-local=trust", "--auth-host=reject")
	cmd.Dir = dir
	p.user.run(cmd)
	if err := runChild(ctx, "initdb", cmd, log); err != nil {
		if strings.Contains(err.Error(), "look up effective user ID") {
			err = fmt.Errorf("%w: PostgreSQL needs to run as a user that /etc/passwd knows", err)
		}
		return err
	}
	if err := os.Rename(dir, p.dir); err != nil {
		return fmt.Errorf("make cluster: %w", err)
	}
	// initdb has synced the files. The new name must be as durable, or a power
	// cut hides the cluster with tasks already in it and the next start makes a new one.
	return syncFolder(filepath.Dir(p.dir))
}

// syncFolder makes the names in the folder durable.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	return nil
}

// launch starts the server and waits until it takes connections.
func (p *embeddedPostgres) launch(ctx context.Context) error {
	log, err := openServerLog(p.dir + ".log")
	if err != nil {
		return err
	}
	cmd := exec.Command(filepath.Join(p.bin, "postgres"), "-D", p.dir,
		"-c", "listen_addresses=", "-c", "port=5432",
		"-c", `unix_socket_directories="`+p.socket+`"`, "-c", "unix_socket_permissions=0700",
		"-c", "logging_collector=off", "-c", "log_destination=stderr",
		"-c", "fsync=on", "-c", "synchronous_commit=on", "-c", "full_page_writes=on")
	cmd.Dir = p.dir
	p.user.run(cmd)
	server, err := startChild("postgres", cmd, log)
	if err != nil {
		log.close()
		return err
	}
	p.server = server
	err = p.awaitReady(ctx)
	if err == nil {
		return nil
	}
	server.stop(syscall.SIGINT, syscall.SIGQUIT)
	if strings.Contains(log.last(), "shared memory block") {
		err = fmt.Errorf("%w: %w", errDataInUse, err)
	}
	log.close()
	return err
}

// awaitReady returns when the database nexusflow exists and takes connections.
func (p *embeddedPostgres) awaitReady(ctx context.Context) error {
	say := time.NewTicker(10 * time.Second)
	defer say.Stop()
	for {
		err := p.try(ctx, "nexusflow", "")
		if code := sqlState(err); code == "3D000" { // no such database
			err = p.try(ctx, "postgres", "CREATE DATABASE nexusflow")
		}
		// 57P03: the server is starting or recovering. No code: nobody listens yet.
		if code := sqlState(err); err == nil || code != "" && code != "57P03" {
			return err
		}
		select {
		case <-p.server.done:
			return p.server.exited()
		case <-ctx.Done():
			return fmt.Errorf("wait for postgres: %w", ctx.Err())
		case <-say.C:
			p.log.Info("waiting for embedded postgres", "cause", err.Error())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// try connects to the database and runs statement if it is not empty.
func (p *embeddedPostgres) try(ctx context.Context, database, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.dsnOf(database))
	if err != nil {
		return fmt.Errorf("connect to database %s: %w", database, err)
	}
	defer conn.Close(ctx)
	if statement == "" {
		return nil
	}
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("create database: %w", err)
	}
	return nil
}

// dsn returns how to connect to the database nexusflow, as its superuser.
func (p *embeddedPostgres) dsn() string { return p.dsnOf("nexusflow") }

func (p *embeddedPostgres) dsnOf(database string) string {
	host := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(p.socket)
	return fmt.Sprintf("host='%s' port=5432 user=nexusflow dbname=%s sslmode=disable", host, database)
}

// wait blocks until the server has ended. It returns nil after stop; any other end
// is an error, with which the program must end too.
func (p *embeddedPostgres) wait() error { return p.server.wait() }

// stop shuts the server down: open connections are cut and their transactions
// rolled back. It returns after about ten seconds at the latest, when the server
// is gone and the data free for another program. A server that had to be killed
// recovers at the next start.
func (p *embeddedPostgres) stop() {
	p.server.stop(syscall.SIGINT, syscall.SIGQUIT)
	p.server.log.close()
	os.Remove(p.socket) // of use to nobody now; a kill -9 leaves it for the next start
	p.lock.Close()
}
