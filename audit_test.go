//go:build linux

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
)

// audit is the witness of every transition: what the service itself says is not evidence.
// Heartbeats and publications of live rows are left out; any change of an ended row is not.
const audit = `
CREATE TABLE audit (
	seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	at timestamptz NOT NULL DEFAULT clock_timestamp(),
	task_id uuid NOT NULL,
	was text NOT NULL, "is" text NOT NULL,
	attempt_was int NOT NULL, attempt_is int NOT NULL,
	retry_was int NOT NULL, retry_is int NOT NULL,
	lost_was int NOT NULL, lost_is int NOT NULL
);
CREATE FUNCTION note_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF OLD.status IN ('completed', 'failed', 'cancelled')
		OR (OLD.status, OLD.attempt, OLD.retry_count, OLD.lost_count, OLD.result, OLD.error_message, OLD.run_at, OLD.updated_at)
		IS DISTINCT FROM (NEW.status, NEW.attempt, NEW.retry_count, NEW.lost_count, NEW.result, NEW.error_message, NEW.run_at, NEW.updated_at)
	THEN
		INSERT INTO audit (task_id, was, "is", attempt_was, attempt_is, retry_was, retry_is, lost_was, lost_is)
		VALUES (NEW.task_id, OLD.status, NEW.status, OLD.attempt, NEW.attempt, OLD.retry_count, NEW.retry_count, OLD.lost_count, NEW.lost_count);
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION note_transition();
CREATE FUNCTION note_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO audit (task_id, was, "is", attempt_was, attempt_is, retry_was, retry_is, lost_was, lost_is)
	VALUES (OLD.task_id, OLD.status, 'deleted', 0, 0, 0, 0, 0, 0);
	RETURN NULL;
END $$;
CREATE TRIGGER audit_deletion AFTER DELETE ON tasks FOR EACH ROW EXECUTE FUNCTION note_deletion();`

func (b *bed) installAudit() {
	b.t.Helper()
	b.exec(audit)
}

// quiet is how long nothing may happen once the faults are off and all tasks have ended.
const quiet = 10 * time.Second

// check is the common check CC: no promise was broken and the system is at rest. Faults
// must be off.
func (b *bed) check() {
	b.t.Helper()
	b.settle(120 * time.Second)
	rows := b.number("SELECT count(*) FROM audit")
	runs := b.probe.count()
	b.during(quiet, "nothing happens after all tasks have ended", func() bool { return b.probe.count() == runs })
	if now := b.number("SELECT count(*) FROM audit"); now != rows {
		b.t.Errorf("%d rows changed after all tasks had ended", now-rows)
	}
	b.checkPromises()
	b.checkTransitions()
	b.checkRuns()
	b.checkRest()
}

// settle waits until every task has ended and the stream is empty.
func (b *bed) settle(limit time.Duration) {
	b.t.Helper()
	b.within(limit, "all tasks ended", func() bool {
		return b.number("SELECT count(*) FROM tasks WHERE status IN ('pending', 'processing')") == 0
	}, b.openTasks)
	b.within(limit, "the stream is empty", func() bool { return b.entries() == 0 && b.pending() == 0 },
		func() any { return fmt.Sprintf("XLEN %d, pending %d", b.entries(), b.pending()) })
}

func (b *bed) openTasks() any {
	var text string
	b.query(&text, `SELECT COALESCE(string_agg(concat_ws(' ', task_id, status, 'attempt', attempt, 'retry', retry_count, 'lost', lost_count,
			'due', run_at - now(), 'published', published_at - now(), 'lease', lease_until - now(), locked_by, error_message), E'\n'), '')
		FROM (SELECT * FROM tasks WHERE status IN ('pending', 'processing') ORDER BY task_id LIMIT 10) t`)
	return text
}

// entries is the length of the stream.
func (b *bed) entries() int64 {
	n, err := b.redis.XLen(b.t.Context(), "tasks").Result()
	if err != nil {
		return -1
	}
	return n
}

// pending is how many entries were delivered and not acknowledged.
func (b *bed) pending() int64 {
	p, err := b.redis.XPending(b.t.Context(), "tasks", "workers").Result()
	if err != nil {
		return -1
	}
	return p.Count
}

