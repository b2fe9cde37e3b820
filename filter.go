package main

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/url"
	"time"

	"github.com/google/uuid"
)

const filterCheck = 8 // bytes of the filter's hash in a cursor

// A selection says which tasks are meant; nil admits all.
type selection struct {
	statuses                    []string
	name                        *string
	createdAfter, createdBefore *time.Time // the second is not included
}

// readBulk reads the query of a request about many tasks, which must choose some of them:
// a forgotten filter must not cancel everything. Its error holds all that is wrong.
func readBulk(u *url.URL, statuses []string) (*bulk, error) {
	q := readQuery(u.RawQuery)
	b := &bulk{limit: maxBulk}
	b.statuses = q.statuses(statuses)
	b.name = q.name()
	b.createdAfter = q.time("created_after")
	b.createdBefore = q.time("created_before")
	if text, ok := q.one("limit"); ok {
		b.limit = q.integer("limit", text, 1, maxBulk)
	}
	text, given := q.one("cursor")
	q.end()
	if len(q.errs) == 0 && b.statuses == nil && b.name == nil && b.createdAfter == nil && b.createdBefore == nil {
		q.fail("missing", "status", "At least one of status, name, created_after and created_before is required")
	}
	if b.statuses == nil {
		b.statuses = statuses
	}
	if given && len(q.errs) == 0 {
		if b.after, given = b.position(u.Path, text); !given {
			q.fail("value_error", "cursor", "The cursor is not one that this request with these filters returned")
		}
	}
	if len(q.errs) > 0 {
		return nil, q.errs
	}
	return b, nil
}

// cursor returns the token for going on behind a key: opaque to clients, and of use only for
// the same request.
func (f *selection) cursor(path string, after uuid.UUID) string {
	return base64.RawURLEncoding.EncodeToString(append(after[:], f.check(path)...))
}

// position returns the key that cursor was given, or false for a token that is not of
// this path and filter.
func (f *selection) position(path, token string) (after uuid.UUID, ok bool) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(token)
	if err != nil || len(b) != len(after)+filterCheck || string(b[len(after):]) != string(f.check(path)) {
		return after, false
	}
	return uuid.UUID(b[:len(after)]), true
}

// check returns a hash of everything that decides which tasks a walk meets.
func (f *selection) check(path string) []byte {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%q\n", path, f.statuses)
	if f.name != nil {
		fmt.Fprintf(h, "%q", *f.name)
	}
	for _, t := range []*time.Time{f.createdAfter, f.createdBefore} {
		fmt.Fprintln(h)
		if t != nil {
			fmt.Fprint(h, t.UnixMicro())
		}
	}
	return h.Sum(nil)[:filterCheck]
}
