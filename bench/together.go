package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

const (
	together64     = "posting and completing"
	drained        = "drain"
	memorySteady   = "memory"
	togetherConns  = 64
	warmUpConns    = 16
	memoryInterval = 100 * time.Millisecond
)

// together measures posting while the same service works off what is posted, one service
// at a time.
func (b *bench) together(ctx context.Context) error {
	type run struct {
		subject
		as   string
		keys bool
	}
	runs := []run{
		{nexusflowSubject(), "nexusflow", false}, {nexusflowSubject(), withKeys, true},
		{asynqSubject(), "asynq", false}, {riverSubject(), "river", false}, {obviousSubject(), "obvious", false},
	}
	for _, r := range rotated(runs, b.round) {
		l := load{conns: togetherConns, span: b.opts.span, keys: r.keys}
		step := func(ctx context.Context) (sample, error) { return b.endToEnd(ctx, r.subject, l) }
		if err := b.measure(ctx, together64, r.as, step); err != nil {
			return err
		}
	}
	return nil
}

// endToEnd starts a subject afresh, posts and waits until everything is completed. The
// completed rate counts from the first POST to the last completion.
func (b *bench) endToEnd(ctx context.Context, s subject, l load) (out sample, err error) {
	if err := b.fresh(ctx, s); err != nil {
		return out, err
	}
	p, err := b.start(ctx, s, s.workers, false)
	if err != nil {
		return out, err
	}
	defer stopAll(p)
	l.addr = p.addr
	begin := time.Now()
	warm, err := load{addr: p.addr, conns: warmUpConns, span: 300 * time.Millisecond}.run(ctx)
	if err != nil {
		return out, err
	}
	if _, err := b.waitDone(ctx, s, p, begin, warm.tasks); err != nil {
		return out, err
	}

	watch := watchMemory(p.pid())
	m := b.newMeter(p)
	begin = time.Now()
	done, err := l.run(ctx)
	if err != nil {
		watch.stop()
		return out, fmt.Errorf("%w; %s", err, p.tail())
	}
	n := done.tasks
	if s.since == "" {
		n += warm.tasks // asynq's counter has no beginning
	}
	all, err := b.waitDone(ctx, s, p, begin, n)
	out = done.sample(m.stop())
	sizes := watch.stop()
	if err != nil {
		return out, err
	}
	out.completed = float64(done.tasks) / all.last.Sub(begin).Seconds()
	out.rss = slices.Max(sizes)
	out.growth = grew(sizes)
	return out, nil
}

// grew returns the size in the last tenth of a series over that in the second, when caches
// and pools are warm; 0 when the series is too short to tell.
func grew(sizes []float64) float64 {
	tenth := len(sizes) / 10
	if tenth == 0 {
		return 0
	}
	return middle(sizes[len(sizes)-tenth:]) / middle(sizes[tenth:2*tenth])
}

// memory posts and completes many tasks and watches the memory of the process.
func (b *bench) memory(ctx context.Context) error {
	l := load{conns: togetherConns, count: b.opts.memory}
	return b.measure(ctx, memorySteady, "nexusflow", func(ctx context.Context) (sample, error) { return b.endToEnd(ctx, nexusflowSubject(), l) })
}

// A memoryWatch collects the memory of a process until stop.
type memoryWatch struct {
	quit chan struct{}
	list chan []float64
}

func watchMemory(pid int) *memoryWatch {
	w := &memoryWatch{quit: make(chan struct{}), list: make(chan []float64)}
	go func() {
		tick := time.NewTicker(memoryInterval)
		defer tick.Stop()
		var sizes []float64
		for {
			if mb, err := rss(pid); err == nil { // an error means that the process ended, which others report
				sizes = append(sizes, mb)
			}
			select {
			case <-tick.C:
			case <-w.quit:
				w.list <- sizes
				return
			}
		}
	}()
	return w
}

// stop returns what was seen, in MB; at least one size if the process lived.
func (w *memoryWatch) stop() []float64 {
	close(w.quit)
	return <-w.list
}

// drain measures how fast tasks that wait already are worked off: each subject in its best
// documented configuration, peers without a gateway and with handlers that keep no result.
func (b *bench) drain(ctx context.Context) error {
	for _, s := range rotated([]subject{nexusflowSubject(), asynqSubject(), riverSubject()}, b.round) {
		switch s.name {
		case "nexusflow":
			s.workers = nexusflowDrainWorkers
		case "river":
			s.workers = riverDrainWorkers
		}
		if err := b.measure(ctx, drained, s.name, func(ctx context.Context) (sample, error) { return b.drainOf(ctx, s) }); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) drainOf(ctx context.Context, s subject) (out sample, err error) {
	if err := b.fresh(ctx, s); err != nil {
		return out, err
	}
	begin := time.Now()
	if err := b.preload(ctx, s); err != nil {
		return out, err
	}
	m := b.newMeter()
	p, all, err := b.workOff(ctx, s, begin)
	if err != nil {
		return out, err
	}
	defer stopAll(p)
	m.apps = []*process{p} // it used nothing before it was started
	out = sample{rate: float64(b.opts.drain) / all.last.Sub(all.first).Seconds(), tasks: b.opts.drain, cpu: m.stop()}
	out.rss, err = rss(p.pid())
	return out, err
}

// workOff starts a subject on what waits and returns it when all is done.
func (b *bench) workOff(ctx context.Context, s subject, since time.Time) (*process, finished, error) {
	// asynq counts in Redis and is watched from the beginning; the others keep times.
	type result struct {
		finished
		err error
	}
	counted := make(chan result, 1)
	watched, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if s.since == "" {
		go func() {
			client := b.redisClient(s.redisDB)
			defer client.Close()
			f, err := asynqDone(watched, client, b.opts.drain)
			counted <- result{f, err}
		}()
	}
	p, err := b.start(ctx, s, s.workers, true)
	if err != nil {
		return nil, finished{}, err
	}
	var r result
	if s.since == "" {
		r = <-counted
	} else {
		r.finished, r.err = b.waitDone(ctx, s, p, since, b.opts.drain)
	}
	if r.err != nil {
		stopAll(p)
		return nil, r.finished, r.err
	}
	return p, r.finished, nil
}

// preload makes the tasks of a drain wait.
func (b *bench) preload(ctx context.Context, s subject) error {
	switch s.name {
	case "asynq":
		return loadAsynq(ctx, b.redis.addr, s.redisDB, b.opts.drain)
	case "river":
		return loadRiver(ctx, b.postgres.url(s.name), b.opts.drain)
	}
	p, err := b.start(ctx, s, 0, false)
	if err != nil {
		return err
	}
	defer stopAll(p)
	_, err = load{addr: p.addr, conns: togetherConns, count: b.opts.drain}.run(ctx)
	return err
}