// checkPromises: every id that got a 2xx has a row, and every row has ended.
func (b *bed) checkPromises() {
	b.t.Helper()
	b.mu.Lock()
	ids := make([]uuid.UUID, 0, len(b.accepted))
	for id := range b.accepted {
		ids = append(ids, id)
	}
	b.mu.Unlock()
	if n := b.number("SELECT count(*) FROM tasks WHERE task_id = ANY($1)", ids); n != len(ids) {
		b.t.Errorf("%d accepted tasks have %d rows", len(ids), n)
	}
	if n := b.number("SELECT count(*) FROM tasks WHERE status NOT IN ('completed', 'failed', 'cancelled')"); n != 0 {
		b.t.Errorf("%d tasks have not ended", n)
	}
}

// checkTransitions: the audit shows one end for each task and no change after it; an
// attempt begins with a claim and only there.
func (b *bed) checkTransitions() {
	b.t.Helper()
	for what, where := range map[string]string{
		"a change after the end":              `was IN ('completed', 'failed', 'cancelled')`,
		"a deletion":                          `"is" = 'deleted'`,
		"a claim that is not one attempt":     `"is" = 'processing' AND was = 'pending' AND attempt_is <> attempt_was + 1`,
		"an attempt that no claim began":      `NOT ("is" = 'processing' AND was = 'pending') AND attempt_is <> attempt_was`,
		"a row taken from somebody by claim":  `"is" = 'processing' AND was <> 'pending'`,
		"an end that nobody worked for":       `"is" IN ('completed', 'failed') AND was <> 'processing'`,
		"a budget that went down or by leaps": `retry_is NOT IN (retry_was, retry_was + 1) OR lost_is NOT IN (lost_was, lost_was + 1)`,
		"two budgets spent at once":           `retry_is > retry_was AND lost_is > lost_was`,
	} {
		if n := b.number("SELECT count(*) FROM audit WHERE " + where); n != 0 {
			b.t.Errorf("audit: %s, %d times", what, n)
		}
	}
	if n := b.number(`SELECT count(*) FROM (
			SELECT t.task_id FROM tasks t LEFT JOIN audit a ON a.task_id = t.task_id AND a."is" IN ('completed', 'failed', 'cancelled')
			GROUP BY t.task_id HAVING count(a.seq) <> 1) x`); n != 0 {
		b.t.Errorf("audit: %d tasks did not end exactly once", n)
	}
}

// checkRuns: what the probe saw agrees with the rows. No attempt ran twice; runs are within
// the budget; two runs overlap only when the first one's process was dead, stopped or cut off; and
// what was stored is the answer to the attempt that holds the row.
func (b *bed) checkRuns() {
	b.t.Helper()
	type limits struct {
		attempt, retries, released int
		status, result             string
	}
	rows, err := b.db.Query(b.t.Context(), `SELECT t.task_id, t.attempt, t.max_retries, t.status, COALESCE(t.result->>'attempt', ''),
			(SELECT count(*) FROM audit a WHERE a.task_id = t.task_id AND a.was = 'processing' AND a."is" = 'pending'
				AND a.retry_is = a.retry_was AND a.lost_is = a.lost_was)
		FROM tasks t`)
	if err != nil {
		b.t.Fatal(err)
	}
	defer rows.Close()
	tasks := make(map[uuid.UUID]limits)
	for rows.Next() {
		var id uuid.UUID
		var l limits
		if err := rows.Scan(&id, &l.attempt, &l.retries, &l.status, &l.result, &l.released); err != nil {
			b.t.Fatal(err)
		}
		tasks[id] = l
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
	runs := make(map[uuid.UUID][]*probeRun)
	for _, r := range b.probe.all() {
		runs[r.task] = append(runs[r.task], r)
	}
	for id, all := range runs {
		l, ok := tasks[id]
		if !ok {
			b.t.Errorf("task %s ran and has no row", id)
			continue
		}
		if most := 1 + l.retries + faultMaxLost + l.released; len(all) > most {
			b.t.Errorf("task %s ran %d times, more than %d", id, len(all), most)
		}
		slices.SortFunc(all, func(x, y *probeRun) int { return x.began.Compare(y.began) })
		for i, r := range all {
			if r.attempt > l.attempt {
				b.t.Errorf("task %s ran as attempt %d, its row has %d", id, r.attempt, l.attempt)
			}
			if i == 0 {
				continue
			}
			if all[i-1].attempt >= r.attempt {
				b.t.Errorf("task %s ran as attempt %d after attempt %d", id, r.attempt, all[i-1].attempt)
			}
			b.checkOverlap(all[i-1], r)
		}
	}
	for id, l := range tasks {
		if l.status == statusCompleted && l.result != "" && l.result != fmt.Sprint(l.attempt) {
			b.t.Errorf("task %s holds the result of attempt %s under attempt %d", id, l.result, l.attempt)
		}
	}
}

func (b *bed) checkOverlap(first, second *probeRun) {
	b.t.Helper()
	end := b.probe.endOf(first)
	if !second.began.Before(end) {
		return
	}
	for _, m := range b.members {
		if m.name == first.member && m.wasDisturbed(first.began, end) {
			return
		}
	}
	b.t.Errorf("task %s: attempt %d on %s began %v before attempt %d on %s ended, and nothing was wrong there",
		first.task, second.attempt, second.member, end.Sub(second.began), first.attempt, first.member)
}

// checkRest: the stream is empty, all processes live and are ready, and none of them
// reported a race, a panic or something that is no log line.
func (b *bed) checkRest() {
	b.t.Helper()
	if n := b.entries(); n != 0 {
		b.t.Errorf("XLEN = %d at rest", n)
	}
	if n := b.pending(); n != 0 {
		b.t.Errorf("%d entries pending at rest", n)
	}
	for _, m := range b.members {
		if m.alive() {
			if code, body := m.get("/readyz"); code != http.StatusOK || !strings.Contains(body, `"status":"ok"`) {
				b.t.Errorf("%s is not ready at rest: %d %s", m.name, code, body)
			}
		}
		b.checkLog(m)
	}
}

func (b *bed) checkLog(m *instance) {
	b.t.Helper()
	if text := m.log.stderr.String(); text != "" {
		b.t.Errorf("%s wrote to standard error: %s", m.name, text)
	}
	for _, line := range m.log.allLines() {
		if !json.Valid([]byte(line)) && line != "" {
			b.t.Errorf("%s logged a line that is not JSON: %q", m.name, line)
			return
		}
	}
	if n := m.log.count("handler panicked"); n != 0 {
		b.t.Errorf("%s logged a panic", m.name)
	}
}

// redisDo runs a command past the links.
func (b *bed) redisDo(args ...any) any {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 10*time.Second)
	defer cancel()
	v, err := b.redis.Do(ctx, args...).Result()
	if err != nil {
		b.t.Fatalf("redis %v: %v", args, err)
	}
	return v
}

