//go:build linux

package main

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// slack is by how much a loaded machine may stretch a time that a test waits for. It
// never touches a time that must not be undercut.
const slack = 3

// allFaults reports whether the long tests are to run too.
func allFaults() bool { return os.Getenv("FAULTS") == "all" }

// longFault keeps a test out of the plain run, whose time is limited.
func longFault(t *testing.T) {
	t.Helper()
	if !allFaults() {
		t.Skip("runs with FAULTS=all")
	}
	t.Parallel()
}

// A bed holds what a fault test plays with: real servers, the links to them, the processes,
// and what was promised to clients.
type bed struct {
	t     testing.TB
	pg    *postgresServer
	rd    *redisServer
	name  string        // of the database
	db    *pgxpool.Pool // past the links
	redis *redis.Client // past the links
	probe *probe
	env   map[string]string
	http  *http.Client

	mu       sync.Mutex
	members  []*instance
	accepted map[uuid.UUID]bool // every id that got a 2xx
}

// A bedOption changes what newBed makes.
type bedOption func(*bedOptions)

type bedOptions struct {
	ownPostgres bool
	noSchema    bool
	redis       []string
	env         map[string]string
}

// ownPostgres is for tests that stop, freeze or reconfigure PostgreSQL.
func ownPostgres(o *bedOptions) { o.ownPostgres = true }

// noSchema leaves the database empty, without the audit.
func noSchema(o *bedOptions) { o.noSchema = true }

func withRedis(settings ...string) bedOption { return func(o *bedOptions) { o.redis = settings } }

// with sets environment variables of all processes.
func with(pairs ...string) bedOption {
	return func(o *bedOptions) {
		for i := 0; i < len(pairs); i += 2 {
			o.env[pairs[i]] = pairs[i+1]
		}
	}
}

// The settings of fault tests.
const (
	faultLease     = 2 * time.Second
	faultRepublish = 2 * time.Second
	faultIdle      = 2500 * time.Millisecond
	faultScan      = time.Second
	faultGrace     = 2 * time.Second
	faultMaxLost   = 3
)

func newBed(t testing.TB, options ...bedOption) *bed {
	t.Helper()
	o := bedOptions{env: map[string]string{
		"HTTP_ADDR":             "127.0.0.1:0",
		"LEASE":                 faultLease.String(),
		"SWEEP_INTERVAL":        "200ms",
		"REPUBLISH_AFTER":       faultRepublish.String(),
		"MAX_LOST":              fmt.Sprint(faultMaxLost),
		"PEL_SCAN_INTERVAL_S":   "1",
		"PEL_IDLE_THRESHOLD_MS": fmt.Sprint(faultIdle.Milliseconds()),
		"REQUEUE_BASE_DELAY_MS": "100",
		"REQUEUE_MAX_DELAY_MS":  "1000",
		"SHUTDOWN_GRACE":        faultGrace.String(),
		"WORKER_CONCURRENCY":    "4",
		"LOG_FORMAT":            "json",
		"LOG_LEVEL":             "debug",
	}}
	for _, option := range options {
		option(&o)
	}
	b := &bed{t: t, env: o.env, accepted: make(map[uuid.UUID]bool), http: &http.Client{Timeout: 20 * time.Second}}
	t.Cleanup(b.http.CloseIdleConnections)
	b.rd = startRedisServer(t, o.redis...)
	options2, err := redis.ParseURL(b.rd.url)
	if err != nil {
		t.Fatal(err)
	}
	b.redis = redis.NewClient(options2)
	t.Cleanup(func() { b.redis.Close() })
	b.makeDatabase(o)
	b.probe = startProbe(t)
	t.Cleanup(func() {
		if t.Failed() {
			b.showLogs()
		}
	})
	return b
}

// makeDatabase gives the bed a database with the audit in it.
func (b *bed) makeDatabase(o bedOptions) {
	b.t.Helper()
	var dsn string
	switch {
	case o.ownPostgres && o.noSchema:
		b.pg = startPostgresServer(b.t)
		b.pg.exec(b.t, "CREATE DATABASE fault")
		dsn = b.pg.dsn("fault")
	case o.ownPostgres:
		b.pg = startPostgresServer(b.t)
		dsn = b.pg.createDatabase(b.t, "fault")
	case o.noSchema:
		b.pg = testPostgres(b.t)
		dsn = emptyDatabase(b.t)
	default:
		b.pg = testPostgres(b.t)
		dsn = newDatabase(b.t)
	}
	if o.ownPostgres {
		// The test clusters may lose commits in a crash; a record may not.
		b.pg.exec(b.t, "ALTER DATABASE fault SET synchronous_commit = on")
	}
	_, b.name, _ = strings.Cut(strings.TrimPrefix(dsn, "postgres://"), "/")
	b.name, _, _ = strings.Cut(b.name, "?")
	pool, err := pgxpool.New(b.t.Context(), dsn)
	if err != nil {
		b.t.Fatal(err)
	}
	b.db = pool
	b.t.Cleanup(pool.Close)
	if !o.noSchema {
		b.installAudit()
	}
}

