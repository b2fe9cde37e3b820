package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

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

var taskStatuses = []string{statusPending, statusProcessing, statusCompleted, statusFailed, statusCancelled}

// A listing is one valid request for a page of tasks.
type listing struct {
	filter
	limit int
	from  place
	query url.Values // the parameters given, without the cursor
}

// A filter says which tasks a list has.
type filter struct {
	statuses []string // in the order of taskStatuses
	name     *string  // nil for all names
	since    time.Time
	before   time.Time // not included
}

// A place in a list is just behind the task that was created then and has that id. Neither
// ever changes, so a place stays where it is whatever happens to the tasks.
type place struct {
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
	rows, err := read(r.Context(), s, func(ctx context.Context, q *db.Queries) ([]db.ListTasksRow, error) {
		return q.ListTasks(ctx, db.ListTasksParams{
			Statuses: l.statuses,
			Name:     l.name,
			Since:    l.since,
			Before:   l.from.created,
			BeforeID: l.from.id,
			MaxRows:  int32(l.limit) + 1, // one more tells whether there is a next page
		})
	})
	if err != nil {
		s.fail(w, r, err)
		return
	}
	cursor := ""
	if len(rows) > l.limit {
		rows = rows[:l.limit]
		last := &rows[l.limit-1]
		cursor = l.cursor(place{last.CreatedAt, last.TaskID})
		l.query.Set("cursor", cursor)
		w.Header().Set("Link", "</tasks?"+l.query.Encode()+`>; rel="next"`)
	}
	writeBody(w, http.StatusOK, "application/json", appendPage(nil, rows, cursor))
}

func appendPage(b []byte, rows []db.ListTasksRow, cursor string) []byte {
	b = append(b, `{"tasks":[`...)
	for i := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		t := listed(&rows[i])
		b = append(appendState(appendHead(b, &t), &t), '}')
	}
	b = append(b, `],"next_cursor":`...)
	if cursor == "" {
		return append(b, "null}"...)
	}
	return append(appendString(b, cursor), '}')
}

// listed returns a row of a list as the task it is, without payload and result.
func listed(r *db.ListTasksRow) db.Task {
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

// A listReader holds the parameters of a request for a list and what is wrong with them.
type listReader struct {
	values url.Values
	errs   fieldErrors
}

// parseListing reads the query of a request for a list. The error is fieldErrors with
// everything that is wrong, but for unknown parameters beyond the first maxUnknown.
func parseListing(query string) (listing, error) {
	values, err := url.ParseQuery(query)
	r := listReader{values: values}
	if err != nil {
		r.errs = fieldErrors{{"value_error", []any{"query"}, "Input should be pairs name=value, percent-encoded and divided by &"}}
	}
	// A composite literal evaluates in this order, which is that of the errors.
	l := listing{
		filter: filter{
			statuses: r.statuses(),
			name:     r.name(),
			since:    r.time("created_after", firstTime),
			before:   r.time("created_before", lastTime),
		},
		limit: r.limit(),
		query: values,
	}
	l.from = r.from(&l.filter)
	r.refuseUnknown()
	if len(r.errs) > 0 {
		return listing{}, r.errs
	}
	values.Del("cursor")
	return l, nil
}

func (r *listReader) addError(kind, parameter, msg string) {
	r.errs = append(r.errs, fieldError{kind, []any{"query", parameter}, msg})
}

// one returns the value of a parameter that may be given once, and whether it was.
func (r *listReader) one(parameter string) (string, bool) {
	given := r.values[parameter]
	if len(given) > 1 {
		r.addError("value_error", parameter, "Input should be given once")
	}
	if len(given) != 1 {
		return "", false
	}
	return given[0], true
}

// statuses returns the states that were asked for, in several parameters or as a list with
// commas, else all there are.
func (r *listReader) statuses() []string {
	values, ok := r.values["status"]
	if !ok {
		return taskStatuses
	}
	asked := strings.Split(strings.Join(values, ","), ",")
	for _, status := range asked {
		if !slices.Contains(taskStatuses, status) {
			r.addError("literal_error", "status", "Input should be one of: "+strings.Join(taskStatuses, ", "))
			break
		}
	}
	var statuses []string
	for _, status := range taskStatuses {
		if slices.Contains(asked, status) {
			statuses = append(statuses, status)
		}
	}
	return statuses
}

// name returns the name that was asked for. A row that SQL inserted may have one that could
// not be submitted, so all that PostgreSQL can store will do.
func (r *listReader) name() *string {
	name, ok := r.one("name")
	switch {
	case !ok:
		return nil
	case name == "":
		r.addError("string_too_short", "name", "String should have at least 1 character")
	case !utf8.ValidString(name) || strings.ContainsRune(name, 0):
		r.addError("string_pattern_mismatch", "name", "String should be UTF-8 without NUL characters")
	}
	return &name
}

// time returns a time as the first microsecond that is not before it, since that
// is what PostgreSQL's times are counted in.
func (r *listReader) time(parameter string, absent time.Time) time.Time {
	text, ok := r.one(parameter)
	if !ok {
		return absent
	}
	t, ok := parseTime(text)
	if !ok {
		r.addError("datetime_parsing", parameter, "Input should be an RFC 3339 date and time with a UTC offset, in which + is written %2B")
	}
	return t.Add(time.Microsecond - 1).Truncate(time.Microsecond)
}

func (r *listReader) limit() int {
	text, ok := r.one("limit")
	if !ok {
		return defaultPage
	}
	// Beyond the range of an int64, ParseInt returns its nearest value.
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		r.addError("int_type", "limit", "Input should be a valid integer")
	case n < 0:
		r.addError("greater_than_equal", "limit", "Input should be greater than or equal to 0")
	case n == 0:
		return defaultPage
	}
	return int(min(n, maxPage))
}

