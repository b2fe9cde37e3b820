package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

const (
	taskIDField  = "task_id"              // the only field of an entry: a hint carries no state
	commandLimit = 500 * time.Millisecond // what a dead Redis may cost one command
	probeEvery   = time.Second
	maxRead      = 512 // entries of one XREADGROUP, however many slots are free

	// pausedBlock is how long a reader waits at most while a queue of its is paused, so that it
	// soon notices the resumption.
	pausedBlock = 500 * time.Millisecond
)

// A message is one delivery of an entry to this consumer. Having it gives no
// right to run its task; only the claim in PostgreSQL does.
type message struct {
	id     string
	queue  string
	taskID uuid.UUID // uuid.Nil when the entry names no task: drop it unseen
}

// stream is the Redis Stream seen as one consumer of one group. Entries are hints:
// they may be lost, doubled or stale, and nothing breaks.
//
// Short commands go through a client that repeats nothing and gives up after half
// a second, so that a frozen Redis costs its callers one time-out; blocking reads
// have a client of their own.
type stream struct {
	log      *slog.Logger
	name     string
	group    string
	consumer string
	queues   []queueWeight
	block    time.Duration
	fast     redis.UniversalClient
	blocking redis.UniversalClient
	onUp     func() // called when Redis came back, or the group had to be made again
	reads    bool   // this process is a worker, and so to be counted as a reader of its queues

	paused atomic.Pointer[[]string] // queues that are not read
	down   atomic.Int64             // unix nanoseconds since when writes fail, 0 = they work
	mu     sync.Mutex               // orders changes of down with their log lines
}

// openStream builds the clients; it does not connect. An error never shows the
// password of the URL.
func openStream(log *slog.Logger, cfg config, redisURL string) (*stream, error) {
	fast, err := newRedisClient(redisURL, commandLimit)
	if err != nil {
		return nil, err
	}
	blocking, err := newRedisClient(redisURL, cfg.Block+commandLimit)
	if err != nil {
		return nil, err
	}
	return &stream{
		log:      log,
		name:     cfg.StreamName,
		group:    cfg.ConsumerGroup,
		consumer: cfg.ConsumerName,
		queues:   cfg.Queues,
		block:    cfg.Block,
		fast:     fast,
		blocking: blocking,
		onUp:     func() {},
	}, nil
}

// readable returns the queues that are not paused, and how long a reader of them may wait.
func (s *stream) readable() ([]queueWeight, time.Duration) {
	paused := s.paused.Load()
	if paused == nil || len(*paused) == 0 {
		return s.queues, s.block
	}
	queues := slices.DeleteFunc(slices.Clone(s.queues), func(q queueWeight) bool { return slices.Contains(*paused, q.name) })
	if len(queues) == len(s.queues) {
		return queues, s.block
	}
	return queues, min(s.block, pausedBlock)
}

func (s *stream) close() {
	s.fast.Close()
	s.blocking.Close()
}

// key is the Redis key of a queue's stream.
func (s *stream) key(queue string) string {
	if queue == defaultQueue {
		return s.name
	}
	return s.name + ":" + queue
}

// up reports whether Redis is believed to take writes. It costs nothing.
func (s *stream) up() bool { return s.down.Load() == 0 }

// downFor tells for how long Redis has refused writes; 0 when it takes them.
func (s *stream) downFor() time.Duration {
	if since := s.down.Load(); since != 0 {
		return time.Since(time.Unix(0, since))
	}
	return 0
}

// note records how a write went. Each change of state is one log line, so that an
// outage is two lines however long it lasts. It is a circuit breaker: while
// Redis is down nobody but the probe of run tries it.
func (s *stream) note(err error) {
	if (err == nil) == s.up() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil && s.up():
		s.down.Store(time.Now().UnixNano())
		s.log.Warn("redis away; workers take due tasks from postgres until it is back", "err", err)
	case err == nil && !s.up():
		s.log.Info("redis back", "down_ms", s.downFor().Milliseconds())
		s.down.Store(0)
		s.onUp()
	}
}

