package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// An idleEntry is one that was delivered and neither dropped nor kept for a while.
type idleEntry struct {
	id         string
	consumer   string
	idle       time.Duration
	deliveries int64
}

const idlePage = 100

// idleEntries returns a page of the entries of a queue that have been idle for at least
// minIdle, from the id start on ("-" = the first), and the id to go on from: empty
// after the last page. The filter is on the server's side: a page of the oldest
// entries, kept fresh by heartbeats, would hide the dead ones behind it.
func (s *stream) idleEntries(ctx context.Context, queue string, minIdle time.Duration, start string) ([]idleEntry, string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	pending, err := s.fast.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: s.key(queue),
		Group:  s.group,
		Idle:   minIdle,
		Start:  start,
		End:    "+",
		Count:  idlePage,
	}).Result()
	if hasPrefix(err, "NOGROUP") {
		return nil, "", s.ensure(ctx, queue)
	}
	if err != nil {
		return nil, "", fmt.Errorf("list idle entries: %w", err)
	}
	entries := make([]idleEntry, len(pending))
	for i, p := range pending {
		entries[i] = idleEntry{id: p.ID, consumer: p.Consumer, idle: p.Idle, deliveries: p.RetryCount}
	}
	if len(pending) < idlePage {
		return entries, "", nil
	}
	return entries, nextID(pending[len(pending)-1].ID), nil
}

// take moves idle entries to this consumer. Of several callers one wins each
// entry; an entry that was deleted meanwhile leaves the pending list (Redis 7) and does
// not come back.
func (s *stream) take(ctx context.Context, queue string, ids []string, minIdle time.Duration) ([]message, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	claimed, err := s.fast.XClaim(ctx, &redis.XClaimArgs{
		Stream:   s.key(queue),
		Group:    s.group,
		Consumer: s.consumer,
		MinIdle:  minIdle,
		Messages: ids,
	}).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("claim idle entries: %w", err)
	}
	messages := make([]message, len(claimed))
	for i, m := range claimed {
		messages[i] = newMessage(queue, m)
	}
	return messages, nil
}

// readerAlive is the silence after which a consumer does not count as a reader any more; it
// appears every second.
const readerAlive = 5 * time.Second

// appear makes this consumer known in a queue's group and seen just now, which reading does only if
// there is something to read (before Redis 7.2). It asks for what is pending under its name
// behind an id that no entry has: nothing. (The largest id of all would mean ">", new entries.)
// Nobody depends on it but those who look.
func (s *stream) appear(ctx context.Context, queue string) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	const last = "18446744073709551614-0"
	err := s.fast.XReadGroup(ctx, &redis.XReadGroupArgs{Group: s.group, Consumer: s.consumer, Streams: []string{s.key(queue), last}, Count: 1, Block: -1}).Err()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.log.Debug("appear", "queue", queue, "err", err)
	}
}

// readers counts the workers of each queue that appeared a moment ago. A queue without a
// stream has none.
func (s *stream) readers(ctx context.Context, queues []string) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	cmds := make([]*redis.XInfoConsumersCmd, len(queues))
	s.fast.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its own error
		for i, queue := range queues {
			cmds[i] = p.XInfoConsumers(ctx, s.key(queue), s.group)
		}
		return nil
	})
	counts := make(map[string]int, len(queues))
	for i, cmd := range cmds {
		consumers, err := cmd.Result()
		if err != nil && !hasPrefix(err, "NOGROUP") && !strings.Contains(err.Error(), "no such key") {
			return nil, fmt.Errorf("list consumers: %w", err)
		}
		for _, c := range consumers {
			if c.Idle <= readerAlive {
				counts[queues[i]]++
			}
		}
	}
	return counts, nil
}

// undeliveredAge tells how long the oldest entry that no worker has seen yet has
// waited, by Redis' own clock; 0 when there is none. It does not use the group's
// lag, which is null or wrong once entries are deleted (redis/redis#13337).
func (s *stream) undeliveredAge(ctx context.Context, queue string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*commandLimit)
	defer cancel()
	groups, err := s.fast.XInfoGroups(ctx, s.key(queue)).Result()
	if err != nil && !strings.Contains(err.Error(), "no such key") {
		return 0, fmt.Errorf("inspect group: %w", err)
	}
	last := "0-0"
	for _, g := range groups {
		if g.Name == s.group {
			last = g.LastDeliveredID
		}
	}
	oldest, err := s.fast.XRangeN(ctx, s.key(queue), nextID(last), "+", 1).Result()
	if err != nil {
		return 0, fmt.Errorf("find oldest entry: %w", err)
	}
	if len(oldest) == 0 {
		return 0, nil
	}
	now, err := s.fast.Time(ctx).Result()
	if err != nil {
		return 0, fmt.Errorf("ask redis for its time: %w", err)
	}
	ms, _, _ := strings.Cut(oldest[0].ID, "-")
	added, err := strconv.ParseInt(ms, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read entry id %q: %w", oldest[0].ID, err)
	}
	return max(0, now.Sub(time.UnixMilli(added))), nil
}

