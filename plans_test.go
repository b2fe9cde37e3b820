package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

// allQueries runs every statement there is once, in an order in which each finds what it
// looks for, and leaves one task behind that has seen everything. The payload is one that
// wrong quoting would spoil.
func allQueries(ctx context.Context, conn db.DBTX) error {
	q := db.New(conn)
	const payload = `{"n": 12345678901234567890.10, "quote": "it's \"so\" \\ $1", "größe": "☃ 😀"}`
	key := uuid.NewString() + " 'key' \\"
	id := uuid.New()
	id[15] |= 1
	before := id
	before[15]--
	ids := []uuid.UUID{id}
	expect := func(what string, rows int, err error) error {
		if err == nil && rows != 1 {
			err = fmt.Errorf("%d rows, want 1", rows)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	expectNone := func(what string, err error) error {
		if !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("%s: %w, want no row", what, err)
		}
		return nil
	}
	claim := func() error {
		rows, err := q.ClaimTasks(ctx, db.ClaimTasksParams{LeaseMS: 0, Worker: "it's me", TaskIDs: ids})
		if err == nil && len(rows) == 1 && (string(rows[0].Payload) != payload || *rows[0].IdempotencyKey != key) {
			err = fmt.Errorf("payload %s, key %s", rows[0].Payload, *rows[0].IdempotencyKey)
		}
		return expect("ClaimTasks", len(rows), err)
	}
	attempt := int32(0)
	for _, step := range []func() error{
		func() error {
			rows, err := q.InsertTasks(ctx, db.InsertTasksParams{
				Publish: true, TaskIDs: ids, Names: []string{"name"}, Queues: []string{"plans"}, Payloads: []string{payload}, IdempotencyKeys: []string{key},
				RequestHashes: [][]byte{{0, 255, '\\'}}, MaxRetries: []int32{3}, TimeoutsMS: []int64{1}, Traceparents: []string{"tp"}, RunsAtUS: []int64{0}, DelaysMS: []int64{0},
			})
			return expect("InsertTasks", len(rows), err)
		},
		func() error {
			rows, err := q.TasksByKey(ctx, []string{key, "x"})
			if err == nil && !slices.Equal(rows[0].RequestHash, []byte{0, 255, '\\'}) {
				err = fmt.Errorf("request_hash %v", rows[0].RequestHash)
			}
			return expect("TasksByKey", len(rows), err)
		},
		func() error { rows, err := q.TasksByID(ctx, ids); return expect("TasksByID", len(rows), err) },
		func() error { _, err := q.BacklogAge(ctx); return expect("BacklogAge", 1, err) },
		func() error {
			open, err := q.CountOpenTasks(ctx, 1000)
			if err == nil && (open.Pending < 1 || open.Pending+open.Processing < open.Overdue+open.Expired) {
				err = fmt.Errorf("got %+v", open)
			}
			return expect("CountOpenTasks", 1, err)
		},
		func() error { return q.AllowTime(ctx, 60_000) },
		func() error {
			queues, err := q.OverdueQueues(ctx, -1)
			return expect("OverdueQueues", len(slices.DeleteFunc(queues, func(queue string) bool { return queue != "plans" })), err)
		},
		func() error {
			rows, err := q.SweepPublished(ctx, db.SweepPublishedParams{AgeMS: -1, Queue: "plans", MaxRows: 1})
			return expect("SweepPublished", len(rows), err)
		},
		func() error { n, err := q.PauseQueue(ctx, "plans"); return expect("PauseQueue", int(n), err) },
		func() error {
			paused, err := q.PausedQueues(ctx)
			return expect("PausedQueues", len(slices.DeleteFunc(paused, func(queue string) bool { return queue != "plans" })), err)
		},
		func() error {
			n, err := q.UnpublishRefused(ctx, ids)
			return expect("UnpublishRefused", int(n), err)
		},
		func() error { n, err := q.ResumeQueue(ctx, "plans"); return expect("ResumeQueue", int(n), err) },
		func() error { n, err := q.UnpublishTasks(ctx, ids); return expect("UnpublishTasks", int(n), err) },
		func() error {
			rows, err := q.QueueDepths(ctx, db.QueueDepthsParams{Most: 1000, Queues: []string{"plans", "it's new"}})
			rows = slices.DeleteFunc(rows, func(r db.QueueDepthsRow) bool {
				return r.Queue != "it's new" && !(r.Queue == "plans" && r.Published == 0 && r.Unpublished == 1 && r.Later == 0 && r.OldestMS >= 0)
			})
			return expect("QueueDepths", len(rows)-1, err)
		},
		func() error {
			rows, err := q.SweepUnpublished(ctx, 1)
			return expect("SweepUnpublished", len(rows), err)
		},
		claim,
		func() error {
			attempt++
			rows, err := q.BeatTasks(ctx, db.BeatTasksParams{LeaseMS: -1, TaskIDs: ids, Attempts: []int32{attempt}})
			return expect("BeatTasks", len(rows), err)
		},
		func() error {
			rows, err := q.ExpireTasks(ctx, db.ExpireTasksParams{MaxLost: 9, MaxRows: 1})
			return expect("ExpireTasks", len(rows), err)
		},
		claim,
		func() error {
			attempt++
			if rows, err := q.CancelRequests(ctx, ids); err != nil || len(rows) > 0 {
				return fmt.Errorf("CancelRequests: %v %w", rows, err)
			}
			_, err := q.BeatTasks(ctx, db.BeatTasksParams{LeaseMS: -1, TaskIDs: ids, Attempts: []int32{attempt}})
			return err
		},
		func() error {
			rows, err := q.ExpireTasksByID(ctx, db.ExpireTasksByIDParams{MaxLost: 9, TaskIDs: ids})
			return expect("ExpireTasksByID", len(rows), err)
		},
		func() error {
			rows, err := q.ClaimUnlockedTasks(ctx, db.ClaimUnlockedTasksParams{LeaseMS: 1000, Worker: "me", TaskIDs: ids})
			return expect("ClaimUnlockedTasks", len(rows), err)
		},
		func() error {
			rows, err := q.BeatUnlockedTasks(ctx, db.BeatUnlockedTasksParams{LeaseMS: 1000, TaskIDs: ids, Attempts: []int32{attempt + 1}})
			return expect("BeatUnlockedTasks", len(rows), err)
		},
		func() error {
			attempt++
			rows, err := q.ReleaseTasks(ctx, db.ReleaseTasksParams{TaskIDs: ids, Attempts: []int32{attempt}, Reasons: []string{"it's over"}})
			return expect("ReleaseTasks", len(rows), err)
		},
		claim,
		func() error {
			attempt++
			rows, err := q.FailTasks(ctx, db.FailTasksParams{TaskIDs: ids, Attempts: []int32{attempt}, Errors: []string{`it's "\"`}, Permanents: []bool{false}, DelaysMS: []int64{0}})
			return expect("FailTasks", len(rows), err)
		},
		func() error {
			rows, err := q.ClaimDueTasks(ctx, db.ClaimDueTasksParams{LeaseMS: 1000, Worker: "me", Queues: []string{"plans", "x"}, MaxRows: 1})
			return expect("ClaimDueTasks", len(rows), err)
		},
		func() error {
			attempt++
			rows, err := q.CompleteTasks(ctx, db.CompleteTasksParams{TaskIDs: ids, Attempts: []int32{attempt}, Results: []string{payload}})
			return expect("CompleteTasks", len(rows), err)
		},
		func() error {
			rows, err := q.AttemptOutcomes(ctx, ids)
			return expect("AttemptOutcomes", len(rows), err)
		},
		func() error { rows, err := q.TaskStates(ctx, ids); return expect("TaskStates", len(rows), err) },
		func() error { rows, err := q.TaskSummaries(ctx, ids); return expect("TaskSummaries", len(rows), err) },
		func() error {
			rows, err := q.LiveTasks(ctx, db.LiveTasksParams{MaxRows: 1, FromID: id, ToID: uuid.Max})
			if err == nil && (len(rows) == 0 || len(rows) > 16) {
				err = fmt.Errorf("%d rows", len(rows))
			}
			return expect("LiveTasks", 1, err)
		},
		func() error {
			got, err := q.GetTask(ctx, id)
			var ledger []json.RawMessage
			if err == nil {
				err = json.Unmarshal(got.Attempts, &ledger)
			}
			if err == nil && (got.Attempt != attempt || got.LostCount != 2 || got.RetryCount != 1 || len(ledger) != 4 || string(got.Result) != payload) {
				err = fmt.Errorf("got %+v", got)
			}
			return expect("GetTask", 1, err)
		},
		func() error {
			ended, err := q.CountEndedTasks(ctx)
			if err == nil && (ended.Completed < 1 || ended.Failed != 0 || ended.Cancelled != 0) {
				err = fmt.Errorf("got %+v", ended)
			}
			return expect("CountEndedTasks", 1, err)
		},
		func() error {
			for _, name := range []*string{nil, new("name")} {
				rows, err := q.ListTasks(ctx, db.ListTasksParams{Statuses: []string{"completed", "processing"}, Name: name, Since: firstTime, Before: lastTime, MaxRows: 1})
				if err := expect("ListTasks", len(rows), err); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			got, err := q.DeleteFinished(ctx, db.DeleteFinishedParams{AfterID: before, MaxRows: 1, AgeMS: -1000})
			if err == nil && got.LastID != id {
				err = fmt.Errorf("last id %s, want %s", got.LastID, id)
			}
			return expect("DeleteFinished", int(got.Deleted), err)
		},
		func() error { _, err := q.RetryTask(ctx, id); return expectNone("RetryTask", err) },
		func() error { _, err := q.CancelTask(ctx, id); return expectNone("CancelTask", err) },
		func() error {
			got, err := q.RetryTasks(ctx, db.RetryTasksParams{TaskIDs: ids, Statuses: []string{statusCancelled}})
			return expect("RetryTasks", 1+len(got), err)
		},
		func() error {
			got, err := q.CancelTasks(ctx, db.CancelTasksParams{TaskIDs: ids, Statuses: []string{statusProcessing}})
			return expect("CancelTasks", 1+len(got), err)
		},
		func() error { _, err := q.ReadOnly(ctx); return err },
		func() error { _, err := q.HasKeyIndex(ctx); return err },
		func() error { _, err := q.MissingGrants(ctx); return err },
		func() error { _, err := q.TryLock(ctx, 1); return err },
		func() error { _, err := q.Unlock(ctx, 1); return err },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// queryNames lists what queries/ declares.
func queryNames(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob("queries/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^-- name: (\w+)`).FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	return names
}

// seenQueries is a tracer that notes the names of the statements that ran.
type seenQueries map[string]bool

func (s seenQueries) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if m := regexp.MustCompile(`-- name: (\w+)`).FindStringSubmatch(data.SQL); m != nil {
		s[m[1]] = true
	}
	return ctx
}

func (s seenQueries) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Field case 53: behind a pooler that gives each transaction another server connection, statements
// cannot be prepared, so their arguments travel without the server's word on their types.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c, _, err := poolConfig(newDatabase(t) + "&default_query_exec_mode=" + mode)
			if err != nil {
				t.Fatal(err)
			}
			seen := seenQueries{}
			c.MaxConns = 1
			c.ConnConfig.Tracer = seen
			pool, err := pgxpool.NewWithConfig(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			if err := allQueries(t.Context(), pool); err != nil {
				t.Fatal(err)
			}
			for _, name := range queryNames(t) {
				if !seen[name] {
					t.Errorf("query %s was not tried", name)
				}
			}
		})
	}
}

// changesByID holds the statements that change rows whose ids they are given, or have found.
var changesByID = map[string]bool{
	"ClaimTasks": true, "ClaimUnlockedTasks": true, "ClaimDueTasks": true, "BeatTasks": true, "BeatUnlockedTasks": true, "CancelRequests": true,
	"CompleteTasks": true, "FailTasks": true, "ReleaseTasks": true, "ExpireTasks": true, "ExpireTasksByID": true,
	"SweepUnpublished": true, "SweepPublished": true, "UnpublishTasks": true, "CancelTasks": true, "RetryTasks": true,
}

// byPartialIndex matches a scan of the table that a statement changes, which is called t or
// not at all, by anything but its key.
var byPartialIndex = regexp.MustCompile(`Scan using tasks_(?:lease|published|due|unpublished)_idx on tasks(?: t)?  \(.*|Bitmap Index Scan on tasks_(?:lease|published|due|unpublished)_idx.*`)

// notByGroup matches a scan by which the list would read more of a group than it shows.
var notByGroup = regexp.MustCompile(`Seq Scan on tasks f.*|Bitmap Index Scan on tasks_group_idx.*`)

// The plans of the worker's statements go by an index on an empty table, on one that has no statistics yet,
// and on a large one, whether the server plans for the arguments or once for all. On
// submit, status and list the same holds for a large table. Only the count of ended tasks reads the table.
// The list goes by its index in the API's pool too, which may read tables.
func TestQueryPlans(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	admin := connect(t, dsn)
	for _, size := range []struct{ name, fill string }{
		{"empty", "SELECT"},
		{"young", fill(0, 2000)},
		{"large", fill(2000, 200_000) + "; ANALYZE tasks"},
	} {
		execute(t, admin, size.fill)
		for _, planMode := range []string{"force_generic_plan", "force_custom_plan"} {
			what := size.name + ", " + planMode
			plans := openPlanner(t, dsn, false, planMode).run(what)
			for _, name := range queryNames(t) {
				plan, ok := plans[name]
				if !ok {
					t.Errorf("no plan of %s was seen", name)
				}
				if os.Getenv("SHOW_PLANS") != "" {
					t.Logf("%s: %s", what, plan)
				}
				if strings.Contains(plan, "Seq Scan on tasks") && name != "CountEndedTasks" || strings.Contains(plan, "Seq Scan on queues") || strings.Contains(plan, "JIT:") {
					t.Errorf("%s: %s reads a whole table:\n%s", what, name, plan)
				}
				if m := byPartialIndex.FindString(plan); m != "" && changesByID[name] {
					t.Errorf("%s: %s does not look its ids up: %s\n%s", what, name, m, plan)
				}
			}
			for pool, list := range map[string]string{"work": plans["ListTasks"], "api": openPlanner(t, dsn, true, planMode).run(what)["ListTasks"]} {
				if m := notByGroup.FindString(list); m != "" || !strings.Contains(list, "Index Scan Backward using tasks_group_idx on tasks f") {
					t.Errorf("%s, pool %s: the list does not read its groups from where they begin: %s\n%s", what, pool, m, list)
				}
			}
		}
	}
}

// readsMany matches a scan of the table that met a thousand rows or more.
var readsMany = regexp.MustCompile(`Scan.* on tasks.*actual time=\S+ rows=\d{4,} .*`)

// A plan that was made for a small table with statistics, and so without care, does not last
// while the table grows.
func TestPlansOfSmallTable(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	admin := connect(t, dsn)
	execute(t, admin, "ALTER TABLE tasks SET (autovacuum_enabled = off); "+fill(0, 20)+"; ANALYZE tasks")
	p := openPlanner(t, dsn, false, "force_generic_plan")
	p.run("small")
	execute(t, admin, fill(20, 50_000))
	time.Sleep(planAge)
	p.run("grown, plans as they were")
	for name, plan := range p.run("grown") {
		if m := readsMany.FindString(plan); m != "" && changesByID[name] {
			t.Errorf("%s: %s\n%s", name, m, plan)
		}
	}
}

// Of tasks that were created at the same time, under many names, a list reads hardly more than it
// shows: only the ids tell which of them are on the page.
func TestListOfTiesReadsLittle(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	execute(t, connect(t, dsn), "INSERT INTO tasks (name, created_at) SELECT 'name ' || n % 100, '2026-01-01' FROM generate_series(1, 10000) n; ANALYZE tasks")
	for _, planMode := range []string{"force_generic_plan", "force_custom_plan"} {
		p := openPlanner(t, dsn, true, planMode)
		rows, err := db.New(p.pool).ListTasks(t.Context(), db.ListTasksParams{Statuses: statuses, Since: firstTime, Before: lastTime, MaxRows: 51})
		if err != nil || len(rows) != 51 {
			t.Fatalf("%d rows, want 51: %v", len(rows), err)
		}
		plan, total := p.seen()["ListTasks"], 0
		for _, m := range regexp.MustCompile(`Scan.* on tasks f.*actual time=\S+ rows=(\d+) loops=(\d+)`).FindAllStringSubmatch(plan, -1) {
			read, _ := strconv.Atoi(m[1])
			loops, _ := strconv.Atoi(m[2])
			total += read * loops
		}
		if total == 0 || total > 2000 { // 100 names' newest, four pages of heads, and a page
			t.Errorf("%s: read %d rows for a page of 51:\n%s", planMode, total, plan)
		}
	}
}

// A planner is a pool of one connection that notes the plans of its statements.
type planner struct {
	t     *testing.T
	pool  *pgxpool.Pool
	mu    sync.Mutex
	plans map[string]string // by query
}

func openPlanner(t *testing.T, dsn string, api bool, planMode string) *planner {
	t.Helper()
	p, err := openPools(t.Context(), dsn, testLease)
	if err != nil {
		t.Fatal(err)
	}
	c := p.work.Config()
	if api {
		c = p.api.Config()
	}
	p.close()
	r := &planner{t: t, plans: map[string]string{}}
	c.MaxConns, c.MinConns = 1, 0
	c.ConnConfig.RuntimeParams["plan_cache_mode"] = planMode
	c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if m := regexp.MustCompile(`-- name: (\w+)`).FindStringSubmatch(n.Message); m != nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			_, plan, _ := strings.Cut(n.Message, "\n;") // past the statement's text
			r.plans[m[1]] += n.Message + plan
		}
	}
	if r.pool, err = pgxpool.NewWithConfig(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.pool.Close)
	if _, err := r.pool.Exec(t.Context(), "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on; SET client_min_messages = log"); err != nil {
		t.Skipf("SKIPPED, NOT TESTED: %v", err)
	}
	return r
}

