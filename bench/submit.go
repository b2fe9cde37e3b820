package main

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5"
)

// levels are the numbers of connections of the submit suite.
func levels() []int { return []int{1, 16, 64, 256} }

func submitting(conns int) string {
	if conns == 1 {
		return "submit, 1 connection"
	}
	return fmt.Sprintf("submit, %d connections", conns)
}

const (
	withKeys   = "nexusflow+keys" // an Idempotency-Key on every request
	bareInsert = "bare INSERT"    // one connection of pgx, no HTTP
	producers  = 32               // goroutines that enqueue without HTTP
	enqueuing  = "enqueue without HTTP, 32 goroutines"
)

// submit measures how fast tasks are taken in when nobody works on them. All services are
// up at once and measured in turn, level by level.
func (b *bench) submit(ctx context.Context) error {
	subjects := []subject{nexusflowSubject(), echoSubject(), insertSubject(), asynqSubject(), riverSubject()}
	services := map[string]*process{}
	for _, s := range subjects {
		if err := b.fresh(ctx, s); err != nil {
			return err
		}
		p, err := b.start(ctx, s, 0, false)
		if err != nil {
			return err
		}
		defer stopAll(p)
		services[s.name] = p
	}
	names := []string{"nexusflow", "echo", "insert", withKeys, "asynq", "river"}
	for _, conns := range levels() {
		for _, name := range rotated(names, b.round) {
			l := load{conns: conns, span: b.opts.span}
			p := services[name]
			if name == withKeys {
				p = services["nexusflow"]
				l.keys = true
			}
			l.addr = p.addr
			if err := b.measure(ctx, submitting(conns), name, func(ctx context.Context) (sample, error) { return b.post(ctx, p, l) }); err != nil {
				return err
			}
		}
		if conns > 1 {
			continue
		}
		if err := b.measure(ctx, submitting(1), bareInsert, b.insertAlone); err != nil {
			return err
		}
	}
	if err := b.measure(ctx, enqueuing, "asynq", b.asynqAlone); err != nil {
		return err
	}
	return b.measure(ctx, enqueuing, "river", b.riverAlone)
}

// post warms the service up with the same load and then measures it.
func (b *bench) post(ctx context.Context, p *process, l load) (s sample, err error) {
	warm := l
	warm.span = b.opts.span / 5
	if _, err := warm.run(ctx); err != nil {
		return s, err
	}
	m := b.newMeter(p)
	done, err := l.run(ctx)
	if err != nil {
		return s, fmt.Errorf("%w; %s", err, p.tail())
	}
	s = done.sample(m.stop())
	s.rss, err = rss(p.pid())
	return s, err
}

// insertAlone measures single INSERTs, one commit each, on one connection without HTTP.
func (b *bench) insertAlone(ctx context.Context) (s sample, err error) {
	conn, err := pgx.Connect(ctx, b.postgres.url("insert"))
	if err != nil {
		return s, fmt.Errorf("connect to postgres: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return b.calls(ctx, 1, func(_, seq int) error {
		id, err := uuid.NewV7()
		if err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, plainInsert, id, taskName, appendPayload(nil, seq)); err != nil {
			return fmt.Errorf("insert task: %w", err)
		}
		return nil
	})
}

// asynqAlone measures asynq used without a gateway.
func (b *bench) asynqAlone(ctx context.Context) (sample, error) {
	client := asynq.NewClient(asynqRedis(b.redis.addr, asynqSubject().redisDB))
	defer client.Close()
	return b.calls(ctx, producers, func(_, seq int) error {
		_, err := client.EnqueueContext(ctx, asynq.NewTask(taskName, appendPayload(nil, seq)))
		return err
	})
}

// riverAlone measures River used without a gateway.
func (b *bench) riverAlone(ctx context.Context) (sample, error) {
	q, err := openRiver(ctx, serveOptions{database: b.postgres.url("river")})
	if err != nil {
		return sample{}, err
	}
	defer q.close()
	return b.calls(ctx, producers, func(_, seq int) error {
		_, err := q.enqueue(ctx, taskName, appendPayload(nil, seq))
		return err
	})
}

// calls measures a closed loop of calls from this program, after warming up with the same.
func (b *bench) calls(ctx context.Context, workers int, call func(worker, seq int) error) (s sample, err error) {
	if _, err := closedLoop(ctx, workers, b.opts.span/5, 0, call); err != nil {
		return s, err
	}
	m := b.newMeter()
	done, err := closedLoop(ctx, workers, b.opts.span, 0, call)
	return done.sample(m.stop()), err
}
