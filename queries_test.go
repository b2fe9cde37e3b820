package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

// A record is a database with tasks in states of a test's choice.
type record struct {
	*db.Queries
	pool *pgxpool.Pool
}

func newRecord(t testing.TB) record {
	t.Helper()
	p := testPools(t)
	return record{db.New(p.work), p.work}
}

// insertion describes one new task; the zero values are the usual ones.
type insertion struct {
	key, queue, payload string
	maxRetries          int32
	delay               time.Duration
	at                  time.Time
	unpublished         bool
}

// insert stores a task and returns its id, or false when its key was taken.
func (r record) insert(t testing.TB, in insertion) (uuid.UUID, bool) {
	t.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	p := db.InsertTasksParams{
		Publish: !in.unpublished, TaskIDs: []uuid.UUID{id}, Names: []string{"name"}, Queues: []string{"default"}, Payloads: []string{`{"n": 1}`},
		IdempotencyKeys: []string{in.key}, RequestHashes: [][]byte{{1, 2, 3}}, MaxRetries: []int32{in.maxRetries}, TimeoutsMS: []int64{0},
		Traceparents: []string{""}, RunsAtUS: []int64{0}, DelaysMS: []int64{in.delay.Milliseconds()},
	}
	if in.queue != "" {
		p.Queues[0] = in.queue
	}
	if in.payload != "" {
		p.Payloads[0] = in.payload
	}
	if !in.at.IsZero() {
		p.RunsAtUS[0] = in.at.UnixMicro()
	}
	rows, err := r.InsertTasks(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return id, len(rows) == 1
}

// task stores a task and then sets columns, as in "status = 'failed', attempt = 2".
func (r record) task(t testing.TB, sets ...string) uuid.UUID {
	t.Helper()
	id, _ := r.insert(t, insertion{maxRetries: 3})
	for _, set := range sets {
		if _, err := r.pool.Exec(t.Context(), "UPDATE tasks SET "+set+" WHERE task_id = $1", id); err != nil {
			t.Fatalf("set %s: %v", set, err)
		}
	}
	return id
}

// Settings for task: one in its second attempt after an error in the first, and what may
// be different about it. Each was last touched an hour ago.
const (
	running = `status = 'processing', attempt = 2, retry_count = 1, lease_until = now() + interval '1 minute', locked_by = 'me',
		started_at = now() - interval '1 hour', error_message = 'first error', published_at = now() - interval '1 hour',
		run_at = now() - interval '1 hour', created_at = now() - interval '2 hours', updated_at = now() - interval '1 hour'`
	pastLease = "lease_until = now() - interval '1 second'"
	cancelled = "cancel_requested = true"
	touched   = "updated_at = now() - interval '1 hour', published_at = now() - interval '1 hour'"
)

func (r record) get(t testing.TB, id uuid.UUID) db.Task {
	t.Helper()
	row, err := r.GetTask(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return row
}

// change returns what a step changed in a task, by column; times as how far they lie from the
// database's clock, in whole seconds. A step takes less than half of one.
func (r record) change(t testing.TB, id uuid.UUID, step func()) map[string]string {
	t.Helper()
	before := r.columns(t, id)
	step()
	after := r.columns(t, id)
	changed := map[string]string{}
	for name, value := range after {
		if before[name] != value {
			changed[name] = value
		}
	}
	for name, value := range changed {
		at, err := time.Parse("2006-01-02T15:04:05.999999-07:00", value)
		if err == nil {
			changed[name] = fmt.Sprint("now", at.Sub(r.now(t)).Round(time.Second))
		}
	}
	delete(changed, "attempts")
	return changed
}

func (r record) columns(t testing.TB, id uuid.UUID) map[string]string {
	t.Helper()
	rows, err := r.pool.Query(t.Context(), "SELECT key, coalesce(value, 'NULL') FROM tasks t, jsonb_each_text(to_jsonb(t)) WHERE task_id = $1", id)
	if err != nil {
		t.Fatal(err)
	}
	columns := map[string]string{}
	var key, value string
	if _, err := pgx.ForEachRow(rows, []any{&key, &value}, func() error { columns[key] = value; return nil }); err != nil {
		t.Fatal(err)
	}
	return columns
}

// now is the database's clock.
func (r record) now(t testing.TB) time.Time {
	t.Helper()
	var now time.Time
	if err := r.pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}

// The steps a worker takes with one attempt; each reports how many rows came back.
func (r record) claim(t testing.TB, ids ...uuid.UUID) []db.ClaimTasksRow {
	t.Helper()
	rows, err := r.ClaimTasks(t.Context(), db.ClaimTasksParams{LeaseMS: 30_000, Worker: "me", TaskIDs: ids})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) beat(t testing.TB, id uuid.UUID, attempt int32) []db.BeatTasksRow {
	t.Helper()
	rows, err := r.BeatTasks(t.Context(), db.BeatTasksParams{LeaseMS: 30_000, TaskIDs: []uuid.UUID{id}, Attempts: []int32{attempt}})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) complete(t testing.TB, id uuid.UUID, attempt int32, result string) []db.CompleteTasksRow {
	t.Helper()
	rows, err := r.CompleteTasks(t.Context(), db.CompleteTasksParams{TaskIDs: []uuid.UUID{id}, Attempts: []int32{attempt}, Results: []string{result}})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) fail(t testing.TB, id uuid.UUID, attempt int32, permanent bool) []db.FailTasksRow {
	t.Helper()
	rows, err := r.FailTasks(t.Context(), db.FailTasksParams{
		TaskIDs: []uuid.UUID{id}, Attempts: []int32{attempt}, Errors: []string{"second error"}, Permanents: []bool{permanent}, DelaysMS: []int64{60_000},
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) release(t testing.TB, id uuid.UUID, attempt int32) []db.ReleaseTasksRow {
	t.Helper()
	rows, err := r.ReleaseTasks(t.Context(), db.ReleaseTasksParams{TaskIDs: []uuid.UUID{id}, Attempts: []int32{attempt}, Reasons: []string{"worker shut down"}})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) expire(t testing.TB, limit int32) []db.ExpireTasksRow {
	t.Helper()
	rows, err := r.ExpireTasks(t.Context(), db.ExpireTasksParams{MaxLost: 3, MaxRows: limit})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// T1.
func TestInsertTasks(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	now := r.now(t)
	for _, test := range []struct {
		name      string
		in        insertion
		published bool
		due       time.Duration
	}{
		{"due now", insertion{}, true, 0},
		{"nobody to publish it", insertion{unpublished: true}, false, 0},
		{"delayed", insertion{delay: time.Hour}, false, time.Hour},
		{"at a time to come", insertion{at: now.Add(time.Hour)}, false, time.Hour},
		{"at a time gone by", insertion{at: now.Add(-time.Hour)}, true, 0},
	} {
		id, _ := r.insert(t, test.in)
		got := r.get(t, id)
		if due := got.RunAt.Sub(now).Round(10 * time.Second); due != test.due {
			t.Errorf("%s: due in %v, want %v", test.name, due, test.due)
		}
		if published := got.PublishedAt != nil; published != test.published {
			t.Errorf("%s: published %t, want %t", test.name, published, test.published)
		}
		want := db.Task{
			TaskID: id, Name: "name", Status: statusPending, Payload: json.RawMessage(`{"n": 1}`), Queue: "default",
			RequestHash: []byte{1, 2, 3}, Attempts: json.RawMessage("[]"),
		}
		if diff := cmp.Diff(want, got, cmpopts.IgnoreTypes(time.Time{}, (*time.Time)(nil))); diff != "" {
			t.Errorf("%s: (-want +got):\n%s", test.name, diff)
		}
		if got.CreatedAt != got.UpdatedAt || got.CreatedAt.Location() != time.UTC {
			t.Errorf("%s: created %v, updated %v, want one time, in UTC", test.name, got.CreatedAt, got.UpdatedAt)
		}
	}
}

func TestInsertTasksByKey(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	first, ok := r.insert(t, insertion{key: "k"})
	if !ok {
		t.Fatal("first insert with a key came back empty")
	}
	if _, ok := r.insert(t, insertion{key: "k"}); ok {
		t.Error("second insert with a key made a row")
	}
	for range 2 {
		if _, ok := r.insert(t, insertion{}); !ok {
			t.Error("insert without a key came back empty")
		}
	}
	rows, err := r.TasksByKey(t.Context(), []string{"k", "other"})
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 1 || rows[0].TaskID != first || *rows[0].IdempotencyKey != "k" || !slices.Equal(rows[0].RequestHash, []byte{1, 2, 3}) {
		t.Errorf("TasksByKey = %+v, want the first task alone", rows)
	}

	// One batch may hold a key twice, beside others.
	ids := []uuid.UUID{uuid.New(), uuid.New(), uuid.New()}
	inserted, err := r.InsertTasks(t.Context(), db.InsertTasksParams{
		Publish: true, TaskIDs: ids, Names: []string{"a", "b", "c"}, Queues: []string{"x", "y", "z"}, Payloads: []string{"{}", "{}", "{}"},
		IdempotencyKeys: []string{"twice", "twice", ""}, RequestHashes: [][]byte{nil, nil, nil}, MaxRetries: []int32{0, 1, 2}, TimeoutsMS: []int64{7, 8, 0},
		Traceparents: []string{"t", "", ""}, RunsAtUS: []int64{0, 0, 0}, DelaysMS: []int64{0, 0, 0},
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []uuid.UUID
	for _, row := range inserted {
		got = append(got, row.TaskID)
	}
	if !slices.Equal(got, []uuid.UUID{ids[0], ids[2]}) {
		t.Errorf("inserted %v, want the first with the key and the one without, of %v", got, ids)
	}
	found, err := r.TasksByID(t.Context(), ids)
	if err != nil || len(found) != 2 {
		t.Errorf("TasksByID = %v, %v, want 2 rows", found, err)
	}
	if a, c := r.get(t, ids[0]), r.get(t, ids[2]); a.Queue != "x" || *a.TimeoutMS != 7 || *a.Traceparent != "t" || c.MaxRetries != 2 || c.TimeoutMS != nil || c.Traceparent != nil || c.IdempotencyKey != nil {
		t.Errorf("rows of the batch: %+v, %+v", a, c)
	}
}

// Any program may submit with SQL of its own.
func TestInsertByPlainSQL(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	if _, err := r.pool.Exec(t.Context(), `INSERT INTO tasks (name, payload) VALUES ('report', '{"month": 5}')`); err != nil {
		t.Fatal(err)
	}
	swept, err := r.SweepUnpublished(t.Context(), 10)
	if err != nil || len(swept) != 1 || swept[0].Queue != defaultQueue {
		t.Fatalf("SweepUnpublished = %v, %v, want the task in the default queue", swept, err)
	}
	got := r.claim(t, swept[0].TaskID)
	if len(got) != 1 || got[0].Name != "report" || string(got[0].Payload) != `{"month": 5}` || got[0].MaxRetries != 3 {
		t.Errorf("claim = %+v, want the task", got)
	}
}

// T2.
func TestClaimTasks(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	for _, test := range []struct {
		name  string
		sets  []string
		taken bool
	}{
		{"pending and due", nil, true},
		{"waiting for a retry that is due", []string{"retry_count = 2, attempt = 2, run_at = now()"}, true},
		{"not due", []string{"run_at = now() + interval '1 minute'"}, false},
		{"processing", []string{running}, false},
		{"processing, lease expired", []string{running, pastLease}, false},
		{"completed", []string{"status = 'completed'"}, false},
		{"failed", []string{"status = 'failed'"}, false},
		{"cancelled", []string{"status = 'cancelled'"}, false},
	} {
		id := r.task(t, test.sets...)
		before := r.get(t, id)
		got := r.claim(t, id, uuid.New())
		if taken := len(got) == 1; taken != test.taken {
			t.Errorf("claim of a task %s: %t, want %t", test.name, taken, test.taken)
		}
		if !test.taken {
			if diff := cmp.Diff(before, r.get(t, id)); diff != "" {
				t.Errorf("refused claim of a task %s changed it: %s", test.name, diff)
			}
		}
	}

	id := r.task(t, touched, "attempt = 4, retry_count = 1, timeout_ms = 9, traceparent = 'tp', idempotency_key = 'key', error_message = 'old'")
	var got []db.ClaimTasksRow
	changed := r.change(t, id, func() { got = r.claim(t, id) })
	row := r.get(t, id)
	want := []db.ClaimTasksRow{{
		TaskID: id, Name: "name", Payload: json.RawMessage(`{"n": 1}`), Queue: "default", Attempt: 5, RetryCount: 1, MaxRetries: 3,
		TimeoutMS: new(int64(9)), IdempotencyKey: new("key"), Traceparent: new("tp"),
		RunAt: row.RunAt, ClaimedAt: *row.StartedAt,
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("claim (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{
		"status": "processing", "attempt": "5", "locked_by": "me", "lease_until": "now30s", "started_at": "now0s", "updated_at": "now0s",
	}, changed); diff != "" {
		t.Errorf("claim changes (-want +got):\n%s", diff)
	}
}

// Field case 113: twenty entries of one task, two workers.
func TestClaimTasksOnce(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	id := r.task(t)
	var starters sync.WaitGroup
	var taken atomic.Int32
	for range 20 {
		starters.Go(func() { taken.Add(int32(len(r.claim(t, id)))) })
	}
	starters.Wait()
	if taken.Load() != 1 {
		t.Errorf("%d of 20 claims took the task, want 1", taken.Load())
	}
}

// Every write of an attempt but the current one, or after its end, must change nothing:
// by status alone a stalled worker could end a later attempt.
func TestFence(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	steps := map[string]func(uuid.UUID, int32) int{
		"beat":          func(id uuid.UUID, attempt int32) int { return len(r.beat(t, id, attempt)) },
		"complete":      func(id uuid.UUID, attempt int32) int { return len(r.complete(t, id, attempt, `"x"`)) },
		"fail":          func(id uuid.UUID, attempt int32) int { return len(r.fail(t, id, attempt, false)) },
		"fail for good": func(id uuid.UUID, attempt int32) int { return len(r.fail(t, id, attempt, true)) },
		"release":       func(id uuid.UUID, attempt int32) int { return len(r.release(t, id, attempt)) },
	}
	const ended = "lease_until = NULL, locked_by = NULL, status = "
	for name, step := range steps {
		for _, test := range []struct {
			name    string
			sets    []string
			attempt int32
			rows    int
		}{
			{"its own attempt", []string{running}, 2, 1},
			{"its own attempt, lease expired, not reaped", []string{running, pastLease}, 2, 1},
			{"an attempt before", []string{running}, 1, 0},
			{"an attempt to come", []string{running}, 3, 0},
			{"an attempt that waits for a retry", []string{running, ended + "'pending'"}, 2, 0},
			{"an attempt that completed", []string{running, ended + "'completed'"}, 2, 0},
			{"an attempt that failed", []string{running, ended + "'failed'"}, 2, 0},
			{"an attempt that was cancelled", []string{running, ended + "'cancelled'"}, 2, 0},
		} {
			id := r.task(t, test.sets...)
			before := r.get(t, id)
			if got := step(id, test.attempt); got != test.rows {
				t.Errorf("%s of %s: %d rows, want %d", name, test.name, got, test.rows)
			}
			if diff := cmp.Diff(before, r.get(t, id)); (diff == "") != (test.rows == 0) {
				t.Errorf("%s of %s changed: %q", name, test.name, diff)
			}
		}
	}
}

// T3.
func TestBeatTasks(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	held, revived, asked := r.task(t, running), r.task(t, running, pastLease), r.task(t, running, cancelled)
	stale := r.task(t, running)
	changed := r.change(t, revived, func() {
		rows, err := r.BeatTasks(t.Context(), db.BeatTasksParams{LeaseMS: 30_000, TaskIDs: []uuid.UUID{held, revived, asked, stale}, Attempts: []int32{2, 2, 2, 1}})
		if err != nil {
			t.Fatal(err)
		}
		got := map[uuid.UUID]bool{}
		for _, row := range rows {
			got[row.TaskID] = row.CancelRequested
		}
		if diff := cmp.Diff(map[uuid.UUID]bool{held: false, revived: false, asked: true}, got); diff != "" {
			t.Errorf("beat: cancel_requested by task (-want +got):\n%s", diff)
		}
	})
	if diff := cmp.Diff(map[string]string{"lease_until": "now30s"}, changed); diff != "" {
		t.Errorf("a heartbeat changes (-want +got):\n%s", diff)
	}
	ids, err := r.CancelRequests(t.Context(), []uuid.UUID{held, asked, r.task(t, cancelled), uuid.New()})
	if err != nil || !slices.Equal(ids, []uuid.UUID{asked}) {
		t.Errorf("CancelRequests = %v, %v, want the processing task alone", ids, err)
	}
}

// T4 to T7 and T11: what each outcome does to the columns of a running task, and what it adds to the ledger.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	ended := func(status string, more ...string) map[string]string {
		m := map[string]string{"status": status, "lease_until": "NULL", "locked_by": "NULL", "updated_at": "now0s"}
		if status != statusPending {
			m["finished_at"] = "now0s"
		}
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return m
	}
	complete := func(id uuid.UUID) { r.complete(t, id, 2, `{"ok": true}`) }
	fail := func(id uuid.UUID) { r.fail(t, id, 2, false) }
	failForGood := func(id uuid.UUID) { r.fail(t, id, 2, true) }
	release := func(id uuid.UUID) { r.release(t, id, 2) }
	expireAny := func(uuid.UUID) { r.expire(t, 10) }
	expireOne := func(id uuid.UUID) {
		if _, err := r.ExpireTasksByID(t.Context(), db.ExpireTasksByIDParams{MaxLost: 3, TaskIDs: []uuid.UUID{id}}); err != nil {
			t.Fatal(err)
		}
	}
	const spent, lostOften, lostMore, lostMsg = "retry_count = 3", "lost_count = 2", "lost_count = 3", "worker lost during attempt 2"
	type ledger struct{ Outcome, Error string }
	for _, test := range []struct {
		name  string
		sets  []string
		step  func(uuid.UUID)
		want  map[string]string
		entry ledger
	}{
		{"complete", nil, complete, ended("completed", "result", `{"ok": true}`, "error_message", "NULL"), ledger{}},
		{"complete without a result", nil, func(id uuid.UUID) { r.complete(t, id, 2, "") }, ended("completed", "error_message", "NULL"), ledger{}},
		{"complete with JSON null", nil, func(id uuid.UUID) { r.complete(t, id, 2, "null") }, ended("completed", "error_message", "NULL"), ledger{}},
		{"complete although cancelled", []string{cancelled}, complete, ended("completed", "result", `{"ok": true}`, "error_message", "NULL"), ledger{}},
		{"complete after its lease", []string{pastLease}, complete, ended("completed", "result", `{"ok": true}`, "error_message", "NULL"), ledger{}},

		{"fail", nil, fail, ended("pending", "retry_count", "2", "run_at", "now1m0s", "published_at", "NULL", "error_message", "second error"), ledger{"failed", "second error"}},
		{"fail for good", nil, failForGood, ended("failed", "error_message", "second error"), ledger{"failed", "second error"}},
		{"fail, retries spent", []string{spent}, fail, ended("failed", "error_message", "second error"), ledger{"failed", "second error"}},
		{"fail, no retries at all", []string{"retry_count = 0, max_retries = 0"}, fail, ended("failed", "error_message", "second error"), ledger{"failed", "second error"}},
		{"fail, cancelled", []string{cancelled}, fail, ended("cancelled", "error_message", "second error"), ledger{"cancelled", "second error"}},
		{"fail for good, cancelled", []string{cancelled}, failForGood, ended("failed", "error_message", "second error"), ledger{"failed", "second error"}},
		{"fail, cancelled, retries spent", []string{cancelled, spent}, fail, ended("failed", "error_message", "second error"), ledger{"failed", "second error"}},

		{"release", nil, release, ended("pending", "run_at", "now0s", "published_at", "NULL"), ledger{"interrupted", "worker shut down"}},
		{"release, retries spent", []string{spent}, release, ended("pending", "run_at", "now0s", "published_at", "NULL"), ledger{"interrupted", "worker shut down"}},
		{"release, cancelled", []string{cancelled}, release, ended("cancelled"), ledger{"cancelled", "worker shut down"}},

		{"expire", []string{pastLease}, expireAny, ended("pending", "run_at", "now0s", "published_at", "NULL", "lost_count", "1", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire, retries spent", []string{pastLease, spent}, expireAny, ended("pending", "run_at", "now0s", "published_at", "NULL", "lost_count", "1", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire, lost for the third time", []string{pastLease, lostOften}, expireAny, ended("pending", "run_at", "now0s", "published_at", "NULL", "lost_count", "3", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire, lost too often", []string{pastLease, lostMore}, expireAny, ended("failed", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire, cancelled", []string{pastLease, cancelled}, expireAny, ended("cancelled", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire, cancelled, lost too often", []string{pastLease, cancelled, lostMore}, expireAny, ended("cancelled", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire while alive", nil, expireAny, map[string]string{}, ledger{}},
		{"expire one", []string{pastLease}, expireOne, ended("pending", "run_at", "now0s", "published_at", "NULL", "lost_count", "1", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire one, lost too often", []string{pastLease, lostMore}, expireOne, ended("failed", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire one, cancelled", []string{pastLease, cancelled}, expireOne, ended("cancelled", "error_message", lostMsg), ledger{"lost", lostMsg}},
		{"expire one while alive", nil, expireOne, map[string]string{}, ledger{}},
	} {
		id := r.task(t, append([]string{running}, test.sets...)...)
		if diff := cmp.Diff(test.want, r.change(t, id, func() { test.step(id) })); diff != "" {
			t.Errorf("%s changes (-want +got):\n%s", test.name, diff)
		}
		var entries []ledger
		if err := json.Unmarshal(r.get(t, id).Attempts, &entries); err != nil {
			t.Fatal(err)
		}
		var want []ledger
		if test.entry != (ledger{}) {
			want = append(want, test.entry)
		}
		if diff := cmp.Diff(want, entries, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: ledger (-want +got):\n%s", test.name, diff)
		}
	}
}

// The outcome statements take batches: each task has its own fate.
func TestOutcomeBatches(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	a, b, stale := r.task(t, running), r.task(t, running), r.task(t, running)
	failed, err := r.FailTasks(t.Context(), db.FailTasksParams{
		TaskIDs: []uuid.UUID{a, stale, b}, Attempts: []int32{2, 1, 2}, Errors: []string{"ea", "es", "eb"}, Permanents: []bool{true, true, false}, DelaysMS: []int64{0, 0, 1000},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[uuid.UUID]db.FailTasksRow{}
	for _, row := range failed {
		got[row.TaskID] = row
	}
	if diff := cmp.Diff(map[uuid.UUID]db.FailTasksRow{
		a: {TaskID: a, Attempt: 2, Status: "failed", RetryCount: 1},
		b: {TaskID: b, Attempt: 2, Status: "pending", RetryCount: 2},
	}, got); diff != "" {
		t.Errorf("FailTasks (-want +got):\n%s", diff)
	}
	outcomes, err := r.AttemptOutcomes(t.Context(), []uuid.UUID{a, uuid.New()})
	if err != nil || len(outcomes) != 1 || outcomes[0].Attempt != 2 || outcomes[0].Status != "failed" {
		t.Errorf("AttemptOutcomes = %+v, %v, want the failed task alone", outcomes, err)
	}

	c, d := r.task(t, running), r.task(t, running)
	if _, err := r.CompleteTasks(t.Context(), db.CompleteTasksParams{TaskIDs: []uuid.UUID{c, d}, Attempts: []int32{2, 2}, Results: []string{`"c"`, `"d"`}}); err != nil {
		t.Fatal(err)
	}
	if string(r.get(t, c).Result) != `"c"` || string(r.get(t, d).Result) != `"d"` {
		t.Error("results of a batch are mixed up")
	}
}

// The ledger keeps the last 20 attempts that did not complete the task, in the form of the API.
func TestLedger(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	id := r.task(t, "max_retries = 100")
	for n := range int32(25) {
		if len(r.claim(t, id)) != 1 {
			t.Fatalf("claim %d came back empty", n)
		}
		if _, err := r.FailTasks(t.Context(), db.FailTasksParams{
			TaskIDs: []uuid.UUID{id}, Attempts: []int32{n + 1}, Errors: []string{fmt.Sprint("error ", n+1)}, Permanents: []bool{false}, DelaysMS: []int64{0},
		}); err != nil {
			t.Fatal(err)
		}
	}
	var entries []map[string]any
	if err := json.Unmarshal(r.get(t, id).Attempts, &entries); err != nil {
		t.Fatal(err)
	}
	if len(entries) != 20 {
		t.Fatalf("ledger has %d entries, want 20", len(entries))
	}
	timestamp := regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00$`)
	for i, entry := range entries {
		for _, name := range []string{"started_at", "finished_at"} {
			at, _ := entry[name].(string)
			if !timestamp.MatchString(at) {
				t.Errorf("%s = %q, want microseconds and +00:00", name, at)
			}
			if parsed, err := time.Parse(time.RFC3339Nano, at); err != nil || r.now(t).Sub(parsed).Abs() > time.Minute {
				t.Errorf("%s = %q is not now", name, at)
			}
			delete(entry, name)
		}
		want := map[string]any{"attempt": float64(i + 6), "worker": "me", "outcome": "failed", "error": fmt.Sprint("error ", i+6)}
		if diff := cmp.Diff(want, entry); diff != "" {
			t.Errorf("entry %d (-want +got):\n%s", i, diff)
		}
	}
}

// T7 takes the oldest first, a page at a time, and passes over rows that are locked.
func TestExpireTasksPages(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	var ids []uuid.UUID
	for n := range 5 {
		ids = append(ids, r.task(t, running, fmt.Sprintf("lease_until = now() - interval '%d minutes'", 10-n)))
	}
	locked := connect(t, r.pool.Config().ConnString())
	execute(t, locked, fmt.Sprintf("BEGIN; SELECT FROM tasks WHERE task_id = '%s' FOR UPDATE", ids[1]))
	for _, want := range [][]uuid.UUID{{ids[0], ids[2]}, {ids[3], ids[4]}, nil} {
		var got []uuid.UUID
		for _, row := range r.expire(t, 2) {
			got = append(got, row.TaskID)
		}
		slices.SortFunc(got, compareIDs)
		if !slices.Equal(got, want) {
			t.Errorf("page = %v, want %v", got, want)
		}
	}
	execute(t, locked, "ROLLBACK")
	if got := r.expire(t, 2); len(got) != 1 || got[0].TaskID != ids[1] || got[0].LostCount != 1 {
		t.Errorf("after the lock is gone: %+v, want the task that was locked", got)
	}
}

func compareIDs(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) }

// A reaper has found a lease expired, and waits for the row; what the worker writes
// meanwhile wins (riverqueue/river#1302).
func TestExpireTasksLosesRaces(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	for name, write := range map[string]func(*db.Queries, uuid.UUID) error{
		"beat": func(q *db.Queries, id uuid.UUID) error {
			_, err := q.BeatTasks(t.Context(), db.BeatTasksParams{LeaseMS: 30_000, TaskIDs: []uuid.UUID{id}, Attempts: []int32{2}})
			return err
		},
		"complete": func(q *db.Queries, id uuid.UUID) error {
			_, err := q.CompleteTasks(t.Context(), db.CompleteTasksParams{TaskIDs: []uuid.UUID{id}, Attempts: []int32{2}, Results: []string{"1"}})
			return err
		},
	} {
		id := r.task(t, running, pastLease)
		worker, reaper := connect(t, r.pool.Config().ConnString()), db.New(connect(t, r.pool.Config().ConnString()))
		expire := func(when string) {
			t.Helper()
			got, err := reaper.ExpireTasksByID(t.Context(), db.ExpireTasksByIDParams{MaxLost: 3, TaskIDs: []uuid.UUID{id}})
			if err != nil || len(got) != 0 {
				t.Errorf("%s its worker's %s the reaper took %d tasks, %v; want none", when, name, len(got), err)
			}
		}
		execute(t, worker, "BEGIN")
		if err := write(db.New(worker), id); err != nil {
			t.Fatal(err)
		}
		expire("during") // the row is locked: passed over, not waited for
		execute(t, worker, "COMMIT")
		expire("after")
		if got := r.get(t, id); got.LostCount != 0 || got.Attempt != 2 || got.Status == statusPending {
			t.Errorf("after %s: %+v", name, got)
		}
	}
}

// T8, first statement.
func TestSweepUnpublished(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	const unpublished = "published_at = NULL"
	oldest := r.task(t, touched, unpublished, "run_at = now() - interval '2 minutes', queue = 'q'")
	older := r.task(t, touched, unpublished, "run_at = now() - interval '1 minute'")
	for _, sets := range [][]string{
		{touched}, // published
		{touched, unpublished, "run_at = now() + interval '1 minute'"},
		{running, unpublished, pastLease},
		{unpublished, "status = 'cancelled'"},
		{unpublished, "status = 'failed'"},
	} {
		r.task(t, sets...)
	}
	sweep := func(limit int32) []db.SweepUnpublishedRow {
		rows, err := r.SweepUnpublished(t.Context(), limit)
		if err != nil {
			t.Fatal(err)
		}
		return rows
	}
	changed := r.change(t, oldest, func() {
		if diff := cmp.Diff([]db.SweepUnpublishedRow{{TaskID: oldest, Queue: "q"}}, sweep(1)); diff != "" {
			t.Errorf("first page (-want +got):\n%s", diff)
		}
	})
	if diff := cmp.Diff(map[string]string{"published_at": "now0s"}, changed); diff != "" {
		t.Errorf("the sweep changes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]db.SweepUnpublishedRow{{TaskID: older, Queue: "default"}}, sweep(10)); diff != "" {
		t.Errorf("second page (-want +got):\n%s", diff)
	}
	if rest := sweep(10); len(rest) > 0 {
		t.Errorf("third page = %v, want none", rest)
	}

	// T9.
	lost := []uuid.UUID{oldest, r.task(t, running), r.task(t, "status = 'completed'"), uuid.New()}
	changed = r.change(t, oldest, func() {
		if n, err := r.UnpublishTasks(t.Context(), lost); n != 1 || err != nil {
			t.Errorf("UnpublishTasks = %d, %v, want the pending one", n, err)
		}
	})
	if diff := cmp.Diff(map[string]string{"published_at": "NULL"}, changed); diff != "" {
		t.Errorf("unpublish changes (-want +got):\n%s", diff)
	}
	if got := sweep(10); len(got) != 1 || got[0].TaskID != oldest {
		t.Errorf("sweep after unpublish = %v, want the task", got)
	}
}

// T8, second statement.
func TestSweepPublished(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	const stale = "published_at = now() - interval '1 minute'"
	oldest := r.task(t, touched, "queue = 'b'")
	older := r.task(t, touched, stale, "queue = 'b'")
	other := r.task(t, stale, "queue = 'a'")
	for _, sets := range [][]string{
		{"queue = 'c'"},                      // fresh
		{"queue = 'd', published_at = NULL"}, // no entry at all
		{running, "queue = 'e'"},             // its entry was delivered
		{touched, "queue = 'f', status = 'failed'"},
	} {
		r.task(t, sets...)
	}
	const age = 30_000
	queues, err := r.OverdueQueues(t.Context(), age)
	if err != nil || !slices.Equal(queues, []string{"a", "b"}) {
		t.Errorf("OverdueQueues = %v, %v, want a and b", queues, err)
	}
	sweep := func(queue string, limit int32) (ids []uuid.UUID) {
		rows, err := r.SweepPublished(t.Context(), db.SweepPublishedParams{AgeMS: age, Queue: queue, MaxRows: limit})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range rows {
			if row.Queue != queue {
				t.Errorf("sweep of queue %s returned one of %s", queue, row.Queue)
			}
			ids = append(ids, row.TaskID)
		}
		return ids
	}
	changed := r.change(t, oldest, func() {
		if got := sweep("b", 1); !slices.Equal(got, []uuid.UUID{oldest}) {
			t.Errorf("first page = %v, want the oldest", got)
		}
	})
	if diff := cmp.Diff(map[string]string{"published_at": "now0s"}, changed); diff != "" {
		t.Errorf("the sweep changes (-want +got):\n%s", diff)
	}
	for _, step := range []struct {
		queue string
		want  []uuid.UUID
	}{{"b", []uuid.UUID{older}}, {"b", nil}, {"a", []uuid.UUID{other}}, {"a", nil}, {"c", nil}, {"d", nil}, {"e", nil}, {"f", nil}} {
		if got := sweep(step.queue, 10); !slices.Equal(got, step.want) {
			t.Errorf("sweep of %s = %v, want %v", step.queue, got, step.want)
		}
	}
	if queues, err := r.OverdueQueues(t.Context(), age); err != nil || len(queues) > 0 {
		t.Errorf("OverdueQueues after the sweep = %v, %v, want none", queues, err)
	}
}

// Two dispatchers at once publish a task once.
func TestSweepsShareWork(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	for range 60 {
		r.task(t, "published_at = NULL")
	}
	var mu sync.Mutex
	times := map[uuid.UUID]int{}
	var sweepers sync.WaitGroup
	for range 4 {
		sweepers.Go(func() {
			for {
				rows, err := r.SweepUnpublished(t.Context(), 7)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				for _, row := range rows {
					times[row.TaskID]++
				}
				done := len(times) == 60 || err != nil
				mu.Unlock()
				if done {
					return
				}
			}
		})
	}
	sweepers.Wait()
	for id, n := range times {
		if n != 1 {
			t.Errorf("%s was published %d times", id, n)
		}
	}
}

// Work goes on without the stream.
func TestClaimDueTasks(t *testing.T) {
	t.Parallel()
	r := newRecord(t)
	claim := func(limit int32, queues ...string) (ids []uuid.UUID) {
		rows, err := r.ClaimDueTasks(t.Context(), db.ClaimDueTasksParams{LeaseMS: 30_000, Worker: "me", Queues: queues, MaxRows: limit})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range rows {
			if got := r.get(t, row.TaskID); got.Status != statusProcessing || got.Attempt != row.Attempt || *got.LockedBy != "me" || got.LeaseUntil == nil || got.StartedAt == nil {
				t.Errorf("claimed task: %+v", got)
			}
			ids = append(ids, row.TaskID)
		}
		slices.SortFunc(ids, compareIDs)
		return ids
	}
	retry := r.task(t, "published_at = NULL, run_at = now() - interval '1 minute', attempt = 3, retry_count = 1")
	first := r.task(t, "published_at = now() - interval '3 minutes'")
	second := r.task(t, "published_at = now() - interval '2 minutes', queue = 'other'")
	foreign := r.task(t, "queue = 'foreign'")
	for _, set := range []string{
		"published_at = NULL, run_at = now() + interval '1 minute'", "run_at = now() + interval '1 minute'",
		running, "status = 'completed'", "status = 'failed', published_at = NULL",
	} {
		r.task(t, set)
	}
	for _, step := range []struct {
		limit  int32
		queues []string
		want   []uuid.UUID
	}{
		{1, []string{"default", "other"}, []uuid.UUID{retry}},
		{1, []string{"default", "other"}, []uuid.UUID{first}},
		{9, []string{"default", "other"}, []uuid.UUID{second}},
		{9, []string{"default", "other"}, nil},
		{9, nil, nil},
		{9, []string{"foreign"}, []uuid.UUID{foreign}},
	} {
		if got := claim(step.limit, step.queues...); !slices.Equal(got, step.want) {
			t.Errorf("claim of %d from %v = %v, want %v", step.limit, step.queues, got, step.want)
		}
	}

	var ids []uuid.UUID
	for n := range 60 {
		ids = append(ids, r.task(t, []string{"published_at = NULL", "published_at = now()"}[n%2]))
	}
	var mu sync.Mutex
	var got []uuid.UUID
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for {
				page := claim(7, "default")
				if len(page) == 0 {
					return
				}
				mu.Lock()
				got = append(got, page...)
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	slices.SortFunc(got, compareIDs)
	slices.SortFunc(ids, compareIDs)
	if rest := claim(60, "default"); len(rest) > 0 || !slices.Equal(got, ids) {
		t.Errorf("4 workers claimed %d of %d tasks, %d were left over", len(got), len(ids), len(rest))
	}
}
