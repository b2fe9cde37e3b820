package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// A submission is one valid request for a task. Its strings share the memory of one copy
// of the request body, which they keep alive.
type submission struct {
	Name       string
	Payload    string // JSON object as received; "{}" if it was absent or null
	Key        string // idempotency key; "" if there is none
	Displaced  string // of an item with a key of its own: what it would have from its batch; "" if nothing else
	Queue      string // "" if none was named
	MaxRetries *int32
	TimeoutMS  *int64
	DelayMS    *int64     // 0 and nil are scheduled alike
	RunAt      *time.Time // UTC; a past time means now
	Hash       [32]byte   // fingerprint of the request if it has a key, else zero
}

// due reports whether the task may run at once.
func (s *submission) due() bool { return s.DelayMS == nil && s.RunAt == nil }

// limits are the bounds of a submission that an operator sets.
type limits struct {
	maxTimeout time.Duration // largest timeout_ms
	queues     []string      // the queues there are; nil admits every well-formed name
}

const (
	maxUnknown      = 20 // unknown members that are reported: an answer must not outgrow its request
	maxUnknownChars = 64 // of an unknown member's name that are reflected
	maxQueueLen     = 64
	clockSlack      = time.Minute // by which a client's clock may be ahead when it asks for maxDelay
)

// The members of a submission, in the order in which errors are reported.
const (
	memberName = iota
	memberPayload
	memberKey
	memberMaxRetries
	memberTimeout
	memberDelay
	memberQueue
	memberRunAt
	memberCount
)

var memberNames = [memberCount]string{"name", "payload", "idempotency_key", "max_retries", "timeout_ms", "delay_ms", "queue", "run_at"}

// A submitReader holds the members of a request for one task between scanning and checking.
type submitReader struct {
	size    int  // of the body, or of the item's text
	batched bool // it is an item of a batch
	index   int  // and which
	members [memberCount]member
	unknown []string // names as they may be shown
	errs    fieldErrors
}

// A member is the JSON text of a value, "" if it was not sent, and what the scanner saw in it.
type member struct {
	text string
	facts
}

// parseSubmission reads the body of a request for one task, which the caller has limited
// in size, and decides on its idempotency key: that of the header comes
// before that of the body, which must be valid all the same. If a member occurs twice
// the last one counts, as it does inside a jsonb column.
//
// The error is a *syntaxError (400), else fieldErrors with everything that is
// wrong (422), else a *keyError because the only keys were blank ones (400).
func parseSubmission(body []byte, headerKey keyHeader, lim limits) (submission, error) {
	s := scanner{src: string(body)}
	r := submitReader{size: len(body)}
	if !r.scan(&s) || !s.end() {
		return submission{}, s.err
	}
	sub := r.check(lim)
	if len(r.errs) > 0 {
		return submission{}, r.errs
	}
	sub.Key = cmp.Or(headerKey.key, sub.Key)
	if err := r.seal(&sub, headerKey.present); err != nil {
		return submission{}, err
	}
	return sub, nil
}

// scan divides the text at s.pos into its members, or notes as its only error that it is no
// object. It reports false at a syntax error, which is in s.
func (r *submitReader) scan(s *scanner) bool {
	if s.next() != '{' {
		r.errs = fieldErrors{{"model_attributes_type", r.loc(), "Input should be an object"}}
		return s.value()
	}
	ok := s.list('}', func() bool {
		if !s.member() {
			return false
		}
		m := r.find(s.name, s.escaped)
		s.next()
		start := s.pos
		if !s.value() {
			return false
		}
		if m != nil {
			*m = member{s.src[start:s.pos], s.facts}
		}
		return true
	})
	// A null stands for a member that was not sent, but for the name, which has to be.
	for i := range r.members {
		if i != memberName && r.members[i].text == "null" {
			r.members[i] = member{}
		}
	}
	return ok
}

// find returns the member of that name, or notes the name as unknown and returns nil.
func (r *submitReader) find(name string, escaped bool) *member {
	if escaped {
		name = unescapeAll(name)
	}
	if i := slices.Index(memberNames[:], name); i >= 0 {
		return &r.members[i]
	}
	r.unknown = addUnknown(r.unknown, name)
	return nil
}

