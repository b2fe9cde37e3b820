package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
)

// connect opens one connection that lasts as long as the test.
func connect(t testing.TB, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// execute runs statements without arguments.
func execute(t testing.TB, conn *pgx.Conn, statements string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), statements); err != nil {
		t.Fatalf("%s: %v", statements, err)
	}
}

// column returns the first column of a query's rows.
func column[T any](t testing.TB, conn *pgx.Conn, query string, args ...any) []T {
	t.Helper()
	rows, err := conn.Query(t.Context(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return list
}

// schema describes everything about the tables that a program could notice.
func schema(t testing.TB, conn *pgx.Conn) []string {
	t.Helper()
	return column[string](t, conn, `
		SELECT concat_ws(' ', 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
			CASE WHEN a.attnotnull THEN 'NOT NULL' END, 'default', pg_get_expr(d.adbin, d.adrelid),
			'collation', (SELECT collname FROM pg_collation WHERE oid = a.attcollation),
			'comment', col_description(c.oid, a.attnum)) AS line
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
		WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
		UNION ALL SELECT concat_ws(' ', 'table', relname, obj_description(oid), reloptions::text) FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
		UNION ALL SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
		UNION ALL SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, convalidated, pg_get_constraintdef(oid)) FROM pg_constraint
			WHERE connamespace = 'public'::regnamespace
		UNION ALL SELECT concat_ws(' ', 'function', pg_get_functiondef(oid), obj_description(oid)) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
		ORDER BY line`)
}

// The tables that people made by hand, from the original's init.sql of three ages and
// with deviations of their own, each with 1,000 rows in every state. The database
// is in a time zone far from UTC.
var generations = []struct {
	name   string
	create string
	keys   int // distinct idempotency keys
	given  int // rows that have one
}{
	{name: "empty"},
	{name: "A: no retry columns, varchar ids", create: `
		CREATE TABLE tasks (task_id varchar(64) PRIMARY KEY, name varchar(128) NOT NULL, status varchar(32) NOT NULL DEFAULT 'pending',
			payload jsonb, result jsonb, created_at timestamptz NOT NULL DEFAULT now(), updated_at timestamptz NOT NULL DEFAULT now());
		CREATE INDEX idx_tasks_status ON tasks (status);
		INSERT INTO tasks SELECT id, name, status, payload, result, created_at, updated_at FROM old`},
	{name: "B: retry columns, uuid, naive and nullable timestamps, json", create: `
		CREATE TABLE tasks (task_id uuid PRIMARY KEY, status text, name text, payload json, result json,
			created_at timestamp DEFAULT now(), updated_at timestamp,
			retry_count smallint, max_retries bigint DEFAULT 5, error_message varchar(500) NOT NULL DEFAULT '');
		INSERT INTO tasks SELECT id::uuid, status, name, payload::json, result::json, created_at AT TIME ZONE 'UTC',
			CASE WHEN n % 7 > 0 THEN updated_at AT TIME ZONE 'UTC' END, n % 6, CASE WHEN n % 5 > 0 THEN 3 END FROM old`},
	{name: "C: key and index, varchar ids", keys: 500, given: 500, create: `
		CREATE TABLE tasks (task_id varchar(64) PRIMARY KEY, name varchar(128) NOT NULL, status varchar(32) NOT NULL DEFAULT 'pending',
			payload jsonb, result jsonb, retry_count integer NOT NULL DEFAULT 0, max_retries integer NOT NULL DEFAULT 3, error_message text,
			idempotency_key varchar(255), created_at timestamptz NOT NULL DEFAULT now(), updated_at timestamptz NOT NULL DEFAULT now());
		CREATE INDEX idx_tasks_status ON tasks (status);
		CREATE UNIQUE INDEX idx_tasks_idempotency_key ON tasks (idempotency_key) WHERE idempotency_key IS NOT NULL;
		INSERT INTO tasks SELECT id, name, status, payload, result, n % 5, 3, NULL, CASE WHEN n % 2 = 0 THEN 'Schlüssel ' || n END, created_at, updated_at FROM old`},
	{name: "D: key without index, each key twice", keys: 499, given: 998, create: `
		CREATE TABLE tasks (task_id text PRIMARY KEY DEFAULT gen_random_uuid()::text, name varchar(128), status varchar(32) DEFAULT 'accepted',
			payload text, result text, retry_count integer DEFAULT 0, max_retries integer DEFAULT 3, error_message text,
			idempotency_key varchar(255) DEFAULT '', created_at timestamptz, updated_at timestamptz);
		INSERT INTO tasks SELECT id, name, status, payload::text, result::text, 0, 3, CASE WHEN n % 4 = 0 THEN 'old error' END,
			CASE WHEN n > 2 THEN 'key ' || (n - 1) / 2 ELSE '' END, created_at, updated_at FROM old`},
}

// oldRows are the rows of a generation, in a form that each can take.
const oldRows = `CREATE TEMPORARY TABLE old AS SELECT n,
	upper(md5(n::text)::uuid::text) AS id, 'task ' || n AS name,
	(ARRAY['pending', 'processing', 'completed', 'failed', 'accepted', 'RUNNING', 'canceled', 'mystery'])[n % 8 + 1] AS status,
	CASE WHEN n % 3 > 0 THEN jsonb_build_object('n', n) END AS payload,
	CASE WHEN n % 8 = 2 THEN jsonb_build_object('done', n) END AS result,
	timestamptz '2026-01-02 03:04:05.678901+00' + n * interval '1 minute' AS created_at,
	timestamptz '2026-01-03 03:04:05.678901+00' + n * interval '1 minute' AS updated_at
	FROM generate_series(1, 1000) n`

// Adopted databases must become what a new one is, and keep every row (field case 121).
func TestMigrateAdopts(t *testing.T) {
	t.Parallel()
	want := schema(t, connect(t, newDatabase(t)))
	for _, g := range generations {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			dsn := emptyDatabase(t)
			conn := connect(t, dsn)
			execute(t, conn, "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET timezone = ''Asia/Kolkata''', current_database()); END$$")
			if g.create != "" {
				execute(t, conn, oldRows)
				execute(t, conn, g.create)
			}
			if err := migrate(t.Context(), testLog(t), dsn); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
				t.Errorf("schema differs from a new database's (-want +got):\n%s", diff)
			}
			if g.create != "" {
				checkAdopted(t, conn, g.keys, g.given)
			}

			const digest = "SELECT coalesce(md5(string_agg(t::text, '|' ORDER BY task_id)), '') FROM tasks t"
			before := column[string](t, conn, digest)
			if err := migrate(t.Context(), testLog(t), dsn); err != nil {
				t.Fatalf("migrate again: %v", err)
			}
			if diff := cmp.Diff(before, column[string](t, conn, digest)); diff != "" {
				t.Errorf("the second run changed rows: %s", diff)
			}
			p, err := openPools(t.Context(), dsn, testLease)
			if err != nil {
				t.Fatal(err)
			}
			defer p.close()
			if err := checkSchema(t.Context(), p.api); err != nil {
				t.Error(err)
			}
			execute(t, conn, "INSERT INTO tasks (name, payload) VALUES ('sql', '{}')")
			execute(t, conn, "INSERT INTO tasks (name, idempotency_key) VALUES ('sql', 'twice')")
			_, err = conn.Exec(t.Context(), "INSERT INTO tasks (name, idempotency_key) VALUES ('sql', 'twice')")
			if got := sqlState(err); got != "23505" {
				t.Errorf("second row with a key: SQLSTATE %q, want 23505", got)
			}
		})
	}
}