// query is a query past the links whose one value is read into dest.
func (b *bed) query(dest any, sql string, args ...any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	if err := b.db.QueryRow(ctx, sql, args...).Scan(dest); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

func (b *bed) exec(sql string, args ...any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	if _, err := b.db.Exec(ctx, sql, args...); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

// number returns the one number that a query yields.
func (b *bed) number(sql string, args ...any) int {
	b.t.Helper()
	var n int
	b.query(&n, sql, args...)
	return n
}

// A rowState is what tests look at in a row.
type rowState struct {
	Status               string
	Attempt, Retry, Lost int
	Result, Error        string
}

func (b *bed) row(id uuid.UUID) rowState {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
	defer cancel()
	var r rowState
	err := b.db.QueryRow(ctx, `SELECT status, attempt, retry_count, lost_count, COALESCE(result::text, ''), COALESCE(error_message, '')
		FROM tasks WHERE task_id = $1`, id).Scan(&r.Status, &r.Attempt, &r.Retry, &r.Lost, &r.Result, &r.Error)
	if err != nil {
		b.t.Fatalf("read row %s: %v", id, err)
	}
	return r
}

// countOf returns how many of the tasks have a status.
func (b *bed) countOf(ids []uuid.UUID, status string) int {
	b.t.Helper()
	return b.number("SELECT count(*) FROM tasks WHERE task_id = ANY($1) AND status = $2", ids, status)
}

// allAre reports whether all the tasks have a status.
func (b *bed) allAre(ids []uuid.UUID, status string) func() bool {
	return func() bool { return b.countOf(ids, status) == len(ids) }
}

// insert submits tasks by SQL, as any program may.
func (b *bed) insert(n int, payload string) []uuid.UUID {
	b.t.Helper()
	rows, err := b.db.Query(b.t.Context(), "INSERT INTO tasks (name, payload) SELECT 'probe', $2::text::jsonb FROM generate_series(1, $1) RETURNING task_id", n, payload)
	if err != nil {
		b.t.Fatal(err)
	}
	defer rows.Close()
	var ids []uuid.UUID
	for rows.Next() {
		var id uuid.UUID
		if err := rows.Scan(&id); err != nil {
			b.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		b.t.Fatal(err)
	}
	return ids
}
