package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"nexusflow/db"
)

const (
	probeLimit = time.Second // a check of PostgreSQL, however frozen it is
	probeAge   = time.Second // how long its answer serves other probes
)

// health answers /health as the original did, and the liveness probes. It checks nothing: a
// dependency that is away must not get the process restarted.
func (s *server) health(w http.ResponseWriter, _ *http.Request) {
	b := append([]byte(nil), `{"service":"gateway","status":"ok","timestamp":`...)
	b = appendTime(b, new(time.Now()))
	writeBody(w, http.StatusOK, "application/json", append(b, '}'))
}

// readyz answers whether requests should be sent here. Without Redis submissions still
// commit, so that is degraded but ready.
func (s *server) readyz(w http.ResponseWriter, r *http.Request) {
	status, postgres, redis := "ok", "ok", "ok"
	if !s.hints.up() {
		status, redis = "degraded", "down"
	}
	if err := s.ready.check(r.Context(), s.checkRecord); err != nil {
		status, postgres = "unavailable", "down"
	}
	if s.draining.Load() {
		status = "draining"
	}
	code := http.StatusOK
	if status == "unavailable" || status == "draining" {
		code = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", "1")
	}
	b := append([]byte(nil), `{"status":"`...)
	b = append(append(b, status...), `","checks":{"postgres":"`...)
	b = append(append(b, postgres...), `","redis":"`...)
	b = append(append(b, redis...), `"}}`...)
	writeBody(w, code, "application/json", b)
}

// checkRecord reports whether PostgreSQL answers, holds our schema and takes writes.
func (s *server) checkRecord(ctx context.Context) error {
	err := checkWritable(ctx, s.pools.api)
	if (broken(err) || errors.Is(err, errReadOnly)) && ctx.Err() == nil {
		// All idle connections are from before the restart or the failover.
		s.pools.api.Reset()
		err = checkWritable(ctx, s.pools.api)
	}
	s.intake.note(err)
	return err
}

// checkWritable is checkSchema, and errReadOnly where rows cannot be changed.
func checkWritable(ctx context.Context, pool *pgxpool.Pool) error {
	frozen, err := db.New(pool).ReadOnly(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("check for read-only: %w", err)
	case frozen:
		return errReadOnly
	}
	return checkSchema(ctx, pool)
}

// noteRead is intake.note for reads. One that succeeds says nothing about writes: while PostgreSQL
// is taken to be away it only gives cause to ask.
func (s *server) noteRead(err error) {
	switch {
	case err != nil:
		s.intake.note(err)
	case s.intake.away.Load():
		s.ready.check(context.Background(), s.checkRecord)
	}
}

// readiness remembers the last check, so that any number of probes costs one a second
// and one connection.
type readiness struct {
	mu  sync.Mutex // held during a check: probes that come meanwhile share its answer
	at  time.Time
	err error
}

func (p *readiness) check(ctx context.Context, check func(context.Context) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.at.IsZero() && time.Since(p.at) < probeAge {
		return p.err
	}
	// The answer is for everybody, so a probe that hangs up does not end the check.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	p.err = check(ctx)
	p.at = time.Now()
	return p.err
}
