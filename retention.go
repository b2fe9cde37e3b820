package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
)

const (
	retentionPage  = 2000
	retentionPause = 200 * time.Millisecond // between pages, so that deletion never crowds out work
	retentionRest  = 30 * time.Minute       // between walks
)

// retention deletes tasks that ended longer ago than TASK_RETENTION. Their
// idempotency keys go with them.
type retention struct {
	log     *slog.Logger
	keep    time.Duration
	queries *db.Queries
}

// run walks the table again and again until ctx ends. An error costs a walk: the
// next one starts afresh.
func (r *retention) run(ctx context.Context) error {
	for {
		n, err := r.walk(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			r.log.Warn("retention put off", "err", err)
		case n > 0:
			r.log.Info("old tasks deleted", "count", n)
		}
		if !sleep(ctx, retentionRest) {
			return nil
		}
	}
}

// walk deletes page by page from the first key to the last and returns how many
// tasks went.
func (r *retention) walk(ctx context.Context) (int, error) {
	total := 0
	for after := uuid.Nil; ; {
		limited, cancel := context.WithTimeout(ctx, storeLimit)
		page, err := r.queries.DeleteFinished(limited, db.DeleteFinishedParams{
			AfterID: after,
			MaxRows: retentionPage,
			AgeMS:   r.keep.Milliseconds(),
		})
		cancel()
		if err != nil {
			return total, fmt.Errorf("delete old tasks: %w", err)
		}
		total += int(page.Deleted)
		if page.Seen < retentionPage {
			return total, nil
		}
		after = page.LastID
		if !sleep(ctx, retentionPause) {
			return total, nil
		}
	}
}