// run probes Redis until ctx ends. The probe is the creation of each group: it is
// refused when the server is away, full, read-only, still loading or cannot save, and it
// makes a missing group again. Between probes the breaker stays as it is.
func (s *stream) run(ctx context.Context) error {
	for {
		var err error
		for _, q := range s.queues {
			if err = s.ensure(ctx, q.name); err != nil {
				break
			}
			if s.reads {
				s.appear(ctx, q.name)
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		s.note(err)
		if !sleep(ctx, probeEvery) {
			return nil
		}
	}
}

// ensure makes a queue's stream and group when they are not there. The group
// starts from 0, never from $: entries that arrived before it was made again must
// be delivered.
func (s *stream) ensure(ctx context.Context, queue string) error {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	err := s.fast.XGroupCreateMkStream(ctx, s.key(queue), s.group, "0").Err()
	switch {
	case err == nil:
		s.log.Info("consumer group created", "stream", s.key(queue), "group", s.group)
		s.onUp()
		return nil
	case hasPrefix(err, "BUSYGROUP"):
		return nil
	}
	return fmt.Errorf("create group: %w", err)
}

// publish adds one entry per task and returns those whose entry is not known to
// be there, with the first error. One of them may be added after all: copies are harmless.
func (s *stream) publish(ctx context.Context, entries []entry) ([]entry, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	cmds, err := s.fast.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, add := range s.additions(ctx, entries) {
			p.Process(ctx, add) // queues it
		}
		return nil
	})
	if err == nil {
		s.note(nil)
		return nil, nil
	}
	var failed []entry
	for i, cmd := range cmds {
		if cmd.Err() != nil {
			failed = append(failed, entries[i])
		}
	}
	err = fmt.Errorf("publish: %w", err)
	s.note(err)
	return failed, err
}

// additions returns the XADD of each entry. What they are made of is allocated at once: one by
// one, as by XAdd, that is a sixth of what a submit allocates.
func (s *stream) additions(ctx context.Context, entries []entry) []*redis.StringCmd {
	const words = 5
	cmds := make([]*redis.StringCmd, len(entries))
	args := make([]any, 0, words*len(entries))
	ids := make([]string, len(entries))
	var key any
	for i, e := range entries {
		if i == 0 || e.queue != entries[i-1].queue {
			key = s.key(e.queue)
		}
		ids[i] = e.id.String()
		args = append(args, "xadd", key, "*", taskIDField, &ids[i])
		cmds[i] = redis.NewStringCmd(ctx, args[words*i:words*(i+1):words*(i+1)]...)
	}
	return cmds
}

// next returns up to n new messages of the queues that are not paused, or none after the blocking
// time. Redis cannot tell a cancelled reader from a waiting one, so the end of ctx
// does not interrupt it (redis/go-redis#2276): the blocking time bounds a shutdown.
// A missing group is made again, and nothing is returned.
func (s *stream) next(ctx context.Context, n int) ([]message, error) {
	n = min(n, maxRead)
	queues, block := s.readable()
	switch len(queues) {
	case 0:
		sleep(ctx, block)
		return nil, nil
	case 1:
		return s.read(ctx, queues, n, block)
	}
	var all []message
	order := shuffled(queues)
	total := 0
	for _, q := range order {
		total += q.weight
	}
	// First everybody's share by weight, then what is left in the same order.
	for _, pass := range []func(queueWeight) int{
		func(q queueWeight) int { return min(max(1, n*q.weight/total), n-len(all)) },
		func(queueWeight) int { return n - len(all) },
	} {
		for i := range order {
			count := pass(order[i])
			if count == 0 {
				return all, nil
			}
			messages, err := s.read(ctx, order[i:i+1], count, -1)
			if err != nil {
				return all, err
			}
			all = append(all, messages...)
		}
	}
	if len(all) > 0 {
		return all, nil
	}
	// COUNT holds for each stream of a call, so no more streams than free slots.
	order = order[:min(n, len(order))]
	messages, err := s.read(ctx, order, n/len(order), block)
	if hasPrefix(err, "CROSSSLOT") { // a cluster: the streams live on different nodes
		return s.read(ctx, order[:1], n, block/time.Duration(len(queues)))
	}
	return messages, err
}