// member makes a process without starting it. Further settings are pairs.
func (b *bed) member(name string, settings ...string) *instance {
	b.t.Helper()
	return b.memberAt(name, "127.0.0.1", settings...)
}

// memberAt is member with its servers at another loopback address.
func (b *bed) memberAt(name, host string, settings ...string) *instance {
	b.t.Helper()
	if host == "::1" {
		host = "[::1]"
	}
	m := &instance{
		bed:  b,
		name: name,
		pg:   newLink(b.t, host+":0", b.pg.socket),
		rd:   newLink(b.t, host+":0", b.rd.socket),
		env:  maps.Clone(b.env),
		log:  new(instanceLog),
	}
	m.handlers(fmt.Sprintf(`{"probe": {"url": %q}}`, b.probe.url(name)))
	m.env["DATABASE_URL"] = m.pg.dsn(b.name)
	m.env["REDIS_URL"] = "redis://" + m.rd.addr + "/0"
	for i := 0; i < len(settings); i += 2 {
		m.env[settings[i]] = settings[i+1]
	}
	b.mu.Lock()
	b.members = append(b.members, m)
	b.mu.Unlock()
	b.t.Cleanup(func() {
		if m.alive() {
			m.kill()
		}
	})
	return m
}

// started makes processes and returns when they are ready.
func (b *bed) started(names ...string) []*instance {
	b.t.Helper()
	members := make([]*instance, len(names))
	for i, name := range names {
		members[i] = b.member(name)
		members[i].launch()
	}
	for _, m := range members {
		m.waitReady()
	}
	return members
}

// within waits until ok reports true and fails the test when limit has passed; it
// returns how long it waited.
func (b *bed) within(limit time.Duration, what string, ok func() bool, state ...func() any) time.Duration {
	b.t.Helper()
	begin := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	end := time.After(limit)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			var last strings.Builder
			for _, s := range state {
				fmt.Fprintf(&last, "; last state: %v", s())
			}
			b.t.Fatalf("not within %v: %s%s", limit, what, last.String())
		}
	}
	return time.Since(begin)
}

// soon is within for what comes by the protocol after d at most; a loaded machine may take
// a multiple.
func (b *bed) soon(d time.Duration, what string, ok func() bool, state ...func() any) {
	b.t.Helper()
	took := b.within(slack*d, what, ok, state...)
	b.t.Logf("%s after %v; promised %v", what, took.Round(time.Millisecond), d)
}

// during checks for a while that ok stays true.
func (b *bed) during(d time.Duration, what string, ok func() bool) {
	b.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(d); ; {
		if !ok() {
			b.t.Fatalf("no longer so: %s", what)
		}
		select {
		case <-tick.C:
		case <-end:
			return
		}
	}
}

// pause lets time pass that a test needs to pass: a fault that lasts, a lease that runs out.
func (b *bed) pause(d time.Duration) { <-time.After(d) }

// showLogs prints how each process' log ended, or all logs to FAULT_LOGS if that names a folder.
func (b *bed) showLogs() {
	const shown = 40
	for _, m := range b.members {
		if n := m.log.count("its lease could not be renewed"); n > 0 {
			b.t.Logf("%s stopped %d handlers because heartbeats were late: where no fault of the test explains it, the machine is too loaded for a lease of %v", m.name, n, faultLease)
		}
		lines := m.log.allLines()
		if dir := os.Getenv("FAULT_LOGS"); dir != "" {
			file := filepath.Join(dir, strings.ReplaceAll(b.t.Name(), "/", "_")+"-"+m.name+".log")
			os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"+m.log.stderr.String()), 0o644)
		}
		b.t.Logf("log of %s, %d lines, ends so:\n%s\n%s", m.name, len(lines), strings.Join(lines[max(0, len(lines)-shown):], "\n"), m.log.stderr.String())
	}
}
