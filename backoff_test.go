package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The progression of the original: 1, 1, 2, 4, 8, 16, 30, 30 s.
func TestBackoffStep(t *testing.T) {
	b := backoff{base: time.Second, max: 30 * time.Second}
	want := []time.Duration{1, 1, 2, 4, 8, 16, 30, 30}
	for n, w := range want {
		if got := b.step(n); got != w*time.Second {
			t.Errorf("step(%d) = %v, want %v", n, got, w*time.Second)
		}
	}
}

// Field case 83: shifting overflows from n = 34 on.
func TestBackoffNeverOverflows(t *testing.T) {
	for _, base := range []time.Duration{time.Millisecond, time.Second, time.Hour} {
		for _, limit := range []time.Duration{base, 7 * base, 24 * time.Hour, 1<<63 - 1} {
			b := backoff{base: base, max: max(base, limit), jitter: 0.1}
			last := time.Duration(0)
			for _, n := range []int{-1, 0, 1, 2, 3, 10, 33, 34, 35, 61, 62, 63, 64, 1000, 1_000_000} {
				d := b.step(n)
				if d < base || d > b.max || d < last {
					t.Fatalf("backoff{%v, %v}.step(%d) = %v after %v", b.base, b.max, n, d, last)
				}
				last = d
			}
		}
	}
}

// Field case 85: retries spread, and none is above the cap or piles up on it.
func TestBackoffJitter(t *testing.T) {
	b := backoff{base: time.Second, max: 30 * time.Second, jitter: 0.1}
	for _, n := range []int{1, 3, 20} {
		step, atMax := b.step(n), 0
		low, high := b.max, time.Duration(0)
		for range 2000 {
			d := b.delay(n)
			if d > b.max || d < step-step/10 || d > step+step/10 {
				t.Fatalf("delay(%d) = %v, step %v", n, d, step)
			}
			low, high = min(low, d), max(high, d)
			if d == b.max {
				atMax++
			}
		}
		wantSpread := step * 15 / 100
		if step == b.max {
			wantSpread = step * 8 / 100
		}
		if high-low < wantSpread {
			t.Errorf("delay(%d) spreads over %v, want at least %v", n, high-low, wantSpread)
		}
		if atMax > 20 {
			t.Errorf("delay(%d) was the cap itself %d times of 2000", n, atMax)
		}
	}
	if d := (backoff{base: time.Second, max: time.Minute}).delay(2); d != 2*time.Second {
		t.Errorf("delay without jitter = %v, want 2s", d)
	}
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if !sleep(t.Context(), time.Hour) || time.Since(began) != time.Hour {
			t.Errorf("slept %v, want 1h", time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began = time.Now()
		if sleep(ctx, time.Hour) || time.Since(began) != time.Minute {
			t.Errorf("interrupted sleep took %v, want 1m", time.Since(began))
		}
	})
}

func BenchmarkBackoffDelay(b *testing.B) {
	s := backoff{base: time.Second, max: 30 * time.Second, jitter: 0.1}
	for b.Loop() {
		s.delay(7)
	}
}
