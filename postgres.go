package main

import (
	"context"
	"embed"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:generate go tool -modfile=tools/go.mod sqlc generate

//go:embed migrations/*.sql
var migrationFiles embed.FS

const (
	// statementTimeout is the longest a statement of the service may run, and so also how
	// long one whose caller gave up may still take effect.
	statementTimeout = 5 * time.Second

	// planAge is how long a plan is used, as long as its connection is.
	planAge = time.Second

	// connectTimeout bounds one attempt to connect, unless connect_timeout is given.
	connectTimeout = 5 * time.Second
)

// pools are the connections of one process to its record. They are several because
// each kind of work has its own patience with locks, and because neither requests nor
// a backlog may take the connections that keep leases alive.
type pools struct {
	api    *pgxpool.Pool // reads and single inserts of the gateway; waits for locks
	submit *pgxpool.Pool // the group commit, which gives up a lock after 100 ms
	work   *pgxpool.Pool // claim, sweep, unpublish
	lease  *pgxpool.Pool // heartbeat, outcome, reaper: connections kept open
}

// openPools prepares the pools for the database that dsn names, as a URL or as
// "host=... dbname=..."; what dsn leaves out comes from the PG* variables. It asks the
// server nothing: an error means that dsn is malformed, and never shows the password.
// lease is how long a claim lasts; waiting for a lock may cost a tenth of it.
//
// Callers bound each statement with their context, for statement_timeout is of no use
// when the network swallows the answer. The limits travel as start-up parameters, which
// a dsn may set to other values; PgBouncer refuses those that it is not told to
// ignore (ignore_startup_parameters).
func openPools(ctx context.Context, dsn string, lease time.Duration) (*pools, error) {
	patience := min(2*time.Second, lease/10)
	var p pools
	for _, kind := range []struct {
		pool        **pgxpool.Pool
		conns       int32
		keep        int32
		lockTimeout time.Duration
		byIndex     bool
	}{
		{pool: &p.api, conns: 8},
		{pool: &p.submit, conns: 2, lockTimeout: 100 * time.Millisecond, byIndex: true},
		{pool: &p.work, conns: 4, lockTimeout: patience, byIndex: true},
		{pool: &p.lease, conns: 3, keep: 3, lockTimeout: patience, byIndex: true},
	} {
		c, sized, err := poolConfig(dsn)
		if err != nil {
			p.close()
			return nil, err
		}
		if !sized || kind.pool != &p.api {
			c.MaxConns = kind.conns
		}
		c.MinConns = kind.keep
		params := c.ConnConfig.RuntimeParams
		if kind.lockTimeout > 0 {
			setDefault(params, "lock_timeout", milliseconds(kind.lockTimeout))
		}
		if kind.pool == &p.api {
			// Lists are read in the order of their index, as far as a page goes. Many names make the
			// planner believe that each has few tasks, which it would all collect and sort.
			setDefault(params, "enable_bitmapscan", "off")
		}
		if kind.byIndex {
			// While the statistics of a young table lag behind, the planner would join a
			// batch of ids to it by reading the whole table.
			setDefault(params, "enable_seqscan", "off")
			// One plan serves batches of all sizes. The server would believe that one made for a
			// single id is cheaper, and so plan again and again, for longer than it then runs.
			setDefault(params, "plan_cache_mode", "force_generic_plan")
			c.AfterRelease = forgetPlans
		}
		*kind.pool, err = pgxpool.NewWithConfig(ctx, c)
		if err != nil {
			p.close()
			return nil, fmt.Errorf("open pool: %w", err)
		}
	}
	return &p, nil
}

// close waits until every connection is given back, then closes them all.
func (p *pools) close() {
	for _, pool := range []*pgxpool.Pool{p.api, p.submit, p.work, p.lease} {
		if pool != nil {
			pool.Close()
		}
	}
}

// poolConfig reads dsn and reports whether it sizes the pool (pool_max_conns).
func poolConfig(dsn string) (c *pgxpool.Config, sized bool, err error) {
	// Once it has passed this check pgx reads it too; what pgx says could quote it.
	if err := checkDatabaseURL(dsn); err != nil {
		return nil, false, fmt.Errorf("read database URL: %w", err)
	}
	one, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, false, err
	}
	_, sized = one.RuntimeParams["pool_max_conns"]
	c, err = pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, false, err
	}
	if c.ConnConfig.ConnectTimeout == 0 {
		// Several hosts share the time, so that a dead first one does not use it up.
		hosts := map[string]bool{one.Host: true}
		for _, f := range one.Fallbacks {
			hosts[f.Host] = true
		}
		c.ConnConfig.ConnectTimeout = max(connectTimeout/time.Duration(len(hosts)), time.Second)
	}
	if c.PingTimeout == 0 {
		// An idle connection that a firewall forgot costs its next user one second, not the
		// whole of the deadline.
		c.PingTimeout = time.Second
	}
	params := c.ConnConfig.RuntimeParams
	setDefault(params, "application_name", "nexusflow")
	setDefault(params, "timezone", "UTC")
	// The planner takes a statement that must not read a table whole for a dear one, and
	// compiling it takes longer than running it a thousand times.
	setDefault(params, "jit", "off")
	setDefault(params, "statement_timeout", milliseconds(statementTimeout))
	setDefault(params, "idle_in_transaction_session_timeout", milliseconds(statementTimeout))
	c.AfterConnect = registerTypes
	closeFatal := c.ConnConfig.OnPgError
	c.ConnConfig.OnPgError = func(conn *pgconn.PgConn, e *pgconn.PgError) bool {
		// Two errors tell that the connection is of no more use: the server is read-only,
		// since a failover perhaps, or a prepared statement is stale. The pool makes a new
		// one, which finds the new primary.
		return closeFatal(conn, e) && e.Code != readOnly && e.Code != stalePlan
	}
	return c, sized, nil
}