// checkAdopted checks the 1,000 rows against what they were before. Each query counts the rows
// that are not as they should be.
func checkAdopted(t *testing.T, conn *pgx.Conn, keys, given int) {
	t.Helper()
	if got := column[int](t, conn, "SELECT count(*) FROM tasks JOIN old ON task_id = id::uuid AND tasks.name = old.name"); got[0] != 1000 {
		t.Errorf("%d of 1000 rows kept", got[0])
	}
	for _, wrong := range []struct{ what, where string }{
		{"status", `tasks.status <> (ARRAY['pending', 'pending', 'completed', 'failed', 'pending', 'pending', 'cancelled', 'failed'])[n % 8 + 1]`},
		{"payload", `tasks.payload <> coalesce(old.payload, '{}')`},
		{"result", `tasks.result IS DISTINCT FROM old.result`},
		{"created_at", `tasks.created_at <> old.created_at`},
		{"updated_at of a row left as it was", `tasks.status = old.status AND tasks.updated_at NOT IN (old.updated_at, old.created_at)`},
		{"pending and due", `tasks.status = 'pending' AND (run_at > now() OR published_at IS NOT NULL OR lease_until IS NOT NULL OR finished_at IS NOT NULL)`},
		{"finished_at", `tasks.status = old.status AND tasks.status <> 'pending' AND finished_at <> tasks.updated_at`},
		{"finished_at missing", `tasks.status <> 'pending' AND finished_at IS NULL`},
		{"retry_count", `retry_count > max_retries`},
		{"unknown status kept", `old.status = 'mystery' AND coalesce(error_message, '') NOT LIKE '%unknown status mystery'`},
		{"fence", `attempt <> 0 OR lost_count <> 0`},
	} {
		if got := column[int](t, conn, "SELECT n FROM tasks JOIN old ON task_id = id::uuid WHERE "+wrong.where+" ORDER BY n"); len(got) > 0 {
			t.Errorf("%s: wrong in %d rows, first in row %d", wrong.what, len(got), got[0])
		}
	}
	if got := column[int](t, conn, "SELECT count(idempotency_key) FROM tasks"); got[0] != keys {
		t.Errorf("%d rows with a key, want %d", got[0], keys)
	}
	lost := column[string](t, conn, "SELECT error_message FROM tasks WHERE error_message LIKE '%idempotency key %' ORDER BY created_at")
	if len(lost) != given-keys {
		t.Errorf("%d rows tell of a key they gave up, want %d", len(lost), given-keys)
	}
	if len(lost) > 0 {
		// Rows 3 and 4 had one key; row 3 is the older, row 4 had an error of its own.
		id := column[string](t, conn, "SELECT lower(id) FROM old WHERE n = 3")[0]
		if want := "old error; idempotency key key 1 was also given to task " + id + ", which keeps it"; lost[0] != want {
			t.Errorf("error_message = %q, want %q", lost[0], want)
		}
	}
}