// addUnknown appends the name of an unknown member, as it may be shown, to those met before.
func addUnknown(names []string, name string) []string {
	if len(names) < maxUnknown {
		if name = showName(name); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// check returns the submission that the members make up, with the key among them, and
// notes all that is wrong with them, unless it is known already that they are none.
func (r *submitReader) check(lim limits) submission {
	if len(r.errs) > 0 {
		return submission{}
	}
	// A composite literal evaluates in this order, which is that of the errors.
	sub := submission{
		Name:       r.name(),
		Payload:    r.payload(),
		Key:        r.key(),
		MaxRetries: r.retries(),
		TimeoutMS:  r.integer(memberTimeout, 1, lim.maxTimeout.Milliseconds()),
		DelayMS:    r.integer(memberDelay, 0, maxDelay.Milliseconds()),
		Queue:      r.queue(lim.queues),
		RunAt:      r.runAt(time.Now()),
	}
	for _, name := range r.unknown {
		r.addError("extra_forbidden", name, "Extra inputs are not permitted")
	}
	return sub
}

// seal sets the fingerprint of a valid submission whose key is decided on. It returns
// errBlankKey if there is none although one was sent, in the header or among the members:
// whoever sends a blank key believes to be protected.
func (r *submitReader) seal(sub *submission, header bool) error {
	if sub.Key == "" {
		if header || r.members[memberKey].text != "" {
			return errBlankKey
		}
		return nil
	}
	sub.Hash = r.fingerprint(sub.Name, sub.Payload)
	return nil
}

// addError notes what is wrong with a member.
func (r *submitReader) addError(kind, member, msg string) {
	r.errs = append(r.errs, fieldError{kind, r.loc(member), msg})
}

// loc tells where in the body the task is, or one of its members.
func (r *submitReader) loc(member ...any) []any {
	if r.batched {
		return append([]any{"body", "tasks", r.index}, member...)
	}
	return append([]any{"body"}, member...)
}

// text returns the string that member i is, or false if it was not sent or is not a
// string, which is an error.
func (r *submitReader) text(i int) (string, bool) {
	m := &r.members[i]
	switch {
	case m.text == "":
		return "", false
	case m.text[0] != '"':
		r.addError("string_type", memberNames[i], "Input should be a valid string")
		return "", false
	case m.escaped:
		return unescapeAll(m.text[1 : len(m.text)-1]), true
	}
	return m.text[1 : len(m.text)-1], true
}

// name returns the name of the task, "" if it is wrong.
func (r *submitReader) name() string {
	if r.members[memberName].text == "" {
		r.addError("missing", "name", "Field required")
		return ""
	}
	name, ok := r.text(memberName)
	if !ok {
		return ""
	}
	switch n := utf8.RuneCountInString(name); {
	case n == 0:
		r.addError("string_too_short", "name", "String should have at least 1 character")
	case n > maxNameLen:
		r.addError("string_too_long", "name", fmt.Sprintf("String should have at most %d characters", maxNameLen))
	case r.members[memberName].surrogate:
		r.addError("json_unstorable", "name", "half a surrogate pair cannot be stored")
	case strings.ContainsFunc(name, isControl):
		r.addError("string_pattern_mismatch", "name", "String should not contain control characters")
	case strings.TrimSpace(name) == "":
		r.addError("string_pattern_mismatch", "name", "String should not be white space only")
	default:
		return name
	}
	return ""
}

// payload returns the text of the payload if it can be stored.
func (r *submitReader) payload() string {
	m := &r.members[memberPayload]
	switch {
	case m.text == "":
		return "{}"
	case m.text[0] != '{':
		r.addError("dict_type", "payload", "Input should be a valid dictionary")
		return ""
	case len(m.text) > maxBodyBytes: // a batch is larger than one payload may be
		r.addError("json_unstorable", "payload", fmt.Sprintf("larger than %d bytes", maxBodyBytes))
	}
	for _, reason := range m.unstorable(r.size) {
		r.addError("json_unstorable", "payload", reason)
	}
	return m.text
}

// key returns the idempotency key of the body, "" if it has none or a blank one.
func (r *submitReader) key() string {
	key, ok := r.text(memberKey)
	if !ok {
		return ""
	}
	key = strings.Trim(key, " \t")
	if !isPrintable(key) {
		r.addError("string_pattern_mismatch", "idempotency_key", "String should have printable ASCII characters only")
	} else if len(key) > maxKeyLen {
		r.addError("string_too_long", "idempotency_key", fmt.Sprintf("String should have at most %d characters", maxKeyLen))
	}
	return key
}

func (r *submitReader) retries() *int32 {
	n := r.integer(memberMaxRetries, 0, maxRetryLimit)
	if n == nil {
		return nil
	}
	return new(int32(*n))
}

// integer returns member i, which must be an integer from low to high: 3.0 and 1e1 are
// none. It returns nil if the member was not sent or is wrong.
func (r *submitReader) integer(i int, low, high int64) *int64 {
	text := r.members[i].text
	if text == "" {
		return nil
	}
	// Beyond the range of an int64, ParseInt returns its nearest value, which is
	// then out of bounds on the right side.
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		r.addError("int_type", memberNames[i], "Input should be a valid integer")
	case n < low:
		r.addError("greater_than_equal", memberNames[i], fmt.Sprintf("Input should be greater than or equal to %d", low))
	case n > high:
		r.addError("less_than_equal", memberNames[i], fmt.Sprintf("Input should be less than or equal to %d", high))
	default:
		return &n
	}
	return nil
}

// queue returns the queue, which must be one of known unless that is nil.
func (r *submitReader) queue(known []string) string {
	queue, ok := r.text(memberQueue)
	switch {
	case !ok:
	case known != nil && !slices.Contains(known, queue):
		r.addError("literal_error", "queue", "Input should be one of: "+strings.Join(known, ", "))
	case !isQueueName(queue):
		r.addError("string_pattern_mismatch", "queue", fmt.Sprintf("String should match pattern '^[a-z0-9_-]{1,%d}$'", maxQueueLen))
	}
	return queue
}

// runAt returns the time before which the task shall not run.
func (r *submitReader) runAt(now time.Time) *time.Time {
	if r.members[memberRunAt].text != "" && r.members[memberDelay].text != "" {
		r.addError("value_error", "run_at", "run_at and delay_ms exclude each other")
	}
	text, ok := r.text(memberRunAt)
	if !ok {
		return nil
	}
	t, ok := parseTime(text)
	if !ok {
		r.addError("datetime_parsing", "run_at", "Input should be an RFC 3339 date and time with a UTC offset")
		return nil
	}
	if t.After(now.Add(maxDelay + clockSlack)) {
		r.addError("less_than_equal", "run_at", fmt.Sprintf("Input should be at most %d days ahead", maxDelay/(24*time.Hour)))
		return nil
	}
	return &t
}
