// Command nexusflow runs tasks that are submitted over HTTP: reliably, and so
// that what became of them can be asked.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"nexusflow/db"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
)

// Exit codes: 1 = the service could not do its duty, 2 = it was set up wrongly.
const (
	exitFailure = 1
	exitUsage   = 2
)

const (
	// lastGrace is what all parts have after SHUTDOWN_GRACE to end, a moment more than
	// handing back takes, and closeGrace what the pools have after that: two seconds in all.
	lastGrace  = stopGrace + 50*time.Millisecond
	closeGrace = 200 * time.Millisecond
)

// ballast is what the garbage collector takes for memory in use, though nobody touches it and so
// it occupies none: the next collection comes that much later. The service itself uses a few MB,
// which would be collected dozens of times a second at full rate. It adds the same to a large
// heap, which a GOGC would multiply; GOMEMLIMIT counts it.
const ballast = 12 << 20

// release is the version that the image's build was told, see the Dockerfile.
var release string

// A usageError is a mistake in settings, handlers file or arguments.
type usageError struct{ error }

func main() {
	defer runtime.KeepAlive(make([]byte, ballast))
	// A reader of the log that goes away must not take the service with it.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the process at once
	err := invoke(ctx, os.Args[1:])
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "nexusflow: %v\n", err)
	if _, ok := errors.AsType[usageError](err); ok {
		os.Exit(exitUsage)
	}
	os.Exit(exitFailure)
}

// invoke does what the arguments say; without any it serves.
func invoke(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return run(ctx, os.Getenv, os.Environ(), os.Stdout, func(string) {})
	}
	if len(args) > 1 {
		return usageError{fmt.Errorf("unexpected argument %q; settings are environment variables, see nexusflow -h", args[1])}
	}
	switch args[0] {
	case "-h", "-help", "--help", "help":
		usage(os.Stdout)
		return nil
	case "version", "-version", "--version":
		fmt.Println(version())
		return nil
	case "healthcheck":
		return healthcheck(ctx, os.Getenv("HTTP_ADDR"))
	}
	return usageError{fmt.Errorf("unknown argument %q; see nexusflow -h", args[0])}
}

// version is what the build was told, or what the Go tool stamped, or devel.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return cmp.Or(release, strings.Trim(info.Main.Version, "()"), "devel")
	}
	return cmp.Or(release, "devel")
}

// run serves until ctx ends or a part fails, and returns when everything it started
// has ended, or two seconds after SHUTDOWN_GRACE when a part still waits for a silent server.
// ready is called with the listener's address once requests are answered.
func run(ctx context.Context, getenv func(string) string, environ []string, logw io.Writer, ready func(addr string)) error {
	cfg, warnings, err := loadConfig(getenv, environ, isTerminal(logw))
	log := newLogger(logw, cfg)
	cfg.MaxTaskTimeout = cmp.Or(cfg.MaxTaskTimeout, 24*time.Hour) // a bad one is told of once, not for every handler
	handlers, handlersErr := loadHandlers(cfg, cfg.Worker, log)
	if err := errors.Join(err, handlersErr); err != nil {
		return usageError{err}
	}
	for _, w := range warnings {
		log.Warn("doubtful setting", "cause", w)
	}
	log.Info("nexusflow starting", "version", version(), "gateway", cfg.Gateway, "worker", cfg.Worker, "worker_name", cfg.ConsumerName)

	// The port first: a second copy started by mistake fails before it touches data.
	listener, err := net.Listen("tcp", cfg.HTTPAddr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer listener.Close()

	died := make(chan error, 2) // an embedded server ended by itself
	if cfg.EmbeddedPostgres {
		pg, err := startPostgres(ctx, log, cfg)
		if err != nil {
			return fmt.Errorf("start embedded postgres: %w", err)
		}
		defer pg.stop()
		go func() { died <- pg.wait() }()
		cfg.DatabaseURL = pg.dsn()
		cfg.MigrationDatabaseURL = pg.dsn()
	}
	if cfg.EmbeddedRedis {
		rd, err := startRedis(ctx, log, cfg)
		if err != nil {
			return fmt.Errorf("start embedded redis: %w", err)
		}
		defer rd.stop()
		go func() { died <- rd.wait() }()
		cfg.RedisURL = rd.url()
	}

	pools, err := openRecord(ctx, log, cfg)
	if err != nil {
		return err
	}
	defer func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			pools.close()
		}()
		doneBefore(closed, time.Now().Add(closeGrace)) // a silent server says no farewell
	}()
	stream, err := openStream(log, cfg, cfg.RedisURL)
	if err != nil {
		return usageError{err}
	}
	defer stream.close()
	p := parts{log: log, cfg: cfg, pools: pools, stream: stream, handlers: handlers, metrics: newMetrics(), died: died}
	return p.serve(ctx, listener, ready)
}

