package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// A comparison is one line of the report: a figure of NexusFlow over another one. Without
// a bound it is for information.
type comparison struct {
	text    string
	of, to  key   // to is zero when the figure itself is compared
	f       field // of both; of "of" alone when fto is there
	fto     field
	bound   float64
	atMost  bool
	percent bool
}

func nexus(what string) key { return key{what, "nexusflow"} }

// comparisons are the targets of issue 4, each beside what else tells how it came about.
func (b *bench) comparisons() []comparison {
	var list []comparison
	list = append(list, submitComparisons()...)
	list = append(list,
		comparison{text: "posting and completing: completed, times River behind the gateway", of: nexus(together64), to: key{together64, "river"}, f: completed, bound: 5},
		comparison{text: "... completed, times asynq behind the gateway", of: nexus(together64), to: key{together64, "asynq"}, f: completed, bound: 2.5},
		comparison{text: "... completed, times the obvious implementation", of: nexus(together64), to: key{together64, "obvious"}, f: completed},
		comparison{text: "... POST rate, times River's", of: nexus(together64), to: key{together64, "river"}, f: rate, bound: 5},
		comparison{text: "... POST rate, times asynq's", of: nexus(together64), to: key{together64, "asynq"}, f: rate},
		comparison{text: "... POST rate with Idempotency-Key, of the rate without", of: key{together64, withKeys}, to: nexus(together64), f: rate, bound: 0.8, percent: true},
		comparison{text: "... completed with Idempotency-Key, of the rate without", of: key{together64, withKeys}, to: nexus(together64), f: completed, bound: 0.8, percent: true},
		comparison{text: fmt.Sprintf("drain of %s, times asynq", number(float64(b.opts.drain))), of: nexus(drained), to: key{drained, "asynq"}, f: rate, bound: 5},
		comparison{text: fmt.Sprintf("drain of %s, times River", number(float64(b.opts.drain))), of: nexus(drained), to: key{drained, "river"}, f: rate, bound: 2},
		comparison{text: toHandler + ": p50, times INSERT + XADD", of: nexus(toHandler), to: key{toHandler, commitAndAdd}, f: p50, bound: 2, atMost: true},
		comparison{text: toHandler + ": p99, times INSERT + XADD", of: nexus(toHandler), to: key{toHandler, commitAndAdd}, f: p99, bound: 3, atMost: true},
		comparison{text: toVisible + ": p50, of asynq's", of: nexus(toVisible), to: key{toVisible, "asynq"}, f: p50, percent: true},
		comparison{text: toVisible + ": p99, of asynq's", of: nexus(toVisible), to: key{toVisible, "asynq"}, f: p99, bound: 0.5, atMost: true, percent: true},
		comparison{text: toVisible + ": p50, of River's", of: nexus(toVisible), to: key{toVisible, "river"}, f: p50, percent: true},
		comparison{text: toVisible + ": p99, of River's", of: nexus(toVisible), to: key{toVisible, "river"}, f: p99, percent: true},
	)
	for _, rows := range b.opts.rows[1:] {
		g, small := grownTable{rows: rows}, grownTable{rows: b.opts.rows[0]}
		for _, what := range []string{"submit", "drain"} {
			list = append(list, comparison{text: g.name(what) + ", of the rate with " + number(float64(small.rows)), of: nexus(g.name(what)), to: nexus(small.name(what)), f: rate, bound: 0.85, percent: true})
		}
	}
	return append(list,
		comparison{text: number(float64(b.opts.retries)) + " due retries moved, a second", of: nexus(dueRetries), f: rate, bound: 20_000},
		comparison{text: "submit while they are moved, of the rate before", of: nexus(duringMoves), to: nexus(duringMoves), f: completed, fto: rate, bound: 0.8, percent: true},
		comparison{text: fmt.Sprintf("memory at %d tasks a second, MB", latencyRate), of: nexus(toHandler), f: memory, bound: 60, atMost: true},
		comparison{text: fmt.Sprintf("memory at full rate over %s tasks, most, MB", number(float64(b.opts.memory))), of: nexus(memorySteady), f: memory, bound: 60, atMost: true},
		comparison{text: "... in the last tenth, of that in the second tenth", of: nexus(memorySteady), f: growth, bound: 1.1, atMost: true, percent: true},
	)
}