// shuffled returns the queues in a random order in which a heavier one is likelier
// to come early.
func shuffled(queues []queueWeight) []queueWeight {
	rest := slices.Clone(queues)
	order := make([]queueWeight, 0, len(rest))
	for len(rest) > 0 {
		total := 0
		for _, q := range rest {
			total += q.weight
		}
		pick, i := rand.IntN(total), 0
		for pick >= rest[i].weight {
			pick -= rest[i].weight
			i++
		}
		order = append(order, rest[i])
		rest = slices.Delete(rest, i, i+1)
	}
	return order
}

// read is one XREADGROUP; block < 0 does not wait.
func (s *stream) read(ctx context.Context, queues []queueWeight, count int, block time.Duration) ([]message, error) {
	// The deadline frees a reader whose server froze while it waited.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(block, 0)+2*commandLimit)
	defer cancel()
	keys := make([]string, 0, 2*len(queues))
	byKey := make(map[string]string, len(queues))
	for _, q := range queues {
		keys = append(keys, s.key(q.name))
		byKey[s.key(q.name)] = q.name
	}
	for range queues {
		keys = append(keys, ">")
	}
	reply, err := s.blocking.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group:    s.group,
		Consumer: s.consumer,
		Streams:  keys,
		Count:    int64(count),
		Block:    block,
	}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return nil, nil
	case hasPrefix(err, "NOGROUP"), hasPrefix(err, "UNBLOCKED"):
		for _, q := range queues {
			if err := s.ensure(ctx, q.name); err != nil {
				return nil, err
			}
		}
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read stream: %w", err)
	}
	var messages []message
	for _, r := range reply {
		for _, m := range r.Messages {
			messages = append(messages, newMessage(byKey[r.Stream], m))
		}
	}
	return messages, nil
}

func newMessage(queue string, m redis.XMessage) message {
	text, _ := m.Values[taskIDField].(string)
	id, err := uuid.Parse(text)
	if err != nil || len(text) != 36 {
		id = uuid.Nil
	}
	return message{id: m.ID, queue: queue, taskID: id}
}

// drop acknowledges and deletes entries, in a plain pipeline: on a full Redis
// everything inside MULTI is refused, and the stream could never drain. Call it
// only after PostgreSQL answered about the tasks. What could not be dropped stays pending
// and is found again by the reclaimer.
func (s *stream) drop(ctx context.Context, messages []message) error {
	if len(messages) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	_, err := s.fast.Pipelined(ctx, func(p redis.Pipeliner) error {
		for queue, ids := range idsByQueue(messages) {
			p.XAck(ctx, s.key(queue), s.group, ids...)
			p.XDel(ctx, s.key(queue), ids...)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("drop entries: %w", err)
	}
	return nil
}

// keep resets the idle time of entries this consumer is working on, without
// counting a delivery, so that no reclaimer takes them.
func (s *stream) keep(ctx context.Context, messages []message) error {
	if len(messages) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*commandLimit)
	defer cancel()
	_, err := s.fast.Pipelined(ctx, func(p redis.Pipeliner) error {
		for queue, ids := range idsByQueue(messages) {
			p.XClaimJustID(ctx, &redis.XClaimArgs{Stream: s.key(queue), Group: s.group, Consumer: s.consumer, Messages: ids})
		}
		return nil
	})
	if err != nil && !hasPrefix(err, "NOGROUP") {
		return fmt.Errorf("keep entries: %w", err)
	}
	return nil
}

func idsByQueue(messages []message) map[string][]string {
	ids := make(map[string][]string)
	for _, m := range messages {
		ids[m.queue] = append(ids[m.queue], m.id)
	}
	return ids
}
