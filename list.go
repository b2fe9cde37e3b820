package main

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"

	"nexusflow/db"
)

const (
	defaultPage = 50  // tasks on a page unless limit says otherwise
	maxPage     = 200 // a larger limit means this
)

// A listing is one valid request for a page of tasks.
type listing struct {
	filter
	limit int
	from  position
	query url.Values // the parameters given, without the cursor
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
	rows, err := s.readPage(r.Context(), &l.filter, l.from, l.limit+1) // one more tells whether there is a next page
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

// readPage reads the first n tasks of a filter from a position on.
func (s *server) readPage(ctx context.Context, f *filter, from position, n int) ([]db.ListTasksRow, error) {
	if f.name == nil {
		// The cost grows with the number of names: other reads must be left connections.
		free, err := takeSlot(s.listing)
		if err != nil {
			return nil, err
		}
		defer free()
	}
	return read(ctx, s, func(ctx context.Context, q *db.Queries) ([]db.ListTasksRow, error) {
		return q.ListTasks(ctx, db.ListTasksParams{
			Statuses: f.statuses,
			Name:     f.name,
			Since:    f.since,
			Before:   from.created,
			BeforeID: from.id,
			MaxRows:  int32(n),
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
	l := listing{query: q.values}
	l.filter, _ = q.filter(statuses)
	l.limit = pageSize(q)
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
