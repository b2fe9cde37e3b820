// Command bench measures NexusFlow beside its peers, asynq and River, and beside what
// the machine allows at all: in one run, on one PostgreSQL and one Redis that it starts
// itself, with the same work. Absolute figures move with the machine and the hour;
// the ratios inside one run are what counts. It needs Linux, for its CPU accounting.
//
//	go run .                all of it, about 20 minutes on an idle machine of two cores
//	QUICK=1 go run .        one short repetition of everything, under 3 minutes
//	go run . -write         also replaces RESULTS.md
//	go run . -only drain    some suites only; -h lists them
//
// Signal the built program, not go run, which would leave it and its servers behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		err = serve(ctx, os.Args[2:])
	} else {
		err = run(ctx, os.Args[1:])
	}
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// options say how much is measured.
type options struct {
	quick    bool
	write    bool
	only     string
	rounds   int
	tries    int           // repetitions of a step that others disturb; the last one counts anyway
	maxOther float64       // cores that processes outside the run may use
	dir      string        // where the scratch folder is made; "" = where temporary ones are
	profiles string        // folder for CPU profiles of NexusFlow; "" = none
	span     time.Duration // one step of posting
	steady   time.Duration // one step at a fixed low rate
	drain    int           // tasks loaded before a drain
	memory   int           // tasks of the memory suite
	retries  int           // due retries of the growth suite
	rows     []int         // sizes of the table in the growth suite
}

// A suite is one part of a round.
type suite struct {
	name string
	run  func(context.Context) error
	once bool // in the first round only
}

func (b *bench) suites() []suite {
	return []suite{
		{name: "submit", run: b.submit},
		{name: "together", run: b.together},
		{name: "drain", run: b.drain},
		{name: "latency", run: b.latency},
		{name: "visible", run: b.visible},
		{name: "growth", run: b.growth},
		{name: "retries", run: b.retries},
		{name: "memory", run: b.memory, once: true},
	}
}

func parseOptions(args []string) (options, error) {
	o := options{quick: os.Getenv("QUICK") == "1"}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.BoolVar(&o.write, "write", false, "replace RESULTS.md with what is printed")
	fs.StringVar(&o.only, "only", "", "comma list of suites: submit, together, drain, latency, visible, growth, retries, memory")
	fs.IntVar(&o.rounds, "rounds", 0, "rounds through all suites (default 3, with QUICK=1 1)")
	fs.IntVar(&o.tries, "tries", 0, "times a step that other programs disturb is measured (default 4, with QUICK=1 2)")
	fs.Float64Var(&o.maxOther, "max-other", 0.3, "cores that other programs may use before a step counts as disturbed")
	fs.StringVar(&o.dir, "dir", "", "folder on a disk like production's, for the servers' data (default a temporary one)")
	fs.StringVar(&o.profiles, "cpuprofile", "", "folder for a CPU profile of each NexusFlow process (go tool pprof); costs a few percent")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	rounds, tries := 3, 4
	o.span, o.steady = 3*time.Second, 5*time.Second
	o.drain, o.memory, o.retries = 50_000, 1_000_000, 100_000
	o.rows = []int{1_000, 100_000, 1_000_000, 5_000_000}
	if o.quick {
		rounds, tries = 1, 2
		o.span, o.steady = time.Second, 2*time.Second
		o.drain, o.memory, o.retries = 10_000, 50_000, 20_000
		o.rows = o.rows[:2]
	}
	if o.rounds <= 0 {
		o.rounds = rounds
	}
	if o.tries <= 0 {
		o.tries = tries
	}
	if o.profiles == "" {
		return o, nil
	}
	var err error
	if o.profiles, err = filepath.Abs(o.profiles); err != nil {
		return o, fmt.Errorf("-cpuprofile: %w", err)
	}
	return o, os.MkdirAll(o.profiles, 0o755)
}

// run measures everything that args ask for and prints the report.
func run(ctx context.Context, args []string) error {
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	b := &bench{opts: o}
	suites, err := selected(b.suites(), o.only)
	if err != nil {
		return err
	}
	defer b.close()
	if err := b.open(ctx); err != nil {
		return err
	}
	began := time.Now()
	failure := b.rounds(ctx, suites, began)
	text := b.report(ctx, time.Since(began), failure)
	fmt.Print(text)
	if failure != nil || !o.write {
		return failure
	}
	return os.WriteFile("RESULTS.md", []byte(text), 0o644)
}

// rounds goes through the suites as often as asked for. After an error what was measured
// until then can still be reported.
func (b *bench) rounds(ctx context.Context, suites []suite, began time.Time) error {
	for b.round = range b.opts.rounds {
		for _, s := range suites {
			if s.once && b.round > 0 {
				continue
			}
			fmt.Fprintf(os.Stderr, "== round %d of %d: %s (%s)\n", b.round+1, b.opts.rounds, s.name, time.Since(began).Round(time.Second))
			if err := s.run(ctx); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	return nil
}

func selected(all []suite, only string) ([]suite, error) {
	if only == "" {
		return all, nil
	}
	var list []suite
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(s suite) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("-only: no suite %q", name)
		}
		list = append(list, all[i])
	}
	return list, nil
}