func submitComparisons() []comparison {
	list := []comparison{
		{text: submitting(1) + ": p50, of one INSERT behind the same net/http", of: nexus(submitting(1)), to: key{submitting(1), "insert"}, f: p50, bound: 1.1, atMost: true, percent: true},
		{text: "... p50, of one INSERT without HTTP", of: nexus(submitting(1)), to: key{submitting(1), bareInsert}, f: p50, bound: 1.1, atMost: true, percent: true},
	}
	for _, conns := range levels() {
		what := submitting(conns)
		of := nexus(what)
		insert := comparison{text: what + ", times one INSERT per request", of: of, to: key{what, "insert"}, f: rate}
		bare := comparison{text: "... of the bare echo", of: of, to: key{what, "echo"}, f: rate, percent: true}
		switch conns {
		case 64:
			insert.bound, bare.bound = 4, 0.6
		case 256:
			insert.bound, bare.bound = 4, 0.75
		}
		list = append(list, insert, bare,
			comparison{text: "... times asynq behind the gateway", of: of, to: key{what, "asynq"}, f: rate},
			comparison{text: "... times River behind the gateway", of: of, to: key{what, "river"}, f: rate},
			comparison{text: "... with Idempotency-Key, of the rate without", of: key{what, withKeys}, to: of, f: rate, percent: true})
	}
	return list
}

// ratios returns the value of c in each round.
func (c comparison) ratios(r *results) []float64 {
	if c.to == (key{}) {
		return r.values(c.of, c.f)
	}
	if c.fto == nil {
		return r.ratios(c.of, c.to, c.f)
	}
	var list []float64
	for _, s := range r.samples[c.of] {
		if d := c.fto(s); d > 0 {
			list = append(list, c.f(s)/d)
		}
	}
	return list
}

func (c comparison) show(v float64) string {
	if c.percent {
		return fmt.Sprintf("%.0f %%", 100*v)
	}
	return number(v)
}

// target returns what is asked for and whether median meets it.
func (c comparison) target(median float64) (text, verdict string) {
	if c.bound == 0 {
		return "", ""
	}
	sign, met := "≥", median >= c.bound
	if c.atMost {
		sign, met = "≤", median <= c.bound
	}
	verdict = "**not met**"
	if met {
		verdict = "met"
	}
	return sign + " " + c.show(c.bound), verdict
}

