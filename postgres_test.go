package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

func openTestPools(t testing.TB, dsn string, lease time.Duration) *pools {
	t.Helper()
	p, err := openPools(t.Context(), dsn, lease)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

func TestOpenPools(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	type settings struct {
		Conns                                                        int32
		Statement, Lock, Idle, SeqScan, Plans, TimeZone, Application string
	}
	base := settings{8, "5s", "0", "5s", "on", "auto", "UTC", "nexusflow"}
	byIndex := func(conns int32, lock string) settings {
		s := base
		s.Conns, s.Lock, s.SeqScan, s.Plans = conns, lock, "off", "force_generic_plan"
		return s
	}
	for _, test := range []struct {
		name, more               string
		lease                    time.Duration
		api, submit, work, keeps settings
	}{
		{
			"defaults", "", 30 * time.Second, base,
			byIndex(2, "100ms"), byIndex(4, "2s"), byIndex(3, "2s"),
		},
		{
			"short lease, own settings", "&pool_max_conns=20&application_name=mine&statement_timeout=9s&timezone=Asia/Kolkata", 2 * time.Second,
			settings{20, "9s", "0", "5s", "on", "auto", "Asia/Kolkata", "mine"},
			settings{2, "9s", "100ms", "5s", "off", "force_generic_plan", "Asia/Kolkata", "mine"},
			settings{4, "9s", "200ms", "5s", "off", "force_generic_plan", "Asia/Kolkata", "mine"},
			settings{3, "9s", "200ms", "5s", "off", "force_generic_plan", "Asia/Kolkata", "mine"},
		},
	} {
		p := openTestPools(t, dsn+test.more, test.lease)
		for _, pool := range []struct {
			name string
			pool *pgxpool.Pool
			want settings
		}{{"api", p.api, test.api}, {"submit", p.submit, test.submit}, {"work", p.work, test.work}, {"lease", p.lease, test.keeps}} {
			got := settings{Conns: pool.pool.Config().MaxConns}
			err := pool.pool.QueryRow(t.Context(), `SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),
				current_setting('idle_in_transaction_session_timeout'), current_setting('enable_seqscan'), current_setting('plan_cache_mode'),
				current_setting('timezone'), current_setting('application_name')`).Scan(
				&got.Statement, &got.Lock, &got.Idle, &got.SeqScan, &got.Plans, &got.TimeZone, &got.Application)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(pool.want, got); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", test.name, pool.name, diff)
			}
		}
		eventually(t, "lease connections are kept open", func() bool { return p.lease.Stat().TotalConns() == 3 }, func() any { return p.lease.Stat().TotalConns() })
	}
}

func TestOpenPoolsDSN(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		dsn     string
		timeout time.Duration // 0: refused
		hosts   int
	}{
		{dsn: "postgres://u:p%40ss@h1/db", timeout: 5 * time.Second},
		{dsn: "host=h1 user=u password='p@ss#w' dbname=db", timeout: 5 * time.Second},
		{dsn: "postgres://u:secret@h1/db?connect_timeout=17", timeout: 17 * time.Second},
		{dsn: "postgres://u:secret@h1,h2/db", timeout: 2500 * time.Millisecond},
		{dsn: "postgres://u:secret@h1,h2,h3,h4,h5,h6,h7/db", timeout: time.Second},
		{dsn: "postgres://u:se#cret@h1/db"},
		{dsn: "postgres://u:se/cret@h1/db"},
		{dsn: "postgres://u:se%cret@h1/db"},
		{dsn: "postgres://u:secret@h1:port/db"},
		{dsn: "postgres://u:secret@h1/db?sslmode=maybe"},
		{dsn: "postgres://u:secret@h1/db?pool_max_conns=many"},
		{dsn: "postgres://u:secret@h1/db?connect_timeout=soon"},
		{dsn: "host=h1 password='secret"},
		{dsn: "host=h1 password=sec ret"},
		{dsn: "host=h1 password=secret port=many"},
		{dsn: "mysql://u:secret@h1/db"},
	} {
		p, err := openPools(t.Context(), test.dsn, testLease)
		if err != nil {
			if test.timeout > 0 {
				t.Errorf("openPools(%q): %v", test.dsn, err)
			}
			for _, part := range []string{"secret", "cret", "p@ss"} {
				if strings.Contains(err.Error(), part) {
					t.Errorf("openPools(%q) shows the password: %v", test.dsn, err)
				}
			}
			if len(err.Error()) < len("parse database DSN: ")+5 {
				t.Errorf("openPools(%q) does not say what is wrong: %v", test.dsn, err)
			}
			continue
		}
		if got := p.api.Config().ConnConfig.ConnectTimeout; got != test.timeout {
			t.Errorf("openPools(%q): connect timeout %v, want %v (0: refused)", test.dsn, got, test.timeout)
		}
		p.close()
	}
}

