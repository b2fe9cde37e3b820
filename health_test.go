package main

import (
	"context"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
)

func TestHealth(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} })
	for _, path := range []string{"/health", "/healthz", "/livez"} {
		golden(t, "health.txt", transcript(g.do(t, "GET", path, "")))
	}
	golden(t, "ready.txt", transcript(g.do(t, "GET", "/readyz", "")))
	g.up.Store(false)
	golden(t, "ready_degraded.txt", transcript(g.do(t, "GET", "/readyz", "")))
	g.server.drain()
	golden(t, "ready_draining.txt", transcript(g.do(t, "GET", "/readyz", "")))
	if a := g.do(t, "GET", "/livez", ""); a.status != 200 {
		t.Errorf("livez while draining = %d, want 200", a.status)
	}
}

func TestReadyWithoutSchema(t *testing.T) {
	t.Parallel()
	g := startGateway(t, emptyDatabase(t), nil)
	golden(t, "ready_unavailable.txt", transcript(g.do(t, "GET", "/readyz", "")))
	if a := g.post(t, `{"name":"a"}`); a.status != 503 {
		t.Errorf("POST without a schema = %d, want 503", a.status)
	}
}

// Probes answer within their limit and share one connection also when PostgreSQL takes
// connections and never answers, as a stopped process does.
func TestReadyWhenFrozen(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	var accepted atomic.Int32
	go func() {
		for {
			conn, err := silent.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			t.Cleanup(func() { conn.Close() })
		}
	}()
	var lines lineLog
	g := startGatewayLog(t, "postgres://nobody@"+silent.Addr().String()+"/none?sslmode=disable", nil, lines.logger())
	var wg sync.WaitGroup
	start := time.Now()
	for range 20 {
		wg.Go(func() {
			a, err := g.try(t.Context(), "GET", "/readyz", nil)
			if err != nil || a.status != 503 || a.str("status") != "unavailable" {
				t.Errorf("readyz = %d %s, %v", a.status, a.body, err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("20 probes took %v, want at most 3 s", took)
	}
	// Three more are the lease pool's, which it opens by itself.
	if n := accepted.Load(); n > 3+3 {
		t.Errorf("20 probes made %d connections, want at most 6", n)
	}
	if a := g.do(t, "GET", "/health", ""); a.status != 200 {
		t.Errorf("health = %d, want 200", a.status)
	}
	for _, method := range []string{"GET", "POST"} {
		for range 10 {
			wg.Go(func() {
				path, body := "/tasks/"+uuid.NewString(), ""
				if method == "POST" {
					path, body = "/tasks", `{"name":"a"}`
				}
				begin := time.Now()
				a, err := g.try(t.Context(), method, path, strings.NewReader(body), "Content-Type", "application/json")
				if err != nil || a.status != 503 || time.Since(begin) > 10*time.Second {
					t.Errorf("%s = %d %s, %v after %v, want 503 within 10 s", method, a.status, a.body, err, time.Since(begin))
				}
			})
		}
	}
	wg.Wait()
	if n := lines.count("postgres does not serve"); n != 1 {
		t.Errorf("%d lines say that PostgreSQL is away, want 1", n)
	}
}

// PostgreSQL stopped: 503 at once, nothing else, and service as before when it is back.
func TestPostgresStopped(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	var lines lineLog
	g := startGatewayLog(t, pg.createDatabase(t, "gateway"), nil, lines.logger())
	id := g.submitted(t, `{"name":"a"}`)
	pg.stop()
	for i := range 20 {
		start := time.Now()
		a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k")
		b := g.do(t, "GET", "/tasks/"+id, "")
		if a.status != 503 || b.status != 503 || a.header.Get("Retry-After") != "1" || b.header.Get("Retry-After") != "1" {
			t.Fatalf("POST %d %s, GET %d %s: want 503", a.status, a.body, b.status, b.body)
		}
		if l := g.do(t, "GET", "/tasks", ""); l.status != 503 || l.header.Get("Retry-After") != "1" {
			t.Fatalf("GET /tasks = %d %s, want 503", l.status, l.body)
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("request %d took %v, want less than 1 s", i, took)
		}
	}
	eventually(t, "readyz says unavailable", func() bool { return g.do(t, "GET", "/readyz", "").status == 503 })
	if err := pg.start(); err != nil {
		t.Fatal(err)
	}
	if a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k"); a.status != 202 {
		t.Errorf("POST after the restart = %d %s, want 202", a.status, a.body)
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET after the restart = %d %s, want 200", a.status, a.body)
	}
	eventually(t, "readyz says ok", func() bool { return g.do(t, "GET", "/readyz", "").status == 200 })
	if away, back := lines.count("postgres does not serve"), lines.count("postgres is back"); away != 1 || back != 1 {
		t.Errorf("%d lines say that PostgreSQL went and %d that it is back, want one of each", away, back)
	}
}

// A restart leaves every pooled connection dead. Nobody is to see that.
func TestPostgresRestarted(t *testing.T) {
	t.Parallel()
	pg := startPostgresServer(t)
	g := startGateway(t, pg.createDatabase(t, "gateway"), nil)
	id := g.submitted(t, `{"name":"a"}`)
	warm := func() {
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if a, err := g.try(t.Context(), "GET", "/tasks/"+id, nil); err != nil || a.status != 200 {
					t.Errorf("GET = %d %s, %v, want 200", a.status, a.body, err)
				}
			})
			wg.Go(func() {
				a, err := g.try(t.Context(), "POST", "/tasks", strings.NewReader(`{"name":"a"}`), "Content-Type", "application/json")
				if err != nil || a.status != 202 {
					t.Errorf("POST = %d %s, %v, want 202", a.status, a.body, err)
				}
			})
		}
		wg.Wait()
	}
	warm()
	for range 3 {
		pg.restart(t)
		warm()
	}
	if n := g.number(t, "SELECT count(*) FROM tasks"); n != 81 {
		t.Errorf("%d rows, want 81", n)
	}
}