// report writes everything as markdown; failure is why it is not complete, or nil.
func (b *bench) report(ctx context.Context, took time.Duration, failure error) string {
	var w strings.Builder
	b.head(ctx, &w, took)
	if failure != nil {
		fmt.Fprintf(&w, "**Incomplete**: %v\n\n", failure)
	}
	fmt.Fprintln(&w, "## Ratios\n\n| NexusFlow ... | median | of the rounds | target | |\n|---|---:|---:|---:|---|")
	for _, c := range b.comparisons() {
		values := c.ratios(&b.results)
		if len(values) == 0 {
			continue
		}
		m := middle(values)
		target, verdict := c.target(m)
		fmt.Fprintf(&w, "| %s | %s | %s – %s | %s | %s |\n", c.text, c.show(m), c.show(slices.Min(values)), c.show(slices.Max(values)), target, verdict)
	}
	fmt.Fprintln(&w, "\n## Figures\n\nCPU is in µs a task, of the service (app), PostgreSQL (pg), Redis and the load generator. MB is the memory of the service.\n\n"+
		"| measurement | subject | per second | completed | p50 | p99 | app | pg | redis | load | MB | disturbed |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	order := slices.Clone(b.results.order)
	slices.SortStableFunc(order, func(a, c key) int { return b.firstOf(a.what) - b.firstOf(c.what) })
	for _, k := range order {
		b.figures(&w, k)
	}
	return w.String()
}

// firstOf returns where a measurement first came, by which the subjects of one stand together.
func (b *bench) firstOf(what string) int {
	return slices.IndexFunc(b.results.order, func(k key) bool { return k.what == what })
}

// head writes what the figures belong to.
func (b *bench) head(ctx context.Context, w *strings.Builder, took time.Duration) {
	mode, disturbed, all := "full", 0, 0
	if b.opts.quick {
		mode = "QUICK, one short repetition: an impression only"
	}
	for _, list := range b.results.samples {
		for _, s := range list {
			all++
			if s.disturbed {
				disturbed++
			}
		}
	}
	fmt.Fprintf(w, "# Benchmark results\n\n%s, commit %s; %s; rounds: %d; took %s.\n", time.Now().UTC().Format("2006-01-02 15:04 UTC"), commit(ctx), mode, b.opts.rounds, took.Round(time.Second))
	fmt.Fprintf(w, "%d CPUs (%s), shared by load, service, PostgreSQL and Redis; PostgreSQL %s with fsync and synchronous_commit on, Redis %s without persistence, %s; asynq %s, River %s.\n",
		runtime.NumCPU(), processor(), b.postgres.version, b.redis.version, runtime.Version(), module("github.com/hibiken/asynq"), module("github.com/riverqueue/river"))
	fmt.Fprintf(w, "Load: the client in load.go, the same for all; no-op handlers, payload of about 100 bytes; NexusFlow with WORKER_CONCURRENCY=%d (drain: %d), asynq with %d workers looking every %v, River with %d workers (drain: %d), FetchCooldown %v and FetchPollInterval %v.\n",
		nexusflowWorkers, nexusflowDrainWorkers, asynqWorkers, asynqCheck, riverWorkers, riverDrainWorkers, riverFetchCooldown, riverFetchPoll)
	fmt.Fprintf(w, "%d of %d samples were disturbed: processes outside the run used more than %.1f cores in all %d tries.\n\n", disturbed, all, b.opts.maxOther, b.opts.tries)
}

// figures writes the medians of one key.
func (b *bench) figures(w *strings.Builder, k key) {
	disturbed := 0
	for _, s := range b.results.samples[k] {
		if s.disturbed {
			disturbed++
		}
	}
	show := func(f field) string {
		v := middle(b.results.values(k, f))
		if v == 0 || math.IsNaN(v) {
			return ""
		}
		return number(v)
	}
	micros := func(f func(cpu) float64) string {
		us := middle(b.results.values(k, func(s sample) float64 { return f(s.cpu) / float64(max(1, s.tasks)) * 1e6 }))
		if us < 0.5 { // the clock of processor times ticks every 10 ms
			return ""
		}
		return fmt.Sprintf("%.0f", us)
	}
	duration := func(f field) string {
		if v := middle(b.results.values(k, f)); v > 0 {
			return number(1000*v) + " ms"
		}
		return ""
	}
	fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %d of %d |\n", k.what, k.subject, show(rate), show(completed), duration(p50), duration(p99),
		micros(func(c cpu) float64 { return c.app }), micros(func(c cpu) float64 { return c.postgres }), micros(func(c cpu) float64 { return c.redis }), micros(func(c cpu) float64 { return c.load }),
		show(memory), disturbed, len(b.results.samples[k]))
}

// module returns the version of a module that this program is built with.
func module(path string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	i := slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return m.Path == path })
	if i < 0 {
		return "unknown"
	}
	return info.Deps[i].Version
}

// commit returns the commit of the working tree, marked when the tree differs from it.
func commit(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// processor returns the model of the processors, as far as Linux knows it.
func processor() string {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	_, rest, _ := strings.Cut(string(data), "model name")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimLeft(line, "\t :")
}
