package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"

	"nexusflow/db"
)

// migrationLockTimeout is how long a migration may queue for a table that is in use.
// Whoever needs the table afterwards queues behind it, so it stays short.
const migrationLockTimeout = 3 * time.Second

// migrate brings the schema up to this program's version, creating or adopting tables as
// needed. Any number of processes may call it at once: a session lock lets one at a
// time work, which needs a direct connection, not a transaction pooler. A table
// in use, or one on which somebody builds an index, is tried again until ctx ends. A newer
// schema is left alone: later versions take away no table and no column, so this
// program works on it. They may replace an index, which makes its lists slow at worst.
func migrate(ctx context.Context, log *slog.Logger, dsn string) error {
	c, _, err := poolConfig(dsn)
	if err != nil {
		return err
	}
	c.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	c.ConnConfig.RuntimeParams["lock_timeout"] = milliseconds(migrationLockTimeout)
	handle := stdlib.OpenDB(*c.ConnConfig)
	defer handle.Close()
	p, err := newMigrator(handle, goose.WithSessionLocker(migrationLock{log}))
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	for told := false; ; told = true {
		done, err := p.Up(ctx)
		if partial, ok := errors.AsType[*goose.PartialError](err); ok {
			done = partial.Applied
		}
		for _, r := range done {
			log.Info("migration applied", "version", r.Source.Version, "took_ms", r.Duration.Milliseconds())
		}
		if err == nil {
			break
		}
		if !crowdedOut(err) {
			return fmt.Errorf("migrate: %w", err)
		}
		if !told {
			log.Warn("migration waits for a table that is in use", "err", err)
		}
		if !sleep(ctx, time.Second) {
			return context.Cause(ctx)
		}
	}
	have, err := p.GetDBVersion(ctx)
	if err != nil {
		return fmt.Errorf("migrate: read version: %w", err)
	}
	if want := latestVersion(p); have > want {
		log.Warn("schema is newer than this program", "version", have, "want", want)
	}
	return nil
}

func newMigrator(handle *sql.DB, options ...goose.ProviderOption) (*goose.Provider, error) {
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, handle, files, append(options, goose.WithSlog(slog.New(slog.DiscardHandler)))...)
}

func latestVersion(p *goose.Provider) int64 {
	sources := p.ListSources()
	return sources[len(sources)-1].Version
}

// migrationLock is the session lock under which goose works. It polls: a session that
// waits inside PostgreSQL holds a snapshot, for which CREATE INDEX CONCURRENTLY in the
// holder would wait in turn. goose's own locker polls every five seconds.
type migrationLock struct{ log *slog.Logger }

// migrationLockID is "nexusflo" in ASCII.
const migrationLockID = 0x6e65787573666c6f

func (l migrationLock) SessionLock(ctx context.Context, conn *sql.Conn) error {
	for n := 0; ; n++ {
		ok, err := onConn(conn, func(q *db.Queries) (bool, error) { return q.TryLock(ctx, migrationLockID) })
		if err != nil || ok {
			return err
		}
		if n == 0 {
			l.log.Info("waiting for another process to migrate")
		}
		if !sleep(ctx, 100*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
}

func (l migrationLock) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	_, err := onConn(conn, func(q *db.Queries) (bool, error) { return q.Unlock(ctx, migrationLockID) })
	return err
}

// onConn asks one of our queries on the connection that goose works with.
func onConn(conn *sql.Conn, ask func(*db.Queries) (bool, error)) (ok bool, err error) {
	err = conn.Raw(func(driver any) error {
		ok, err = ask(db.New(driver.(*stdlib.Conn).Conn()))
		return err
	})
	return ok, err
}

// checkSchema returns nil when the schema is complete and at least as new as this
// program, and the role of the pool may use it. It changes nothing and costs three small reads.
func checkSchema(ctx context.Context, pool *pgxpool.Pool) error {
	unique, err := db.New(pool).HasKeyIndex(ctx)
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	if !unique {
		return errors.New("check schema: no tasks table with unique idempotency keys: run goose up")
	}
	grants, err := db.New(pool).MissingGrants(ctx)
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	if len(grants) > 0 {
		return fmt.Errorf("check schema: the role of DATABASE_URL lacks rights: %s", strings.Join(grants, "; "))
	}
	handle := stdlib.OpenDBFromPool(pool)
	defer handle.Close()
	p, err := newMigrator(handle)
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	store, err := database.NewStore(database.DialectPostgres, goose.DefaultTablename)
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	have, err := store.GetLatestVersion(ctx, handle)
	if sqlState(err) == "42P01" || errors.Is(err, database.ErrVersionNotFound) {
		return errors.New("check schema: no record of migrations: run goose up")
	}
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	if want := latestVersion(p); have < want {
		return fmt.Errorf("check schema: version %d is older than %d, which this program needs: run goose up", have, want)
	}
	return nil
}