func TestMigrateRefuses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, create, want string
	}{
		{
			"an id that is no UUID",
			`CREATE TABLE tasks (task_id varchar(64) PRIMARY KEY, name text, status text, payload jsonb, result jsonb, created_at timestamptz, updated_at timestamptz);
			INSERT INTO tasks (task_id, name, status) VALUES ('order-17', 'n', 'pending'), ('{0198A5D6c9b17000-8000-000000000001}', 'n', 'pending')`,
			"task_id is not a UUID cannot be adopted, give them one or delete them: 'order-17'",
		},
		{
			"a table of another program",
			"CREATE TABLE tasks (task_id int, name text, status text, payload text, done bool); INSERT INTO tasks VALUES (1)",
			"not a NexusFlow table: it has no column result, created_at, updated_at",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dsn := emptyDatabase(t)
			conn := connect(t, dsn)
			execute(t, conn, test.create)
			const digest = "SELECT string_agg(task_id::text || name || status, '|' ORDER BY task_id) FROM tasks"
			before := column[*string](t, conn, digest)
			err := migrate(t.Context(), testLog(t), dsn)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("migrate: %v, want %q", err, test.want)
			}
			if diff := cmp.Diff(before, column[*string](t, conn, digest)); diff != "" {
				t.Errorf("rows changed: %s", diff)
			}
			p, err := openPools(t.Context(), dsn, testLease)
			if err != nil {
				t.Fatal(err)
			}
			defer p.close()
			if err := checkSchema(t.Context(), p.api); err == nil {
				t.Error("checkSchema found nothing wrong")
			}
		})
	}
}