// Field case 98.
func TestPostgresIPv6(t *testing.T) {
	t.Parallel()
	d := newLink(t, "[::1]:0", testPostgres(t).socket)
	name := connect(t, newDatabase(t)).Config().Database
	for _, dsn := range []string{
		d.dsn(name),
		fmt.Sprintf("host=::1 port=%d user=nexusflow dbname=%s sslmode=disable", d.port(), name),
	} {
		if err := waitForPostgres(t.Context(), testLog(t), dsn, 1, 0); err != nil {
			t.Error(err)
		}
		p := openTestPools(t, dsn, testLease)
		if err := checkSchema(t.Context(), p.api); err != nil {
			t.Errorf("%s: %v", dsn, err)
		}
	}
}

func TestWaitForPostgres(t *testing.T) {
	t.Parallel()
	s := testPostgres(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and never answers
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	for _, test := range []struct{ name, dsn, want string }{
		{"nobody listens", "postgres://u:secret@/db?host=" + t.TempDir(), "no such file"},
		{"unknown database", s.dsn("nowhere"), `database "nowhere" does not exist`},
		{"unknown user", strings.Replace(s.dsn("postgres"), "nexusflow@", "intruder:secret@", 1), `role "intruder" does not exist`},
		{"no answer", "postgres://u:secret@" + silent.Addr().String() + "/db?sslmode=disable&connect_timeout=1", "timeout"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			err := waitForPostgres(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), test.dsn, 3, time.Millisecond)
			if err == nil || !strings.Contains(err.Error(), "gave up after 3 attempts") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("waitForPostgres = %v, want it to give up after 3 attempts with %q", err, test.want)
			}
			for n := range 3 {
				if line := fmt.Sprintf("attempt=%d max_attempts=3", n+1); strings.Count(out.String(), line) != 1 {
					t.Errorf("log has no single line with %q:\n%s", line, out.String())
				}
			}
			if strings.Contains(out.String()+err.Error(), "secret") {
				t.Errorf("the password is shown:\n%s%v", out.String(), err)
			}
			if !storeAway(err) {
				t.Error("storeAway is false")
			}
		})
	}
	t.Run("told to stop", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("terminated")
		time.AfterFunc(100*time.Millisecond, func() { cancel(stop) })
		start := time.Now()
		err := waitForPostgres(ctx, discardLog(), "postgres://u@/db?host="+t.TempDir(), 10, time.Hour)
		if !errors.Is(err, stop) || time.Since(start) > 5*time.Second {
			t.Errorf("waitForPostgres = %v after %v, want the cause of its end at once", err, time.Since(start))
		}
	})
	t.Run("started late", func(t *testing.T) {
		t.Parallel()
		s := startPostgresServer(t)
		s.stop()
		var out syncBuffer
		done := make(chan error, 1)
		go func() {
			done <- waitForPostgres(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), s.dsn("postgres"), 1000, 20*time.Millisecond)
		}()
		eventually(t, "an attempt failed", func() bool { return strings.Contains(out.String(), "attempt=2") })
		if err := s.start(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// What the errors of a real server are taken for.
func TestErrorClasses(t *testing.T) {
	t.Parallel()
	p := testPools(t)
	holder := connect(t, p.api.Config().ConnString())
	execute(t, holder, "INSERT INTO tasks (task_id, name, idempotency_key) VALUES (md5('1')::uuid, 'n', 'k')")
	execute(t, holder, "BEGIN; SELECT FROM tasks FOR UPDATE")
	noise := "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) n)"
	for _, test := range []struct {
		name, statement, state string
		bad, away              bool
	}{
		{"NUL in jsonb", `SELECT '"\u0000"'::jsonb`, "22P05", true, false},
		{"division", "SELECT 1/0", "22012", true, false},
		{"two rows with a key", "INSERT INTO tasks (name, idempotency_key) VALUES ('n', 'k')", "23505", true, false},
		{"check", "INSERT INTO tasks (name, status) VALUES ('n', 'odd')", "23514", true, false},
		{"too large for an index", "INSERT INTO tasks (name, idempotency_key) SELECT 'n', " + noise, "54000", true, false},
		{"syntax", "SELEC", "42601", false, false},
		{"unknown table", "SELECT FROM nothing", "42P01", false, false},
		{"lock", "SET lock_timeout = 50; UPDATE tasks SET name = 'm'", "55P03", false, true},
		{"too slow", "SET statement_timeout = 50; SELECT pg_sleep(10)", "57014", false, true},
		{"read-only", "SET transaction_read_only = on; INSERT INTO tasks (name) VALUES ('n')", "25006", false, true},
		{"terminated", "SELECT pg_terminate_backend(pg_backend_pid())", "57P01", false, true},
	} {
		_, err := p.api.Exec(t.Context(), test.statement)
		err = fmt.Errorf("store task: %w", err)
		if got := sqlState(err); got != test.state {
			t.Errorf("%s: SQLSTATE %q of %v, want %q", test.name, got, err, test.state)
		}
		if bad, away := badData(err), storeAway(err); bad != test.bad || away != test.away {
			t.Errorf("%s: badData %t, storeAway %t of %v, want %t, %t", test.name, bad, away, err, test.bad, test.away)
		}
		p.api.Reset() // the settings above are gone with their connections
	}

	for _, state := range []string{"08006", "53100", "53200", "53300", "57P01", "57P02", "57P03", "57P05", "58030", "40001", "40P01", "0A000", "28P01", "3D000"} {
		if err := fmt.Errorf("x: %w", &pgconn.PgError{Code: state}); !storeAway(err) || badData(err) {
			t.Errorf("SQLSTATE %s: storeAway %t, badData %t, want true, false", state, storeAway(err), badData(err))
		}
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for _, test := range []struct {
		name string
		err  error
		away bool
	}{
		{"no error", nil, false},
		{"no row", pgx.ErrNoRows, false},
		{"caller has gone", runSQL(cancelled, p.api, "SELECT 1"), false},
		{"caller's deadline", runSQL(late, p.api, "SELECT pg_sleep(10)"), true},
		{"some other error", errors.New("x"), false},
	} {
		if got := storeAway(test.err); got != test.away {
			t.Errorf("%s: storeAway(%v) = %t, want %t", test.name, test.err, got, test.away)
		}
		if badData(test.err) || sqlState(test.err) != "" {
			t.Errorf("%s: badData %t, SQLSTATE %q", test.name, badData(test.err), sqlState(test.err))
		}
	}
}

func runSQL(ctx context.Context, pool *pgxpool.Pool, statement string) error {
	_, err := pool.Exec(ctx, statement)
	return err
}

// A refusal to free the rows of refused messages is an answer: it is told of once, the messages
// are dropped and the worker goes on.
func TestUnpublishIsRefused(t *testing.T) {
	t.Parallel()
	cfg := fastConfig(t)
	p := testPools(t)
	r := record{db.New(p.work), p.work}
	var out syncBuffer
	access := newAccess(slog.New(slog.NewTextHandler(&out, nil)), time.Second)
	w := newWorker(testLog(t), cfg, r.Queries, r.Queries, testStream(t), newHandlerTable(cfg), access, newMetrics())
	w.refused = func(context.Context) { t.Error("the gate was asked, though no row changed") }
	id := r.task(t, "queue = 'stopped'", touched)
	if _, err := r.PauseQueue(t.Context(), "stopped"); err != nil {
		t.Fatal(err)
	}
	execute(t, connect(t, p.api.Config().ConnString()), `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused' USING ERRCODE = 'insufficient_privilege'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION refuse()`)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 {
		w.acquire(ctx)
		w.take(ctx, []message{{id: "1-1", queue: "stopped", taskID: id}})
	}
	if n := strings.Count(out.String(), "refused (SQLSTATE 42501)"); ctx.Err() != nil || len(w.drops.queue) != 2 || n != 1 {
		t.Errorf("took until %v, %d messages dropped, told %d times; want 2 dropped at once and one line: %s", ctx.Err(), len(w.drops.queue), n, out.String())
	}
}

// Field case 127: after a failover the pool holds connections to what is a standby now.
func TestReadOnlyConnectionsAreDropped(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	admin := connect(t, dsn)
	name := admin.Config().Database
	execute(t, admin, "ALTER DATABASE "+name+" SET default_transaction_read_only = on")
	p := openTestPools(t, dsn, testLease)
	const insert = "INSERT INTO tasks (name) VALUES ('n')"
	if err := runSQL(t.Context(), p.api, insert); sqlState(err) != "25006" {
		t.Fatalf("insert: %v, want 25006", err)
	}
	if err := runSQL(t.Context(), p.api, "SELECT FROM tasks"); err != nil {
		t.Errorf("read while read-only: %v", err)
	}
	execute(t, admin, "SET default_transaction_read_only = off; ALTER DATABASE "+name+" RESET default_transaction_read_only")
	// The connection that served the read above is read-only still, and finds it out here.
	if err := runSQL(t.Context(), p.api, insert); err != nil && !storeAway(err) {
		t.Fatal(err)
	}
	if err := runSQL(t.Context(), p.api, insert); err != nil {
		t.Errorf("insert after the end of read-only: %v", err)
	}
}

// P10: a column changed its type under a prepared statement.
func TestStalePlansAreDropped(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	c, _, err := poolConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	r := record{db.New(pool), pool}
	id, _ := r.insert(t, insertion{})
	r.get(t, id)
	execute(t, connect(t, dsn), "ALTER TABLE tasks ALTER COLUMN traceparent TYPE varchar(99)")
	if _, err := r.GetTask(t.Context(), id); err != nil && (sqlState(err) != "0A000" || !storeAway(err)) {
		t.Errorf("first read: %v, want 0A000 at most", err)
	}
	if _, err := r.GetTask(t.Context(), id); err != nil {
		t.Errorf("second read: %v", err)
	}
}

// P1: the server is killed under load; the pools find it again.
func TestPoolsSurviveCrash(t *testing.T) {
	t.Parallel()
	s := startPostgresServer(t)
	p := openTestPools(t, s.createDatabase(t, "crash"), testLease)
	all := []*pgxpool.Pool{p.api, p.submit, p.work, p.lease}
	for _, pool := range all {
		if err := runSQL(t.Context(), pool, "SELECT 1"); err != nil {
			t.Fatal(err)
		}
	}
	s.crash()
	for i, pool := range all {
		if err := runSQL(t.Context(), pool, "SELECT 1"); !storeAway(err) {
			t.Errorf("pool %d while the server is away: %v, want storeAway", i, err)
		}
	}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	for i, pool := range all {
		var last error
		eventually(t, "statement succeeds", func() bool { last = runSQL(t.Context(), pool, "SELECT 1"); return last == nil }, func() any { return fmt.Sprint(i, last) })
	}
}

// A server behind a dead network answers nothing, not even that it is gone: a caller
// waits as long as it said and no longer.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	d := newLink(t, "127.0.0.1:0", testPostgres(t).socket)
	name := connect(t, newDatabase(t)).Config().Database
	p := openTestPools(t, d.dsn(name), testLease)
	if err := runSQL(t.Context(), p.work, "SELECT 1"); err != nil {
		t.Fatal(err)
	}
	d.set(blackHole)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	err := runSQL(ctx, p.work, "SELECT 1")
	if !storeAway(err) || time.Since(start) > 3*time.Second {
		t.Errorf("statement: %v after %v, want storeAway after 300 ms", err, time.Since(start))
	}
	d.set(pass)
	eventually(t, "statement succeeds", func() bool { return runSQL(t.Context(), p.work, "SELECT 1") == nil })
}

// Field case 51: neither a table lock nor a full pool of the gateway keeps the
// lease pool from its work, and a caller with a deadline gets an answer.
func TestPoolsAreSeparate(t *testing.T) {
	t.Parallel()
	p := testPools(t)
	for range p.api.Config().MaxConns {
		conn, err := p.api.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := runSQL(ctx, p.api, "SELECT 1"); !storeAway(err) {
		t.Errorf("statement on a full pool: %v, want storeAway", err)
	}
	if err := runSQL(t.Context(), p.lease, "SELECT 1"); err != nil {
		t.Errorf("lease pool beside a full one: %v", err)
	}
	execute(t, connect(t, p.api.Config().ConnString()), "BEGIN; LOCK TABLE tasks")
	start := time.Now()
	err := runSQL(t.Context(), p.lease, "UPDATE tasks SET updated_at = now()")
	if sqlState(err) != "55P03" || time.Since(start) > 3*time.Second {
		t.Errorf("update of a locked table: %v after %v, want 55P03 after 200 ms", err, time.Since(start))
	}
}

// Nothing may be left behind by a test binary that was killed.
func TestRemoveLeftovers(t *testing.T) {
	dir := filepath.Join(serverDirs(), "nexusflow-test-2147483646-x")
	if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	own, err := serverDir()
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(own)
	removeLeftovers()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there", dir)
	}
	if _, err := os.Stat(own); err != nil {
		t.Errorf("a folder in use was deleted: %v", err)
	}
}

// The servers that tests start and restart.
func TestServers(t *testing.T) {
	t.Parallel()
	if url := newRedisURL(t); url == "" {
		t.Error("no URL")
	}
	if a, b := streamName(t), streamName(t); a == b {
		t.Errorf("stream name %s twice", a)
	}
	r := startRedisServer(t)
	send := func(command string) string {
		conn, err := net.Dial("unix", r.socket)
		if err != nil {
			return err.Error()
		}
		defer conn.Close()
		io.WriteString(conn, command+"\r\n")
		buf := make([]byte, 100)
		n, _ := conn.Read(buf)
		return strings.TrimSpace(string(buf[:n]))
	}
	if got := send("SET k v"); got != "+OK" {
		t.Errorf("SET: %s", got)
	}
	r.stop()
	if got := send("PING"); got == "+PONG" {
		t.Error("the stopped Redis answers")
	}
	if err := r.start(); err != nil {
		t.Fatal(err)
	}
	if got := send("GET k"); got != "$-1" {
		t.Errorf("GET after a restart: %s, want nothing", got)
	}
	send("SET k v")
	r.restart(t)
	if got := send("GET k"); got != "$-1" {
		t.Errorf("GET after another restart: %s, want nothing", got)
	}
}
