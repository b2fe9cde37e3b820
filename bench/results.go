package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// key names what was measured, and of whom.
type key struct{ what, subject string }

// A sample is one repetition. What does not apply is zero.
type sample struct {
	round     int
	rate      float64       // tasks a second: posted, or completed where nothing is posted
	completed float64       // tasks a second that were completed end to end
	p50, p99  time.Duration // of what the measurement is about
	tasks     int
	cpu       cpu
	rss       float64 // MB, the largest seen
	growth    float64 // memory at the end over memory after a tenth of the run
	disturbed bool
}

func (s sample) String() string {
	var parts []string
	add := func(present bool, format string, args ...any) {
		if present {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(s.rate > 0, "%s/s", number(s.rate))
	add(s.completed > 0, "completed %s/s", number(s.completed))
	add(s.p50 > 0, "p50 %s p99 %s", millis(s.p50), millis(s.p99))
	add(s.rss > 0, "%.0f MB", s.rss)
	return strings.Join(parts, ", ")
}

// results holds all samples in the order in which their keys first came.
type results struct {
	order   []key
	samples map[key][]sample
}

func (r *results) add(k key, s sample) {
	if r.samples == nil {
		r.samples = map[key][]sample{}
	}
	if _, ok := r.samples[k]; !ok {
		r.order = append(r.order, k)
	}
	r.samples[k] = append(r.samples[k], s)
}

// A field is one figure of a sample.
type field func(sample) float64

func rate(s sample) float64      { return s.rate }
func completed(s sample) float64 { return s.completed }
func p50(s sample) float64       { return s.p50.Seconds() }
func p99(s sample) float64       { return s.p99.Seconds() }
func memory(s sample) float64    { return s.rss }
func growth(s sample) float64    { return s.growth }

// values returns a field of all samples of k.
func (r *results) values(k key, f field) []float64 {
	var list []float64
	for _, s := range r.samples[k] {
		list = append(list, f(s))
	}
	return list
}

// ratios divides a field of two keys round by round, so that a machine that drifts
// disturbs both alike.
func (r *results) ratios(of, to key, f field) []float64 {
	var list []float64
	for _, s := range r.samples[of] {
		i := slices.IndexFunc(r.samples[to], func(o sample) bool { return o.round == s.round })
		if i < 0 {
			continue
		}
		if d := f(r.samples[to][i]); d > 0 {
			list = append(list, f(s)/d)
		}
	}
	return list
}

// median returns the middle of values, or the mean of the two in the middle; 0 of none.
func median[T cmp.Ordered](values []T, mean func(a, b T) T) T {
	n := len(values)
	if n == 0 {
		return *new(T)
	}
	sorted := slices.Sorted(slices.Values(values))
	if n%2 == 1 {
		return sorted[n/2]
	}
	return mean(sorted[n/2-1], sorted[n/2])
}

func middle(values []float64) float64 {
	return median(values, func(a, b float64) float64 { return (a + b) / 2 })
}

// number writes v for people: three significant figures, thousands apart.
func number(v float64) string {
	switch {
	case v >= 1000:
		s := fmt.Sprintf("%.0f", v)
		for i := len(s) - 3; i > 0; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
		return s
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func millis(d time.Duration) string { return number(d.Seconds()*1000) + " ms" }