// run returns the plans of all statements that allQueries runs, which it undoes.
func (r *planner) run(what string) map[string]string {
	r.t.Helper()
	tx, err := r.pool.Begin(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	defer tx.Rollback(r.t.Context())
	if err := allQueries(r.t.Context(), tx); err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
	if err := tx.Rollback(r.t.Context()); err != nil { // the notices of the last statement come with its answer
		r.t.Fatal(err)
	}
	return r.seen()
}

// seen returns the plans of the statements since it was asked last.
func (r *planner) seen() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	plans := maps.Clone(r.plans)
	clear(r.plans)
	return plans
}

// fill adds tasks as they are after a while: 9 of 10 ended, of the rest a third each
// queued, waiting for a retry and running.
func fill(from, to int) string {
	return fmt.Sprintf(`SET synchronous_commit = off; INSERT INTO tasks (task_id, name, queue, status, published_at, run_at, lease_until, idempotency_key, attempt, finished_at)
		SELECT md5(n::text)::uuid, 'name', 'q' || n %% 5, status,
			CASE WHEN status <> 'pending' OR n %% 60 = 0 THEN now() END,
			CASE WHEN status <> 'pending' OR n %% 60 = 0 THEN now() ELSE now() + n * interval '1 second' END,
			CASE WHEN status = 'processing' THEN now() + interval '1 hour' END,
			CASE WHEN n %% 2 = 0 THEN 'key ' || n END, 1,
			CASE WHEN status = 'completed' THEN now() END
		FROM (SELECT n, CASE WHEN n %% 10 > 0 THEN 'completed' WHEN n %% 30 > 0 THEN 'pending' ELSE 'processing' END AS status FROM generate_series(%d, %d) n) s`, from, to-1)
}