// forgetPlans has the plans of an idle connection made anew, once in planAge. PostgreSQL plans for
// the size that a table has at the moment, but keeps the plan while it grows, until
// autovacuum has looked at it: one for a few rows reads all of them instead of looking up
// those it is given. Nobody waits for this; a connection that fails is replaced.
func forgetPlans(conn *pgx.Conn) bool {
	const key = "plans made"
	data := conn.PgConn().CustomData()
	made, known := data[key].(time.Time)
	if known && time.Since(made) < planAge {
		return true
	}
	data[key] = time.Now()
	if !known {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), planAge)
	defer cancel()
	_, err := conn.Exec(ctx, "DISCARD PLANS")
	return err == nil
}

func setDefault(params map[string]string, name, value string) {
	if _, given := params[name]; !given {
		params[name] = value
	}
}

func milliseconds(d time.Duration) string {
	return strconv.FormatInt(d.Milliseconds(), 10)
}

// waitForPostgres returns when the database answers. It tries attempts times, delay
// apart, and logs each refusal with its number: a server that is still starting, a
// wrong password and an unknown database alike, since all of them may be put right
// meanwhile. The end of ctx ends the wait with its cause.
func waitForPostgres(ctx context.Context, log *slog.Logger, dsn string, attempts int, delay time.Duration) error {
	c, _, err := poolConfig(dsn)
	if err != nil {
		return err
	}
	for n := 1; ; n++ {
		err := ping(ctx, c.ConnConfig)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		log.Warn("postgres not reachable", "attempt", n, "max_attempts", attempts, "err", err)
		if n >= attempts {
			return fmt.Errorf("connect to postgres: gave up after %d attempts: %w", attempts, err)
		}
		if !sleep(ctx, delay) {
			return context.Cause(ctx)
		}
	}
}

// ping makes one connection and one round trip, in the time that connecting may take.
func ping(ctx context.Context, c *pgx.ConnConfig) error {
	ctx, cancel := context.WithTimeout(ctx, max(connectTimeout, c.ConnectTimeout))
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return conn.Ping(ctx)
}