// diskMigrator is what the goose command uses: the files on disk and no lock.
func diskMigrator(t testing.TB, dsn string) *goose.Provider {
	t.Helper()
	handle, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { handle.Close() })
	p, err := goose.NewProvider(goose.DialectPostgres, handle, os.DirFS("migrations"), goose.WithSlog(discardLog()))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestMigrateDownAndUp(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	conn := connect(t, dsn)
	want := schema(t, conn)
	p := diskMigrator(t, dsn)

	// Version 5 is indexes only, which hold nothing that is not in the table.
	execute(t, conn, "INSERT INTO tasks (name) VALUES ('precious')")
	if _, err := p.DownTo(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	if _, err := p.DownTo(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "has rows") {
		t.Errorf("down with a row in the table: %v, want a refusal", err)
	}
	// The steps before the refusal are undone; the way back up loses nothing.
	if _, err := p.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
		t.Errorf("the refused down and up again is not the same (-want +got):\n%s", diff)
	}
	if got := column[string](t, conn, "SELECT name FROM tasks"); !slices.Equal(got, []string{"precious"}) {
		t.Errorf("after the refused down and up the tasks are %v", got)
	}

	execute(t, conn, "DELETE FROM tasks")
	if _, err := p.DownTo(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if got := column[*string](t, conn, "SELECT to_regclass('tasks')::text"); got[0] != nil {
		t.Error("the table is still there at version 0")
	}
	if err := migrate(t.Context(), testLog(t), dsn); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
		t.Errorf("down and up again is not the same (-want +got):\n%s", diff)
	}
}

// Each step down undoes its own step up and nothing else.
func TestMigrateStepwise(t *testing.T) {
	t.Parallel()
	dsn := emptyDatabase(t)
	conn := connect(t, dsn)
	p := diskMigrator(t, dsn)
	for _, s := range p.ListSources() {
		before := schema(t, conn)
		if s.Version == 1 { // goose makes its own table first
			before = nil
		}
		if _, err := p.UpTo(t.Context(), s.Version); err != nil {
			t.Fatal(err)
		}
		after := schema(t, conn)
		if _, err := p.DownTo(t.Context(), s.Version-1); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, schema(t, conn)); before != nil && diff != "" {
			t.Errorf("down from %d leaves a difference (-want +got):\n%s", s.Version, diff)
		}
		if _, err := p.UpTo(t.Context(), s.Version); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(after, schema(t, conn)); diff != "" {
			t.Errorf("up to %d differs the second time (-want +got):\n%s", s.Version, diff)
		}
	}
}

// On a table of ended tasks, whose pages have room for a pending task here and there, new ones
// share pages of their own.
func TestMigrateKeepsNewTasksTogether(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	conn := connect(t, dsn)
	migrator := diskMigrator(t, dsn)
	if _, err := migrator.DownTo(t.Context(), 7); err != nil {
		t.Fatal(err)
	}
	execute(t, conn, `INSERT INTO tasks (name, status, payload, result, finished_at)
		SELECT 'a', 'completed', jsonb_build_object('text', repeat('x', 110)), jsonb_build_object('text', repeat('y', n * 7 % 400)), now() FROM generate_series(1, 5000) n`)
	pages := func() int {
		execute(t, conn, "DELETE FROM tasks WHERE name = 'b'")
		execute(t, conn, "VACUUM tasks")
		execute(t, conn, `INSERT INTO tasks (name, payload) SELECT 'b', jsonb_build_object('text', repeat('x', 110)) FROM generate_series(1, 200)`)
		return column[int](t, conn, "SELECT count(DISTINCT (ctid::text::point)[0]) FROM tasks WHERE name = 'b'")[0]
	}
	before := pages()
	if _, err := migrator.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := pages(); before < 3*after {
		t.Errorf("200 tasks are in %d pages, and were in %d without the migration; want a third at most", after, before)
	}
}

