package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// A bench is one run.
type bench struct {
	opts      options
	dir       string // scratch, removed at the end
	self      string // this program, which is also the peers' gateway
	nexusflow string // the program under test, built from the parent folder
	postgres  *store
	redis     *store
	round     int
	services  int // started so far, for names
	results   results
	grown     []grownTable
}

// open builds NexusFlow and starts the servers. Whatever it returns, close must follow.
func (b *bench) open(ctx context.Context) (err error) {
	if b.dir, err = os.MkdirTemp(b.opts.dir, "nexusflow-bench-"); err != nil {
		return fmt.Errorf("make scratch folder: %w", err)
	}
	if err := os.Chmod(b.dir, 0o755); err != nil { // the user of PostgreSQL must get in
		return err
	}
	if b.self, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if err := b.build(ctx); err != nil {
		return err
	}
	if err := os.WriteFile(b.handlersFile(), []byte(`{"`+taskName+`": {"go": "noop"}}`), 0o644); err != nil {
		return fmt.Errorf("write handlers file: %w", err)
	}
	if b.postgres, err = startPostgres(ctx, b.dir); err != nil {
		return err
	}
	b.redis, err = startRedis(ctx, b.dir)
	return err
}

func (b *bench) handlersFile() string { return filepath.Join(b.dir, "handlers.json") }

func (b *bench) close() {
	if b.redis != nil {
		b.redis.stop(syscall.SIGTERM)
	}
	if b.postgres != nil {
		b.postgres.stop(syscall.SIGINT) // closes the connections that are left
	}
	if b.dir != "" {
		os.RemoveAll(b.dir)
	}
}

// connect opens a connection to a database of this run. Its plans use indexes, so that the
// questions asked during a measurement do not scan a table over and over.
func (b *bench) connect(ctx context.Context, database string) (*pgx.Conn, error) {
	conn, err := pgx.Connect(ctx, b.postgres.url(database))
	if err != nil {
		return nil, fmt.Errorf("connect to postgres: %w", err)
	}
	if _, err := conn.Exec(ctx, "SET enable_seqscan = off"); err != nil {
		conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

// exec runs statements one by one, each in a transaction of its own.
func (b *bench) exec(ctx context.Context, database string, statements ...string) error {
	conn, err := pgx.Connect(ctx, b.postgres.url(database))
	if err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, s := range statements {
		if _, err := conn.Exec(ctx, s); err != nil {
			return fmt.Errorf("%.60s: %w", s, err)
		}
	}
	return nil
}

func (b *bench) redisClient(database int) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: b.redis.addr, DB: database})
}

func (b *bench) flushRedis(ctx context.Context, database int) error {
	client := b.redisClient(database)
	defer client.Close()
	if err := client.FlushDB(ctx).Err(); err != nil {
		return fmt.Errorf("flush redis: %w", err)
	}
	return nil
}

// rotated returns list beginning elsewhere in each round, so that no subject is always
// measured first or right after the same other.
func rotated[T any](list []T, round int) []T {
	n := round % len(list)
	return slices.Concat(list[n:], list[:n])
}

// measure takes one sample of a subject, and takes it again when other programs disturbed
// it; step must be repeatable. The last of opts.tries counts, marked as disturbed.
func (b *bench) measure(ctx context.Context, what, subject string, step func(context.Context) (sample, error)) error {
	for try := 1; ; try++ {
		s, err := step(ctx)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", what, subject, err)
		}
		if s.cpu.other <= b.opts.maxOther || try >= b.opts.tries {
			b.keep(what, subject, s)
			return nil
		}
		fmt.Fprintf(os.Stderr, "   %-38s %-14s again: others used %.1f cores\n", what, subject, s.cpu.other)
	}
}

// keep adds a sample to the results and shows it.
func (b *bench) keep(what, subject string, s sample) {
	s.round = b.round
	s.disturbed = s.cpu.other > b.opts.maxOther
	b.results.add(key{what, subject}, s)
	mark := ""
	if s.disturbed {
		mark = fmt.Sprintf(" (disturbed: others used %.1f cores)", s.cpu.other)
	}
	fmt.Fprintf(os.Stderr, "   %-38s %-14s %s%s\n", what, subject, s, mark)
}

// pause waits for d unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

var errUnfinished = errors.New("tasks are not done yet")