// openRecord waits for PostgreSQL, brings the schema up to date and opens the pools. A
// server that goes away again in the middle, as one does that is being restarted, is
// waited for anew, as many times as there are attempts.
func openRecord(ctx context.Context, log *slog.Logger, cfg config) (*pools, error) {
	for n := 1; ; n++ {
		if err := waitForPostgres(ctx, log, cfg.DatabaseURL, cfg.StartupMaxRetries, cfg.StartupRetryDelay); err != nil {
			return nil, err
		}
		p, err := prepareRecord(ctx, log, cfg)
		if err == nil || !storeAway(err) || n >= cfg.StartupMaxRetries {
			return p, err
		}
		log.Warn("postgres went away during the start", "attempt", n, "max_attempts", cfg.StartupMaxRetries, "err", err)
		if !sleep(ctx, cfg.StartupRetryDelay) {
			return nil, context.Cause(ctx)
		}
	}
}

// prepareRecord migrates unless that is left to the operator, and opens the pools on a
// schema that is complete.
func prepareRecord(ctx context.Context, log *slog.Logger, cfg config) (*pools, error) {
	if cfg.MigrateOnStart {
		if err := migrate(ctx, log, cfg.MigrationDatabaseURL); err != nil {
			return nil, err
		}
	}
	p, err := openPools(ctx, cfg.DatabaseURL, cfg.Lease)
	if err != nil {
		return nil, err
	}
	if err := checkSchema(ctx, p.api); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// parts are what the roles of a process have in common.
type parts struct {
	log      *slog.Logger
	cfg      config
	pools    *pools
	stream   *stream
	handlers *handlerTable
	metrics  *metrics
	died     <-chan error // an embedded server ended by itself
}

// serve builds the roles and runs their loops. Two contexts order the end: ctx ends
// at the signal or with the first failure and stops what takes in work; live ends
// when that has drained and stops what brings work to its end.
func (p parts) serve(ctx context.Context, l net.Listener, ready func(string)) error {
	log, cfg := p.log, p.cfg
	asked := ctx // ends when somebody wants the process to stop, and not when a part fails
	g, ctx := errgroup.WithContext(ctx)
	live, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	loop := func(name string, run func(context.Context) error) {
		g.Go(func() error {
			err := run(live)
			if err == nil && live.Err() == nil {
				err = errors.New("ended unexpectedly")
			}
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}

	publisher := newPublisher(log, p.stream, db.New(p.pools.work))
	loop("publisher", publisher.run)
	known := hints{publish: publisher.publish, up: p.stream.up, depth: p.stream.depth, readers: p.stream.readers}
	srv := newServer(log, cfg, p.pools, p.handlers, known, p.metrics)
	loop("submitter", srv.run)
	drained := func(time.Time) {}
	if cfg.Worker {
		drained = p.startWorker(ctx, g, loop, srv.changed)
	}
	loop("redis probe", p.stream.run) // calls what startWorker has set

	hs := srv.httpServer()
	g.Go(func() error {
		if err := hs.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve http: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		select {
		case err := <-p.died:
			return err
		case <-live.Done():
			return nil
		}
	})
	overdue := make(chan struct{})
	g.Go(func() error {
		<-ctx.Done()
		log.Info("shutting down", "cause", context.Cause(ctx))
		deadline := time.Now().Add(cfg.ShutdownGrace)
		time.AfterFunc(time.Until(deadline)+lastGrace, func() { close(overdue) })
		defer stop()
		srv.drain()
		var wg sync.WaitGroup
		wg.Go(func() {
			limited, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
			defer cancel()
			if err := hs.Shutdown(limited); err != nil {
				log.Warn("requests cut short by shutdown", "err", err)
				hs.Close()
			}
		})
		wg.Go(func() { drained(deadline) })
		wg.Wait()
		return nil
	})

	log.Info("listening", "addr", l.Addr().String())
	ready(l.Addr().String())
	ended := make(chan error, 1)
	go func() { ended <- g.Wait() }()
	var err error
	select {
	case err = <-ended:
	case <-overdue:
		// Statements are on their way to a server that is silent. Whether they arrive or
		// not, others go on from what is stored.
		log.Error("parts did not end in time")
		if asked.Err() == nil {
			err = context.Cause(ctx)
		}
	}
	if cfg.Worker && p.stream.up() {
		if err := p.stream.leave(context.WithoutCancel(ctx)); err != nil {
			log.Debug("leave group", "err", err)
		}
	}
	log.Info("stopped")
	return err
}

// startWorker starts the loops of the worker role and returns what drains them. changed is
// told of every task whose change is committed.
func (p parts) startWorker(ctx context.Context, g *errgroup.Group, loop func(string, func(context.Context) error), changed func(uuid.UUID)) func(time.Time) {
	log, cfg, s := p.log, p.cfg, p.stream
	claims, leases := db.New(p.pools.work), db.New(p.pools.lease)
	access := newAccess(log, cfg.Lease/3)
	w := newWorker(log, cfg, claims, leases, s, p.handlers, access, p.metrics)
	d := newDispatcher(log, cfg, s, claims, access, p.metrics)
	r := &reclaimer{log: log, cfg: cfg, stream: s, queries: leases, access: access, metrics: p.metrics, inFlight: w.inFlight, wake: d.wake}
	pauses := &gate{log: log, stream: s, queries: claims, access: access, wake: d.wake, every: min(cfg.SweepInterval, pausePoll)}
	w.retryIn = d.wakeAfter
	w.changed = changed
	w.refused = pauses.ask
	s.onUp = d.wake
	s.reads = true

	loop("outcomes", w.outcomes.run)
	loop("locked outcomes", w.locked.run)
	loop("acknowledgements", w.drops.run)
	loop("heartbeat", w.beat)
	loop("lease watch", w.watch)
	loop("dispatcher", d.run)
	loop("pauses", pauses.run)
	loop("reaper", r.runReaper)
	loop("reclaimer", r.runScanner)
	if cfg.TaskRetention > 0 {
		loop("retention", (&retention{log: log, keep: cfg.TaskRetention, queries: claims}).run)
	}
	read := make(chan struct{})
	g.Go(func() error {
		defer close(read)
		return w.read(ctx)
	})
	return func(deadline time.Time) {
		<-read
		w.drain(deadline)
	}
}

// newLogger writes one line per event, as JSON unless LOG_FORMAT says text.
func newLogger(w io.Writer, cfg config) *slog.Logger {
	options := &slog.HandlerOptions{Level: cfg.LogLevel}
	if cfg.LogFormat == "text" {
		return slog.New(slog.NewTextHandler(w, options))
	}
	return slog.New(slog.NewJSONHandler(w, options))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// healthcheck asks the service on this machine whether it is alive: what a
// container without curl runs as its health check.
func healthcheck(ctx context.Context, addr string) error {
	if addr == "" {
		addr = "127.0.0.1:8000"
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return usageError{fmt.Errorf("read HTTP_ADDR: %w", err)}
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // an image from scratch need not know localhost
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/livez", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("unhealthy: %s", response.Status)
	}
	return nil
}