// from returns where the page begins. A cursor is of no use when the filter is wrong: then
// it is not looked at.
func (r *listReader) from(f *filter) place {
	cursor, ok := r.one("cursor")
	if !ok || len(r.errs) > 0 {
		return place{created: f.before}
	}
	from, ok := f.place(cursor)
	if !ok {
		r.addError("value_error", "cursor", "Input should be the next_cursor of a page with the same filters")
	}
	return from
}

func (r *listReader) refuseUnknown() {
	known := []string{"status", "name", "created_after", "created_before", "limit", "cursor"}
	unknown := 0
	for _, parameter := range slices.Sorted(maps.Keys(r.values)) {
		if slices.Contains(known, parameter) {
			continue
		}
		if unknown++; unknown > maxUnknown {
			return
		}
		r.addError("extra_forbidden", showName(strings.ToValidUTF8(parameter, "\uFFFD")), "Extra inputs are not permitted")
	}
}

// cursor returns the text that names a place in the list of the filter.
func (f *filter) cursor(p place) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(p.created.UnixMicro()))
	b = append(b, p.id[:]...)
	return base64.RawURLEncoding.EncodeToString(append(b, f.check(b)...))
}

// place returns the place that a cursor names, or false if it is none of this list. It is
// always one that PostgreSQL understands: the check tells a mistake, not a forgery,
// which would gain nothing that the filter does not give.
func (f *filter) place(cursor string) (place, bool) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	if err != nil || len(b) != 8+16+cursorCheck || strings.ContainsAny(cursor, "\r\n") {
		return place{}, false
	}
	at, check := b[:8+16], b[8+16:]
	p := place{time.UnixMicro(int64(binary.BigEndian.Uint64(at))).UTC(), uuid.UUID(at[8:])}
	if !bytes.Equal(check, f.check(at)) || p.created.Before(f.since) || !p.created.Before(f.before) {
		return place{}, false
	}
	return p, true
}

// check returns what binds a place to the filter.
func (f *filter) check(at []byte) []byte {
	name := ""
	if f.name != nil {
		name = *f.name
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "1 %q %q %d %d %x", f.statuses, name, f.since.UnixMicro(), f.before.UnixMicro(), at))
	return sum[:cursorCheck]
}
