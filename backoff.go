package main

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff is the schedule of delays between the attempts of a task, and of every
// loop that waits for a server to come back.
type backoff struct {
	base   time.Duration // delay before the first retry; > 0
	max    time.Duration // no delay is longer; >= base
	jitter float64       // 0 to 1: the share by which a delay may be shorter or longer
}

// step returns the delay before retry n (from 0) without jitter: base, base, 2*base,
// 4*base and so on up to max, the progression of the original. It doubles
// until it meets the cap and so cannot overflow, however large n is.
func (b backoff) step(n int) time.Duration {
	d := min(b.base, b.max)
	for range n - 1 {
		if d > b.max/2 {
			return b.max
		}
		d *= 2
	}
	return d
}

// delay returns a wait drawn evenly from step(n) less and plus its jitter. The
// upper end is cut at max before the draw, so that waits do not pile up on it.
func (b backoff) delay(n int) time.Duration {
	d := b.step(n)
	low := d - time.Duration(b.jitter*float64(d))
	high := min(d+time.Duration(b.jitter*float64(d)), b.max)
	if high <= low {
		return d
	}
	return low + rand.N(high-low+1)
}

// reconnect is how loops wait for a server that is away.
var reconnect = backoff{base: 100 * time.Millisecond, max: 2 * time.Second, jitter: 0.2}

// sleep waits for d or until ctx ends, and reports whether it slept to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// doneBefore waits for done until deadline and reports whether it came.
func doneBefore(done <-chan struct{}, deadline time.Time) bool {
	t := time.NewTimer(time.Until(deadline))
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}