// Replicas start at once (field case 123; pressly/goose#993).
func TestMigrateConcurrently(t *testing.T) {
	t.Parallel()
	for range 5 {
		dsn := emptyDatabase(t)
		var starters sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			starters.Go(func() { errs[i] = migrate(t.Context(), discardLog(), dsn) })
		}
		starters.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		got := column[string](t, connect(t, dsn), "SELECT version_id || ' x ' || count(*) FROM goose_db_version GROUP BY version_id ORDER BY version_id")
		if want := []string{"0 x 1", "1 x 1", "2 x 1", "3 x 1", "4 x 1", "5 x 1", "6 x 1", "7 x 1", "8 x 1"}; !slices.Equal(got, want) {
			t.Errorf("versions recorded: %v, want %v", got, want)
		}
	}
}

// The goose command and the program use the same files and the same table, in either
// order (field case 125).
func TestMigrateLikeGoose(t *testing.T) {
	t.Parallel()
	t.Run("program first", func(t *testing.T) {
		t.Parallel()
		dsn := newDatabase(t)
		p := diskMigrator(t, dsn)
		applied, err := p.Up(t.Context())
		if err != nil || len(applied) > 0 {
			t.Errorf("goose up after the program: %d applied, %v, want none", len(applied), err)
		}
		status, err := p.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range status {
			if s.State != goose.StateApplied {
				t.Errorf("goose status: %s is %s", s.Source.Path, s.State)
			}
		}
	})
	t.Run("goose first", func(t *testing.T) {
		t.Parallel()
		dsn := emptyDatabase(t)
		if _, err := diskMigrator(t, dsn).Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), dsn); err != nil {
			t.Fatal(err)
		}
		if out.Len() > 0 {
			t.Errorf("migrate after goose up did something: %s", out.String())
		}
	})
}

// A table that somebody reads delays a migration; it neither fails nor makes
// everybody else wait behind it without end.
func TestMigrateTableInUse(t *testing.T) {
	t.Parallel()
	dsn := emptyDatabase(t)
	conn := connect(t, dsn)
	execute(t, conn, oldRows)
	execute(t, conn, generations[1].create)
	execute(t, conn, "BEGIN; SELECT count(*) FROM tasks")
	var out syncBuffer
	done := make(chan error, 1)
	go func() { done <- migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), dsn) }()
	eventually(t, "migration gives up the lock once", func() bool { return strings.Contains(out.String(), "migration waits for a table that is in use") })
	execute(t, conn, "COMMIT")
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(15 * time.Second):
		t.Error("migrate did not go on")
	}
}