// Field case 127.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	const terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
	g.exec(t, "DO $$ BEGIN EXECUTE 'ALTER DATABASE ' || current_database() || ' SET default_transaction_read_only = on'; END $$")
	g.number(t, terminate)
	for range 5 {
		if a := g.post(t, `{"name":"a"}`, "Idempotency-Key", "k"); a.status != 503 || a.header.Get("Retry-After") == "" {
			t.Fatalf("POST to a read-only database = %d %s, want 503", a.status, a.body)
		}
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET from a read-only database = %d %s, want 200", a.status, a.body)
	}
	for range 3 { // after a read that worked
		time.Sleep(probeAge)
		if a := g.do(t, "GET", "/readyz", ""); a.status != 503 || !strings.Contains(string(a.body), `"postgres":"down"`) {
			t.Errorf("ready with a read-only database: %d %s", a.status, a.body)
		}
		if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 || !g.server.intake.away.Load() {
			t.Errorf("GET = %d %s; away %v, want 200 and still away", a.status, a.body, g.server.intake.away.Load())
		}
	}
	writable := &gateway{dsn: g.dsn + "&default_transaction_read_only=off"}
	writable.exec(t, "DO $$ BEGIN EXECUTE 'ALTER DATABASE ' || current_database() || ' RESET default_transaction_read_only'; END $$")
	g.number(t, terminate)
	eventually(t, "a read finds that writes work", func() bool { return g.do(t, "GET", "/tasks/"+id, "").status == 200 && !g.server.intake.away.Load() })
	eventually(t, "POST is accepted again", func() bool { return g.post(t, `{"name":"a"}`, "Idempotency-Key", "k").status == 202 })
	eventually(t, "ready again", func() bool { return g.do(t, "GET", "/readyz", "").status == 200 })
}

// Field case 51: somebody holds the whole table.
func TestTableLocked(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	ctx := context.WithoutCancel(t.Context())
	rival, err := connect(t, g.dsn).Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rival.Exec(ctx, "LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			a, err := g.try(ctx, "POST", "/tasks", strings.NewReader(`{"name":"a"}`), "Content-Type", "application/json")
			if err != nil || a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("POST = %d %s, %v, want 503", a.status, a.body, err)
			}
		})
	}
	for range 10 {
		wg.Go(func() {
			a, err := g.try(ctx, "GET", "/tasks/"+id, nil)
			if err != nil || a.status != 503 || a.header.Get("Retry-After") == "" {
				t.Errorf("GET = %d %s, %v, want 503", a.status, a.body, err)
			}
		})
	}
	wg.Wait()
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the last answer came after %v, want at most 10 s", took)
	}
	if err := rival.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	if a := g.post(t, `{"name":"a"}`); a.status != 202 {
		t.Errorf("POST afterwards = %d %s, want 202", a.status, a.body)
	}
	if a := g.do(t, "GET", "/tasks/"+id, ""); a.status != 200 {
		t.Errorf("GET afterwards = %d %s, want 200", a.status, a.body)
	}
	if took := time.Since(back); took > 2*time.Second {
		t.Errorf("service was back after %v, want at most 2 s", took)
	}
	eventually(t, "nothing waits beside the batches", func() bool { return g.server.intake.waiting.Load() == 0 })
}

// Field case 53: the modes of poolers that keep no prepared statements.
func TestExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			g := startGateway(t, newDatabase(t)+"&default_query_exec_mode="+mode, func(c *config) { c.MaxBacklogAge = time.Hour })
			const body = `{"name":"it's \"a\"","payload":{"q":"'\\\"ü😀","n":[1.00,{}]}}`
			id := g.submitted(t, body, "Idempotency-Key", "k")
			if a := g.post(t, body, "Idempotency-Key", "k"); a.status != 200 || a.str("task_id") != id {
				t.Errorf("replay = %d %s, want 200", a.status, a.body)
			}
			if a := g.do(t, "GET", "/tasks/"+id, ""); a.str("payload") != `{"n":[1.00,{}],"q":"'\\\"ü😀"}` || a.str("name") != `it's "a"` {
				t.Errorf("GET = %d %s", a.status, a.body)
			}
			if a := g.do(t, "GET", "/readyz", ""); a.status != 200 {
				t.Errorf("readyz = %d %s, want 200", a.status, a.body)
			}
		})
	}
}