// A streamDepth is what is in streams.
type streamDepth struct {
	length    int64 // entries
	pending   int64 // of these, delivered and not dropped
	consumers int   // names of processes, the dead of the last hour among them
}

// lag is how many entries nobody has seen. Redis' own figure is null or wrong once entries are
// deleted (redis/redis#13337); acknowledged ones are deleted here, so the rest are undelivered.
func (d streamDepth) lag() int64 { return max(0, d.length-d.pending) }

// depth sums up the streams of the given queues. While writes fail it does not ask.
func (s *stream) depth(ctx context.Context, queues []string) (d streamDepth, err error) {
	if !s.up() {
		return d, errors.New("inspect streams: redis is away")
	}
	lengths, groups := make([]*redis.IntCmd, len(queues)), make([]*redis.XInfoConsumersCmd, len(queues))
	// The commands' own errors count: one for a stream that is not there yet is none.
	_, _ = s.fast.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, q := range queues {
			lengths[i] = p.XLen(ctx, s.key(q))
			groups[i] = p.XInfoConsumers(ctx, s.key(q), s.group)
		}
		return nil
	})
	names := make(map[string]bool)
	for i := range queues {
		n, err := lengths[i].Result()
		if err != nil {
			return d, fmt.Errorf("measure stream: %w", err)
		}
		d.length += n
		consumers, err := groups[i].Result()
		if err != nil && !hasPrefix(err, "NOGROUP") && !strings.Contains(err.Error(), "no such key") {
			return d, fmt.Errorf("inspect group: %w", err)
		}
		for _, c := range consumers {
			d.pending += c.Pending
			names[c.Name] = true
		}
	}
	d.consumers = len(names)
	return d, nil
}

// nextID is the smallest entry id after id. XPENDING and XRANGE know an exclusive
// form, "(id", but not every server that speaks the protocol does.
func nextID(id string) string {
	ms, seq, _ := strings.Cut(id, "-")
	n, err := strconv.ParseUint(seq, 10, 64)
	if err != nil || n+1 == 0 {
		return id
	}
	return ms + "-" + strconv.FormatUint(n+1, 10)
}

// Deleting a consumer deletes its pending list too, and those entries could never be
// delivered again; so the check and the deletion are one script.
var (
	deleteConsumer = redis.NewScript(`
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
	local c = {}
	for i = 1, #consumer, 2 do c[consumer[i]] = consumer[i + 1] end
	if c.name == ARGV[2] and c.pending == 0 then
		redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c.name)
	end
end`)
	deleteIdleConsumers = redis.NewScript(`
local deleted = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
	local c = {}
	for i = 1, #consumer, 2 do c[consumer[i]] = consumer[i + 1] end
	if c.name ~= ARGV[2] and c.pending == 0 and c.idle > tonumber(ARGV[3]) then
		redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c.name)
		deleted = deleted + 1
	end
end
return deleted`)
)

// leave removes this consumer from the groups, except where entries are still
// pending under its name.
func (s *stream) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	for _, q := range s.queues {
		err := deleteConsumer.Run(ctx, s.fast, []string{s.key(q.name)}, s.group, s.consumer).Err()
		if err != nil && !errors.Is(err, redis.Nil) {
			return fmt.Errorf("leave group: %w", err)
		}
	}
	return nil
}

// forgetConsumers removes consumers of a queue that have nothing pending and have
// not been seen for longer than idle: processes that were killed.
func (s *stream) forgetConsumers(ctx context.Context, queue string, idle time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	n, err := deleteIdleConsumers.Run(ctx, s.fast, []string{s.key(queue)}, s.group, s.consumer, idle.Milliseconds()).Int()
	if err != nil {
		return 0, fmt.Errorf("remove idle consumers: %w", err)
	}
	return n, nil
}