// What a broken run left of the list's index is built anew, beside a writer whose transaction
// stays open longer than a migration waits for a lock, and one that somebody built
// by hand before is kept.
func TestMigrateListIndex(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	conn := connect(t, dsn)
	want := schema(t, conn)
	number := func() int64 { return column[int64](t, conn, "SELECT 'tasks_group_idx'::regclass::oid::bigint")[0] }
	if _, err := diskMigrator(t, dsn).DownTo(t.Context(), 6); err != nil {
		t.Fatal(err)
	}
	writer := connect(t, dsn)
	execute(t, writer, "BEGIN; INSERT INTO tasks (name) VALUES ('open')")
	var out syncBuffer
	done := make(chan error, 1)
	go func() { done <- migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), dsn) }()
	eventually(t, "the build waits longer than for a lock", func() bool {
		return column[int](t, conn, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
			AND query LIKE '%CREATE INDEX CONCURRENTLY%' AND query_start < now() - make_interval(secs => $1)`, migrationLockTimeout.Seconds()+0.5)[0] == 1
	}, func() any { return out.String() })
	execute(t, writer, "INSERT INTO tasks (name) VALUES ('not blocked'); COMMIT")
	if err := <-done; err != nil || strings.Contains(out.String(), "waits") {
		t.Errorf("migrate: %v, log %s", err, out.String())
	}
	if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
		t.Errorf("schema (-want +got):\n%s", diff)
	}

	built := number()
	for _, test := range []struct {
		what, left string
		kept       bool
	}{
		{"built by hand", "SELECT", true},
		{"of a broken build", "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'tasks_group_idx'::regclass", false},
		{"of a run that was stopped before it dropped what this replaces", `CREATE INDEX tasks_list_idx ON tasks (status, created_at, task_id) WHERE lease_until IS NULL;
			UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'tasks_list_idx'::regclass`, true},
	} {
		execute(t, conn, test.left)
		execute(t, conn, "DELETE FROM goose_db_version WHERE version_id >= 7")
		if err := migrate(t.Context(), testLog(t), dsn); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, schema(t, conn)); diff != "" || (number() == built) != test.kept {
			t.Errorf("index %s: number %d, then %d; schema (-want +got):\n%s", test.what, built, number(), diff)
		}
		built = number()
	}
}

// An index that an operator is still building, in a role whose work the migration's may not
// see, is neither dropped nor built twice, and nobody queues behind the migration.
func TestMigrateWaitsForBuild(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		index   string
		version int
	}{{"tasks_due_idx", 6}, {"tasks_group_idx", 7}} {
		t.Run(test.index, func(t *testing.T) {
			t.Parallel()
			role := newRole(t)
			dsn := newDatabase(t)
			conn := connect(t, dsn)
			want := schema(t, conn)
			build := column[string](t, conn, "SELECT replace(pg_get_indexdef($1::text::regclass), 'INDEX', 'INDEX CONCURRENTLY')", test.index)[0]
			execute(t, conn, fmt.Sprintf(`DROP INDEX %s; DELETE FROM goose_db_version WHERE version_id >= %d; ALTER SCHEMA public OWNER TO %[3]s;
				ALTER TABLE tasks OWNER TO %[3]s; ALTER TABLE queues OWNER TO %[3]s; ALTER TABLE goose_db_version OWNER TO %[3]s`, test.index, test.version, role))
			open := connect(t, dsn)
			execute(t, open, "BEGIN; INSERT INTO tasks (name) VALUES ('open')")
			builder := connect(t, dsn)
			built := make(chan error, 1)
			go func() {
				_, err := builder.Exec(t.Context(), build)
				built <- err
			}()
			const number = "SELECT indexrelid::bigint FROM pg_index WHERE indexrelid = to_regclass($1) AND indisvalid = $2"
			eventually(t, "the build waits", func() bool { return len(column[int64](t, conn, number, test.index, false)) == 1 })
			begun := column[int64](t, conn, number, test.index, false)

			// It delays no other database, although the table has the same number there.
			elsewhere := newDatabase(t)
			execute(t, connect(t, elsewhere), "DELETE FROM goose_db_version WHERE version_id >= 5")
			if _, err := diskMigrator(t, elsewhere).Up(t.Context()); err != nil {
				t.Errorf("migration of another database: %v", err)
			}

			var out syncBuffer
			done := make(chan error, 1)
			go func() {
				done <- migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), asRole(dsn, role))
			}()
			writer := connect(t, dsn)
			execute(t, writer, "SET lock_timeout = '1s'")
			eventually(t, "migrate waits", func() bool {
				execute(t, writer, "INSERT INTO tasks (name) VALUES ('not blocked')")
				return strings.Contains(out.String(), "is being built")
			}, func() any { return out.String() })
			execute(t, open, "COMMIT")
			if err := errors.Join(<-built, <-done); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(begun, column[int64](t, conn, number, test.index, true)); diff != "" {
				t.Errorf("the operator's index (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
				t.Errorf("schema (-want +got):\n%s", diff)
			}
		})
	}
}

// A build that loses out in a deadlock is begun again.
func TestMigrateDeadlock(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	conn := connect(t, dsn)
	want := schema(t, conn)
	execute(t, conn, "DROP INDEX tasks_group_idx; DELETE FROM goose_db_version WHERE version_id >= 7")
	other := connect(t, dsn)
	execute(t, other, "SET deadlock_timeout = '1min'; BEGIN; INSERT INTO tasks (name) VALUES ('open')")
	var out syncBuffer
	done := make(chan error, 1)
	go func() {
		done <- migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), dsn+"&deadlock_timeout=3s")
	}()
	eventually(t, "the build waits", func() bool {
		return column[int](t, conn, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
			AND query LIKE '%CREATE INDEX CONCURRENTLY%'`)[0] == 1
	})
	execute(t, other, "LOCK TABLE tasks IN SHARE UPDATE EXCLUSIVE MODE; COMMIT") // which waits for the build
	if err := <-done; err != nil || !strings.Contains(out.String(), "40P01") {
		t.Errorf("migrate: %v, log %s; want it to try again after a deadlock", err, out.String())
	}
	if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
		t.Errorf("schema (-want +got):\n%s", diff)
	}
	if got := column[int](t, conn, "SELECT count(*) FROM pg_index WHERE NOT indisvalid"); got[0] != 0 {
		t.Errorf("%d invalid indexes left", got[0])
	}
}

