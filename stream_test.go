package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// testStream returns one consumer of a new stream on the Redis that tests share.
func testStream(t *testing.T, adjust ...func(*config)) *stream {
	t.Helper()
	cfg := fastConfig(t)
	cfg.Block = 50 * time.Millisecond
	for _, f := range adjust {
		f(&cfg)
	}
	if cfg.RedisURL == "" {
		cfg.RedisURL = newRedisURL(t)
	}
	s, err := openStream(testLog(t), cfg, cfg.RedisURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	for _, q := range cfg.Queues {
		if err := s.ensure(t.Context(), q.name); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func newEntries(n int, queue string) []entry {
	entries := make([]entry, n)
	for i := range entries {
		entries[i] = entry{uuid.New(), queue}
	}
	return entries
}

func (s *stream) mustPublish(t *testing.T, entries []entry) {
	t.Helper()
	if failed, err := s.publish(t.Context(), entries); err != nil || len(failed) > 0 {
		t.Fatalf("publish = %d failed, %v", len(failed), err)
	}
}

func (s *stream) mustNext(t *testing.T, n int) []message {
	t.Helper()
	messages, err := s.next(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

func (s *stream) counts(t *testing.T, queue string) (length, pending int64) {
	t.Helper()
	length, err := s.fast.XLen(t.Context(), s.key(queue)).Result()
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.fast.XPending(t.Context(), s.key(queue), s.group).Result()
	if err != nil {
		t.Fatal(err)
	}
	return length, p.Count
}

func TestStreamDeliversAndDrops(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	if got := s.mustNext(t, 10); len(got) != 0 {
		t.Errorf("empty stream delivers %v", got)
	}
	entries := newEntries(5, defaultQueue)
	s.mustPublish(t, entries)
	first := s.mustNext(t, 3)
	rest := s.mustNext(t, 10)
	if len(first) != 3 || len(rest) != 2 {
		t.Fatalf("delivered %d then %d, want 3 then 2", len(first), len(rest))
	}
	for i, m := range slices.Concat(first, rest) {
		if m.taskID != entries[i].id || m.queue != defaultQueue {
			t.Errorf("message %d = %+v, want task %v", i, m, entries[i].id)
		}
	}
	if length, pending := s.counts(t, defaultQueue); length != 5 || pending != 5 {
		t.Errorf("length %d, pending %d, want 5 and 5", length, pending)
	}
	if err := s.drop(t.Context(), slices.Concat(first, rest)); err != nil {
		t.Fatal(err)
	}
	if length, pending := s.counts(t, defaultQueue); length != 0 || pending != 0 {
		t.Errorf("after drop: length %d, pending %d, want 0 and 0", length, pending)
	}
}

// Field cases 15, 17: a group that is gone is made again from 0, and what arrived
// before is delivered.
func TestStreamHealsGroup(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	woken := 0
	s.onUp = func() { woken++ }
	if err := s.fast.Del(t.Context(), s.name).Err(); err != nil {
		t.Fatal(err)
	}
	entries := newEntries(2, defaultQueue)
	s.mustPublish(t, entries)
	if got := s.mustNext(t, 10); len(got) != 0 {
		t.Errorf("read that healed the group delivers %v", got)
	}
	if got := s.mustNext(t, 10); len(got) != 2 {
		t.Errorf("delivered %d, want the 2 that were there before the group", len(got))
	}
	if woken != 1 {
		t.Errorf("onUp was called %d times, want 1", woken)
	}
	// Field case 19: every other command on a missing group heals or ignores it.
	if err := s.fast.XGroupDestroy(t.Context(), s.name, s.group).Err(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.idleEntries(t.Context(), defaultQueue, 0, "-"); err != nil {
		t.Errorf("idleEntries without group: %v", err)
	}
	if err := s.fast.Del(t.Context(), s.name).Err(); err != nil {
		t.Fatal(err)
	}
	if err := s.keep(t.Context(), []message{{id: "1-1", queue: defaultQueue}}); err != nil {
		t.Errorf("keep without group: %v", err)
	}
	if err := s.drop(t.Context(), []message{{id: "1-1", queue: defaultQueue}}); err != nil {
		t.Errorf("drop without group: %v", err)
	}
	if age, err := s.undeliveredAge(t.Context(), defaultQueue); age != 0 || err != nil {
		t.Errorf("undeliveredAge without stream = %v, %v", age, err)
	}
}

// COUNT holds per stream: with several queues a read still returns no more than
// there are free slots, and heavier queues get more of them.
func TestStreamSharesSlots(t *testing.T) {
	t.Parallel()
	s := testStream(t, func(c *config) { c.Queues = []queueWeight{{"critical", 6}, {"default", 3}, {"low", 1}} })
	for _, q := range s.queues {
		s.mustPublish(t, newEntries(40, q.name))
	}
	got := make(map[string]int)
	for range 4 {
		messages := s.mustNext(t, 10)
		if len(messages) != 10 {
			t.Fatalf("read of 10 returned %d", len(messages))
		}
		for _, m := range messages {
			got[m.queue]++
		}
	}
	if got["critical"] != 24 || got["default"] != 12 || got["low"] != 4 {
		t.Errorf("shares of 40 = %v, want 24, 12, 4", got)
	}
	for range 40 {
		if n := len(s.mustNext(t, 1)); n > 1 {
			t.Fatalf("read of 1 returned %d", n)
		}
	}
	idle := testStream(t, func(c *config) { c.Queues = s.queues })
	for _, n := range []int{1, 2, 3, 10} {
		if got := idle.mustNext(t, n); len(got) != 0 {
			t.Errorf("empty streams deliver %v", got)
		}
	}
	idle.mustPublish(t, newEntries(1, "low"))
	eventually(t, "an entry of the lightest queue with one free slot", func() bool { return len(idle.mustNext(t, 1)) == 1 })
}

// Entries that heartbeats keep fresh must not hide
// the dead ones behind them.
func TestStreamFindsIdleBehindBusy(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	s.mustPublish(t, newEntries(250, defaultQueue))
	all := s.mustNext(t, 250)
	idle := 200 * time.Millisecond
	var found []idleEntry
	eventually(t, "100 entries idle behind 150 kept ones", func() bool {
		if err := s.keep(t.Context(), all[:150]); err != nil {
			t.Fatal(err)
		}
		found = nil
		for start := "-"; start != ""; {
			page, next, err := s.idleEntries(t.Context(), defaultQueue, idle, start)
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, page...)
			start = next
		}
		return len(found) == 100
	})
	for _, e := range found {
		if e.consumer != s.consumer || e.idle < idle || e.deliveries != 1 {
			t.Errorf("idle entry = %+v", e)
		}
	}
	ids := make([]string, len(found))
	for i, e := range found {
		ids[i] = e.id
	}
	taken, err := s.take(t.Context(), defaultQueue, ids, idle)
	if err != nil || len(taken) != 100 {
		t.Errorf("take = %d, %v, want 100", len(taken), err)
	}
	if again, err := s.take(t.Context(), defaultQueue, ids, time.Hour); err != nil || len(again) != 0 {
		t.Errorf("take of fresh entries = %d, %v, want none", len(again), err)
	}
}

// Field case 24: an entry that was deleted while pending is no error and does not
// come back.
func TestStreamForgetsDeletedEntries(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	s.mustPublish(t, newEntries(1, defaultQueue))
	m := s.mustNext(t, 1)[0]
	if err := s.fast.XDel(t.Context(), s.name, m.id).Err(); err != nil {
		t.Fatal(err)
	}
	taken, err := s.take(t.Context(), defaultQueue, []string{m.id}, 0)
	if err != nil || len(taken) != 0 {
		t.Errorf("take of a deleted entry = %v, %v, want nothing", taken, err)
	}
	if _, pending := s.counts(t, defaultQueue); pending != 0 {
		t.Errorf("%d pending, want 0", pending)
	}
}

// The guard against floods: only what no worker has seen counts, by Redis' clock.
func TestStreamUndeliveredAge(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	age := func() time.Duration {
		d, err := s.undeliveredAge(t.Context(), defaultQueue)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := age(); d != 0 {
		t.Errorf("age of nothing = %v, want 0", d)
	}
	s.mustPublish(t, newEntries(2, defaultQueue))
	eventually(t, "age grows", func() bool { return age() >= 50*time.Millisecond })
	s.mustNext(t, 1)
	if d := age(); d < 50*time.Millisecond || d > 10*time.Second {
		t.Errorf("age with one undelivered = %v", d)
	}
	s.mustNext(t, 1)
	if d := age(); d != 0 {
		t.Errorf("age with all delivered = %v, want 0", d)
	}
}

// Field case 22: names go when nothing is pending under them, and only then.
func TestStreamForgetsConsumers(t *testing.T) {
	t.Parallel()
	s := testStream(t)
	names := func() (names []string) {
		consumers, err := s.fast.XInfoConsumers(t.Context(), s.name, s.group).Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range consumers {
			names = append(names, c.Name)
		}
		return names
	}
	own := s.consumer
	for i := range 3 {
		s.consumer = fmt.Sprintf("dead-%d", i)
		s.mustPublish(t, newEntries(1, defaultQueue))
		messages := s.mustNext(t, 1)
		if i > 0 {
			if err := s.drop(t.Context(), messages); err != nil {
				t.Fatal(err)
			}
		}
	}
	s.consumer = own // Redis knows a consumer from its first delivery on
	s.mustPublish(t, newEntries(1, defaultQueue))
	if err := s.drop(t.Context(), s.mustNext(t, 1)); err != nil {
		t.Fatal(err)
	}
	if n, err := s.forgetConsumers(t.Context(), defaultQueue, time.Hour); n != 0 || err != nil {
		t.Errorf("forgetConsumers of fresh ones = %d, %v, want 0", n, err)
	}
	eventually(t, "two names forgotten", func() bool {
		_, err := s.forgetConsumers(t.Context(), defaultQueue, 10*time.Millisecond)
		return err == nil && slices.Equal(names(), []string{"dead-0", own})
	}, func() any { return names() })
	if err := s.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.consumer = "dead-0"
	if err := s.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := names(); !slices.Equal(got, []string{"dead-0"}) {
		t.Errorf("consumers = %v, want the one with a pending entry", got)
	}
}

// A full Redis refuses entries, is noticed once, and heals by itself;
// what was delivered can still be dropped.
func TestStreamFullRedis(t *testing.T) {
	t.Parallel()
	server := startRedisServer(t)
	s := testStream(t, func(c *config) { c.RedisURL = server.url })
	s.mustPublish(t, newEntries(3, defaultQueue))
	messages := s.mustNext(t, 3)
	full := func(limit string) {
		for setting, value := range map[string]string{"maxmemory-policy": "noeviction", "maxmemory": limit} {
			if err := s.fast.ConfigSet(t.Context(), setting, value).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	full("1")
	entries := newEntries(2, defaultQueue)
	failed, err := s.publish(t.Context(), entries)
	if len(failed) != 2 || err == nil || s.up() {
		t.Errorf("publish on a full Redis = %d failed, %v, up %v", len(failed), err, s.up())
	}
	if err := s.drop(t.Context(), messages); err != nil {
		t.Errorf("drop on a full Redis: %v", err)
	}
	if err := s.ensure(t.Context(), defaultQueue); err == nil {
		t.Error("probe of a full Redis succeeds")
	}
	full("0")
	done := make(chan error)
	go func() { done <- s.run(t.Context()) }()
	eventually(t, "breaker closed by the probe", s.up)
	s.mustPublish(t, entries)
}

// A Redis that does not answer costs a publish a time-out, not ten seconds.
func TestStreamDeadRedis(t *testing.T) {
	t.Parallel()
	server := startRedisServer(t)
	s := testStream(t, func(c *config) { c.RedisURL = server.url })
	server.stop()
	began := time.Now()
	if failed, err := s.publish(t.Context(), newEntries(3, defaultQueue)); len(failed) != 3 || err == nil {
		t.Errorf("publish = %d failed, %v", len(failed), err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("publish to a dead Redis took %v", took)
	}
	if err := server.start(); err != nil {
		t.Fatal(err)
	}
	if err := s.ensure(t.Context(), defaultQueue); err != nil {
		t.Errorf("after restart: %v", err)
	}
}

// Field cases 94, 96, 98 and 136: odd passwords work, wrong ones are named, and
// no error shows one.
func TestStreamURLs(t *testing.T) {
	t.Parallel()
	server := startRedisServer(t, "--requirepass", "p@s:s/w#1%?")
	dial := strings.Replace(server.url, "unix://", "unix://:p%40s%3As%2Fw%231%25%3F@", 1)
	cfg := fastConfig(t)
	s, err := openStream(testLog(t), cfg, dial)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if err := s.ensure(t.Context(), defaultQueue); err != nil {
		t.Errorf("with password: %v", err)
	}
	wrong, err := openStream(testLog(t), cfg, strings.Replace(server.url, "unix://", "unix://:secretword@", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer wrong.close()
	if err := wrong.ensure(t.Context(), defaultQueue); err == nil || strings.Contains(err.Error(), "secretword") {
		t.Errorf("with a wrong password: %v", err)
	}
	for _, bad := range []string{
		"redis://:p@s:secretword#1@host:6379", "http://:secretword@host", "redis://:secretword@host:notaport", "redis://:secretword@host/notadb",
		"redis://:secretword@host?master_name=m&dial_timeout=x", "redis://:secretword@host?addr=b&dial_timeout=x", "redis://:secretword@[::1",
	} {
		_, err := openStream(testLog(t), cfg, bad)
		if err == nil || strings.Contains(err.Error(), "secretword") {
			t.Errorf("openStream(%q) = %v, want an error without the password", bad, err)
		}
	}
	for _, good := range []string{"redis://[::1]:6379", "redis://a?master_name=m&addr=b:26379", "redis://a:1?addr=b:2&addr=c:3", "rediss://u:p@host/1"} {
		s, err := openStream(testLog(t), cfg, good)
		if err != nil {
			t.Errorf("openStream(%q): %v", good, err)
			continue
		}
		s.close()
	}
}

func TestNextID(t *testing.T) {
	for id, want := range map[string]string{"0-0": "0-1", "1700000000000-9": "1700000000000-10", "5-18446744073709551615": "5-18446744073709551615"} {
		if got := nextID(id); got != want {
			t.Errorf("nextID(%q) = %q, want %q", id, got, want)
		}
	}
}

// FuzzNewMessage: whatever an entry holds, either it names a task in the canonical form
// or it is to be dropped unseen.
func FuzzNewMessage(f *testing.F) {
	for _, seed := range []string{"01a22cc9-5011-796b-bb3f-53d77d8cd259", "", "rubbish", "{01a22cc9-5011-796b-bb3f-53d77d8cd259}",
		"urn:uuid:01a22cc9-5011-796b-bb3f-53d77d8cd259", "01a22cc95011796bbb3f53d77d8cd259", "01A22CC9-5011-796B-BB3F-53D77D8CD259", "\x00\xff"} {
		f.Add("1-1", taskIDField, seed)
	}
	f.Fuzz(func(t *testing.T, id, field, value string) {
		m := newMessage(defaultQueue, redis.XMessage{ID: id, Values: map[string]any{field: value}})
		if m.id != id || m.queue != defaultQueue {
			t.Errorf("message = %+v", m)
		}
		named := field == taskIDField && strings.EqualFold(m.taskID.String(), value)
		if (m.taskID != uuid.Nil) != named && value != uuid.Nil.String() {
			t.Errorf("entry %q=%q names task %v", field, value, m.taskID)
		}
		nextID(id)
	})
}
