package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

const cursorCheck = 8 // bytes of a cursor that say what it is of

// The times between which a task was created unless somebody wrote nonsense into its row.
var (
	firstTime = time.Date(-4000, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(100_000, 1, 1, 0, 0, 0, 0, time.UTC)
)

// A filter says which tasks are meant.
type filter struct {
	statuses []string // in the order of statuses
	name     *string  // nil for all names
	since    time.Time
	before   time.Time // not included
}

// A position among the tasks of a filter, newest first, is just behind the task that was created
// then and has that id. Neither ever changes, so a position stays where it is whatever
// happens to the tasks.
type position struct {
	created time.Time
	id      uuid.UUID
}

// filter reads the parameters that choose tasks among those in the allowed states, and reports
// whether any was given.
func (q *queryReader) filter(allowed []string) (f filter, given bool) {
	// The order of these is that of the errors.
	f.statuses, f.name = q.statuses(allowed), q.name()
	since, before := q.time("created_after"), q.time("created_before")
	given = f.statuses != nil || f.name != nil || since != nil || before != nil
	if f.statuses == nil {
		f.statuses = allowed
	}
	f.since, f.before = *cmp.Or(since, &firstTime), *cmp.Or(before, &lastTime)
	return f, given
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