// The README has every index that a migration builds beside writers, and built from there it
// is what the migration would have made. Version 7 drops three of them again.
func TestReadmeIndexes(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	dsn := newDatabase(t)
	conn := connect(t, dsn)
	want := schema(t, conn)
	p := diskMigrator(t, dsn)
	if _, err := p.DownTo(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	const numbers = "SELECT indexrelid::bigint FROM pg_index WHERE indrelid = 'tasks'::regclass AND indexrelid <> ALL($1) ORDER BY 1"
	old := column[int64](t, conn, numbers, []int64{})
	for _, statement := range regexp.MustCompile(`(?m)^CREATE INDEX CONCURRENTLY .*;$`).FindAllString(string(readme), -1) {
		execute(t, conn, statement)
	}
	built := column[int64](t, conn, numbers, old)
	for version := int64(5); version <= 6; version++ {
		if _, err := p.UpTo(t.Context(), version); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(built, column[int64](t, conn, numbers, old)); diff != "" {
			t.Errorf("indexes of the README, and after version %d (-want +got):\n%s", version, diff)
		}
	}
	replaced := column[int64](t, conn, "SELECT i::regclass::oid::bigint FROM unnest(ARRAY['tasks_list_idx', 'tasks_name_idx', 'tasks_retryable_idx']) i")
	if err := migrate(t.Context(), testLog(t), dsn); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, schema(t, conn)); diff != "" {
		t.Errorf("schema (-want +got):\n%s", diff)
	}
	kept := slices.DeleteFunc(built, func(index int64) bool { return slices.Contains(replaced, index) })
	if diff := cmp.Diff(kept, column[int64](t, conn, numbers, old)); diff != "" {
		t.Errorf("indexes of the README, and after the migration (-want +got):\n%s", diff)
	}
}

// newRole makes a role that may log in and no more. Call it before the database is made
// in which the role gets rights, for it is dropped afterwards.
func newRole(t testing.TB) string {
	t.Helper()
	s := testPostgres(t)
	role := "role_" + strings.ToLower(rand.Text())
	s.exec(t, "CREATE ROLE "+role+" LOGIN")
	t.Cleanup(func() { s.exec(t, "DROP ROLE "+role) })
	return role
}

// asRole returns the DSN with another user.
func asRole(dsn, role string) string { return strings.Replace(dsn, "nexusflow@", role+"@", 1) }

