package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"nexusflow/db"
)

const (
	defaultPage = 50  // tasks on a page unless limit says otherwise
	maxPage     = 200 // a larger limit means this

	cursorCheck = 8 // bytes of a cursor that say which list it is of
)

// The times between which a task was created unless somebody wrote nonsense into its row.
var (
	firstTime = time.Date(-4000, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(100_000, 1, 1, 0, 0, 0, 0, time.UTC)
)

// A listing is one valid request for a page of tasks.
type listing struct {
	filter
	limit int
	from  position
	query url.Values // the parameters given, without the cursor
}

// A filter says which tasks a list has.
type filter struct {
	statuses []string // in the order of statuses
	name     *string  // nil for all names
	since    time.Time
	before   time.Time // not included
}

// A position in a list is just behind the task that was created then and has that id. Neither
// ever changes, so a position stays where it is whatever happens to the tasks.
type position struct {
	created time.Time
	id      uuid.UUID
}

// listTasks answers GET /tasks: tasks as GET /tasks/{task_id} shows them, but for payload
// and result, newest first. Who follows the cursors to the end has seen each task
// that matched all the while exactly once.
func (s *server) listTasks(w http.ResponseWriter, r *http.Request) {
	l, err := parseListing(r.URL.RawQuery)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	rows, err := s.readPage(r.Context(), &l)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	cursor := ""
	if len(rows) > l.limit {
		rows = rows[:l.limit]
		last := &rows[l.limit-1]
		cursor = l.cursor(position{last.CreatedAt, last.TaskID})
		l.query.Set("cursor", cursor)
		w.Header().Set("Link", "</tasks?"+l.query.Encode()+`>; rel="next"`)
	}
	writeBody(w, http.StatusOK, "application/json", appendPage(nil, rows, cursor))
}

// readPage reads one task more than the page has: it tells whether there is a next one.
func (s *server) readPage(ctx context.Context, l *listing) ([]db.ListTasksRow, error) {
	if l.name == nil {
		// The cost grows with the number of names: other reads must be left connections.
		free, err := takeSlot(s.listing)
		if err != nil {
			return nil, err
		}
		defer free()
	}
	return read(ctx, s, func(ctx context.Context, q *db.Queries) ([]db.ListTasksRow, error) {
		return q.ListTasks(ctx, db.ListTasksParams{
			Statuses: l.statuses,
			Name:     l.name,
			Since:    l.since,
			Before:   l.from.created,
			BeforeID: l.from.id,
			MaxRows:  int32(l.limit) + 1,
		})
	})
}

func appendPage(b []byte, rows []db.ListTasksRow, cursor string) []byte {
	b = append(b, `{"tasks":[`...)
	for i := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		t := listed(rows[i])
		b = appendSummary(b, &t)
	}
	b = append(b, `],"next_cursor":`...)
	if cursor == "" {
		return append(b, "null}"...)
	}
	return append(appendString(b, cursor), '}')
}

// listed returns a row of a list as the task it is, without payload and result.
func listed(r db.ListTasksRow) db.Task {
	return db.Task{
		TaskID:          r.TaskID,
		Name:            r.Name,
		Status:          r.Status,
		RetryCount:      r.RetryCount,
		MaxRetries:      r.MaxRetries,
		ErrorMessage:    r.ErrorMessage,
		CreatedAt:       r.CreatedAt,
		UpdatedAt:       r.UpdatedAt,
		IdempotencyKey:  r.IdempotencyKey,
		Queue:           r.Queue,
		RunAt:           r.RunAt,
		StartedAt:       r.StartedAt,
		FinishedAt:      r.FinishedAt,
		TimeoutMS:       r.TimeoutMS,
		CancelRequested: r.CancelRequested,
		Attempt:         r.Attempt,
		LostCount:       r.LostCount,
		Attempts:        r.Attempts,
	}
}

// parseListing reads the query of a request for a list. The error is fieldErrors with
// everything that is wrong, but for unknown parameters beyond the first maxUnknown.
func parseListing(query string) (listing, error) {
	q := readQuery(query)
	// A composite literal evaluates in this order, which is that of the errors.
	l := listing{
		filter: filter{
			statuses: q.statuses(statuses),
			name:     q.name(),
			since:    *cmp.Or(q.time("created_after"), &firstTime),
			before:   *cmp.Or(q.time("created_before"), &lastTime),
		},
		limit: pageSize(q),
		query: q.values,
	}
	if l.statuses == nil {
		l.statuses = statuses
	}
	l.from = start(q, &l.filter)
	if err := q.end(); err != nil {
		return listing{}, err
	}
	l.query.Del("cursor")
	return l, nil
}

func pageSize(q *queryReader) int {
	text, ok := q.one("limit")
	if !ok {
		return defaultPage
	}
	// Beyond the range of an int64, ParseInt returns its nearest value.
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		q.fail("int_type", "limit", "Input should be a valid integer")
	case n < 0:
		q.fail("greater_than_equal", "limit", "Input should be greater than or equal to 0")
	case n == 0:
		return defaultPage
	}
	return int(min(n, maxPage))
}

// start returns where the page begins. A cursor is of no use when the filter is wrong: then
// it is not looked at.
func start(q *queryReader, f *filter) position {
	cursor, ok := q.one("cursor")
	if !ok || len(q.errs) > 0 {
		return position{created: f.before}
	}
	from, ok := f.position(cursor)
	if !ok {
		q.fail("value_error", "cursor", "Input should be the next_cursor of a page with the same filters")
	}
	return from
}

// cursor returns the text that names a position in the list of the filter.
func (f *filter) cursor(p position) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(p.created.UnixMicro()))
	b = append(b, p.id[:]...)
	return base64.RawURLEncoding.EncodeToString(append(b, f.check(b)...))
}

// position returns the position that a cursor names, or false if it is none of this list. It is
// always one that PostgreSQL understands: the check tells a mistake, not a forgery,
// which would gain nothing that the filter does not give.
func (f *filter) position(cursor string) (position, bool) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	if err != nil || len(b) != 8+16+cursorCheck || strings.ContainsAny(cursor, "\r\n") {
		return position{}, false
	}
	at, check := b[:8+16], b[8+16:]
	p := position{time.UnixMicro(int64(binary.BigEndian.Uint64(at))).UTC(), uuid.UUID(at[8:])}
	if !bytes.Equal(check, f.check(at)) || p.created.Before(f.since) || !p.created.Before(f.before) {
		return position{}, false
	}
	return p, true
}

// check returns what binds a position to the filter.
func (f *filter) check(at []byte) []byte {
	name := ""
	if f.name != nil {
		name = *f.name
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "1 %q %q %d %d %x", f.statuses, name, f.since.UnixMicro(), f.before.UnixMicro(), at))
	return sum[:cursorCheck]
}
