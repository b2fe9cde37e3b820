package main

import (
	"testing"
	"time"

	"nexusflow/db"
)

// Old ended tasks go, page by page, and take their keys along; everything else stays.
func TestRetention(t *testing.T) {
	t.Parallel()
	p := testPools(t)
	for _, insert := range []string{
		// More than a page of each, so that the walk has to go on from where it was.
		`INSERT INTO tasks (name, status, finished_at, idempotency_key) SELECT 'old', 'completed', now() - interval '31 days', 'k' || n FROM generate_series(1, 2500) n`,
		`INSERT INTO tasks (name, status, finished_at) SELECT 'old', 'failed', now() - interval '31 days' FROM generate_series(1, 10)`,
		`INSERT INTO tasks (name, status, finished_at) SELECT 'old', 'cancelled', now() - interval '31 days' FROM generate_series(1, 10)`,
		`INSERT INTO tasks (name, status, finished_at) SELECT 'young', 'completed', now() - interval '29 days' FROM generate_series(1, 2500)`,
		`INSERT INTO tasks (name, created_at, run_at) SELECT 'waiting', now() - interval '90 days', now() - interval '90 days' FROM generate_series(1, 10)`,
		`INSERT INTO tasks (name, status, lease_until, started_at) SELECT 'running', 'processing', now(), now() - interval '90 days' FROM generate_series(1, 10)`,
	} {
		if _, err := p.api.Exec(t.Context(), insert); err != nil {
			t.Fatal(err)
		}
	}
	// A row that somebody holds is left for the next walk.
	held, err := connect(t, p.api.Config().ConnString()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(t.Context())
	if _, err := held.Exec(t.Context(), "SELECT FROM tasks WHERE idempotency_key = 'k7' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	r := &retention{log: testLog(t), keep: 30 * 24 * time.Hour, queries: db.New(p.work)}
	walk := func(want int) {
		t.Helper()
		if n, err := r.walk(t.Context()); n != want || err != nil {
			t.Errorf("walk = %d, %v, want %d", n, err, want)
		}
	}
	walk(2519)
	if err := held.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	walk(1)
	walk(0)
	var left int
	if err := p.api.QueryRow(t.Context(), "SELECT count(*) FROM tasks WHERE name <> 'old'").Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left != 2520 {
		t.Errorf("%d tasks left, want 2520", left)
	}
	if _, err := p.api.Exec(t.Context(), "INSERT INTO tasks (name, idempotency_key) VALUES ('new', 'k1')"); err != nil {
		t.Errorf("key of a deleted task is not free: %v", err)
	}
}