// A process whose role lacks rights says which, at its start and to probes.
func TestCheckSchemaGrants(t *testing.T) {
	t.Parallel()
	role := newRole(t)
	cfg := fastConfig(t)
	cfg.MigrationDatabaseURL = newDatabase(t)
	cfg.DatabaseURL = asRole(cfg.MigrationDatabaseURL, role)
	conn := connect(t, cfg.MigrationDatabaseURL)
	_, err := prepareRecord(t.Context(), testLog(t), cfg)
	const start = "check schema: the role of DATABASE_URL lacks rights: "
	want := fmt.Sprintf("GRANT SELECT ON goose_db_version TO %[1]s; GRANT INSERT, SELECT, UPDATE ON queues TO %[1]s; GRANT DELETE, INSERT, SELECT, UPDATE ON tasks TO %[1]s", role)
	if err == nil || err.Error() != start+want {
		t.Fatalf("start without rights: %v, want %q", err, start+want)
	}
	execute(t, conn, want)
	s := startService(t, cfg, nil)
	s.await(s.insert("process_video"), statusCompleted)
	execute(t, conn, "REVOKE SELECT ON queues FROM "+role)
	eventually(t, "readyz fails", func() bool {
		code, _ := s.request("GET", "/readyz")
		return code == http.StatusServiceUnavailable
	})
	if _, err := prepareRecord(t.Context(), testLog(t), cfg); err == nil || err.Error() != start+"GRANT SELECT ON queues TO "+role {
		t.Errorf("start without one right: %v", err)
	}
	execute(t, conn, "GRANT SELECT ON queues TO "+role)
	eventually(t, "readyz recovers", func() bool {
		code, _ := s.request("GET", "/readyz")
		return code == http.StatusOK
	})
}

// syncBuffer is a buffer that a logger fills while a test reads it.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestMigrateNewerSchema(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	execute(t, connect(t, dsn), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (999, true)")
	var out bytes.Buffer
	if err := migrate(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), dsn); err != nil {
		t.Fatalf("migrate: %v, want a warning only", err)
	}
	if !strings.Contains(out.String(), "schema is newer than this program") {
		t.Errorf("log = %q, want a warning", out.String())
	}
}

func TestMigrateStopsWhileWaiting(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	execute(t, connect(t, dsn), fmt.Sprintf("SELECT pg_advisory_lock(%d)", int64(migrationLockID)))
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("terminated")
	var out syncBuffer
	done := make(chan error, 1)
	go func() { done <- migrate(ctx, slog.New(slog.NewTextHandler(&out, nil)), dsn) }()
	eventually(t, "migrate waits", func() bool { return strings.Contains(out.String(), "waiting for another process to migrate") })
	cancel(stop)
	select {
	case err := <-done:
		if !errors.Is(err, stop) {
			t.Errorf("migrate: %v, want the cause of its context's end", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("migrate still waits for the lock")
	}
}

func TestCheckSchema(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, do string
		fresh    bool
		want     string // "" for no error
	}{
		{"complete", "SELECT 1", true, ""},
		{"nothing there", "SELECT 1", false, "no tasks table"},
		{"older", "DELETE FROM goose_db_version WHERE version_id > 3", true, "version 3 is older than 8"},
		{"no record", "DROP TABLE goose_db_version", true, "no record of migrations"},
		{"empty record", "TRUNCATE goose_db_version", true, "no record of migrations"},
		{"index gone", "DROP INDEX tasks_idempotency_key_idx", true, "unique idempotency keys"},
		{"index not unique", "DROP INDEX tasks_idempotency_key_idx; CREATE INDEX tasks_idempotency_key_idx ON tasks (idempotency_key)", true, "unique idempotency keys"},
		{"table gone", "DROP TABLE tasks", true, "no tasks table"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dsn := emptyDatabase(t)
			if test.fresh {
				dsn = newDatabase(t)
			}
			execute(t, connect(t, dsn), test.do)
			p, err := openPools(t.Context(), dsn, testLease)
			if err != nil {
				t.Fatal(err)
			}
			defer p.close()
			err = checkSchema(t.Context(), p.api)
			if test.want == "" && err != nil {
				t.Fatal(err)
			}
			if test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "goose up")) {
				t.Errorf("checkSchema = %v, want %q and the advice to run goose up", err, test.want)
			}
		})
	}
}
