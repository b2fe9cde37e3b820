package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// config holds every setting; nothing else reads the environment. Printed or
// logged, it shows what the operator set, and of a secret only that it is set.
type config struct {
	HTTPAddr string // HTTP_ADDR
	Gateway  bool   // ROLES names gateway
	Worker   bool   // ROLES names worker

	DatabaseURL          string // DATABASE_URL, or "" with PGHOST unset: embedded. "host=..." style and URLs alike; PG* variables are left to pgx
	EmbeddedPostgres     bool   // neither DATABASE_URL nor PGHOST is set
	MigrateOnStart       bool
	MigrationDatabaseURL string // defaults to DatabaseURL
	RedisURL             string // "" = embedded
	EmbeddedRedis        bool
	DataDir              string
	DataDirSet           bool // DATA_DIR was given by the operator
	EmbeddedPostgresBin  string
	EmbeddedPostgresURL  string

	StartupMaxRetries int           // STARTUP_MAX_RETRIES
	StartupRetryDelay time.Duration // STARTUP_RETRY_DELAY_S

	StreamName    string
	ConsumerGroup string
	ConsumerName  string        // resolved: CONSUMER_NAME or host-pid-random
	Queues        []queueWeight // QUEUES, order kept

	WorkerConcurrency int
	Block             time.Duration // BLOCK_MS
	Backoff           backoff       // REQUEUE_BASE_DELAY_MS, REQUEUE_MAX_DELAY_MS, REQUEUE_JITTER
	PELScanInterval   time.Duration // PEL_SCAN_INTERVAL_S
	PELIdleThreshold  time.Duration // PEL_IDLE_THRESHOLD_MS
	Lease             time.Duration
	SweepInterval     time.Duration
	RepublishAfter    time.Duration
	MaxLost           int
	MaxRetries        int
	TaskTimeout       time.Duration
	MaxTaskTimeout    time.Duration

	HandlersFile   string // "" = demonstration set
	WebhookSecrets []string
	TaskRetention  time.Duration // 0 = keep for ever
	ShutdownGrace  time.Duration

	APIKeys        []string
	ReadAPIKeys    []string
	AllowAnonymous bool
	MaxBacklogAge  time.Duration // 0 = off

	LogLevel  slog.Level
	LogFormat string // json or text

	given []slog.Attr // what the operator set, secrets blanked
}

// queueWeight is one entry of QUEUES.
type queueWeight struct {
	name   string
	weight int
}

// loadConfig reads every setting with getenv; an empty value counts as unset. The
// error joins all problems, one line each, so that an operator repairs them in
// one go; no line shows a secret. The warnings name variables of environ that
// look like a misspelt setting, and settings that are allowed but unwise. tty
// says whether the log goes to a terminal.
func loadConfig(getenv func(string) string, environ []string, tty bool) (config, []string, error) {
	var c config
	var problems []error
	bad := make(map[string]bool)
	for _, s := range c.settings() {
		value := getenv(s.name)
		if value != "" {
			c.given = append(c.given, slog.String(s.name, s.show(value)))
		}
		if value = cmp.Or(value, s.def); value == "" {
			continue
		}
		if err := s.set(value); err != nil {
			bad[s.name] = true
			problems = append(problems, fmt.Errorf("%s: %w", s.label(value), err))
		}
	}
	problems = append(problems, c.resolve(getenv, tty)...)
	for _, x := range c.contradictions() {
		if x.broken && !slices.ContainsFunc(x.names, func(name string) bool { return bad[name] }) {
			problems = append(problems, errors.New(x.text))
		}
	}
	return c, append(misspelt(c.settings(), environ), c.unwise()...), errors.Join(problems...)
}

// resolve fills in what the defaults say in words, and returns the problems of
// the servers' addresses that only show when all settings are known.
func (c *config) resolve(getenv func(string) string, tty bool) []error {
	var problems []error
	c.DataDirSet = getenv("DATA_DIR") != ""
	external := getenv("DATABASE_URL") != "" || getenv("PGHOST") != ""
	c.EmbeddedPostgres = !external
	c.EmbeddedRedis = getenv("REDIS_URL") == ""
	if !external {
		problems = append(problems, unread(getenv, []string{"POSTGRES_HOST", "POSTGRES_PORT", "POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB"},
			"DATABASE_URL", "postgres://user:password@host:5432/database")...)
		if c.MigrationDatabaseURL != "" {
			problems = append(problems, errors.New("MIGRATION_DATABASE_URL: needs DATABASE_URL or PGHOST, or tasks and migrations go to two databases"))
		}
	}
	if c.EmbeddedRedis {
		problems = append(problems, unread(getenv, []string{"REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD", "REDIS_DB"},
			"REDIS_URL", "redis://user:password@host:6379/0")...)
	}
	if external && getenv("DATABASE_URL") == "" {
		if err := checkDatabaseURL(""); err != nil {
			problems = append(problems, fmt.Errorf("PGHOST and the other PG* variables: %w", err))
		}
	}
	c.MigrationDatabaseURL = cmp.Or(c.MigrationDatabaseURL, c.DatabaseURL)

	if c.ConsumerName == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown"
		}
		c.ConsumerName = fmt.Sprintf("%s-%d-%s", host, os.Getpid(), strings.ToLower(rand.Text()[:8]))
	}
	if c.HandlersFile == "" {
		// A file that is there but cannot be read is not passed over: its reader says so.
		if _, err := os.Stat(defaultHandlersFile); !errors.Is(err, fs.ErrNotExist) {
			c.HandlersFile = defaultHandlersFile
		}
	}
	if c.LogFormat == "" {
		c.LogFormat = "json"
		if tty {
			c.LogFormat = "text"
		}
	}
	return problems
}

const defaultHandlersFile = "handlers.json"

// unread returns one problem when a variable of a family that the original read is
// set: going on would end on an empty embedded server by mistake.
func unread(getenv func(string) string, family []string, use, form string) []error {
	for _, name := range family {
		if getenv(name) != "" {
			return []error{fmt.Errorf("%s: is not read and %s is not set: set %s, such as %s", name, use, use, form)}
		}
	}
	return nil
}

// A contradiction is a rule between settings that are each valid alone. It is not
// reported beside a setting that could not be read.
type contradiction struct {
	names  []string
	broken bool
	text   string
}

func (c *config) contradictions() []contradiction {
	return []contradiction{
		{
			[]string{"PEL_IDLE_THRESHOLD_MS", "LEASE"}, c.PELIdleThreshold < c.Lease,
			fmt.Sprintf("PEL_IDLE_THRESHOLD_MS=%d: must be at least LEASE, which is %s", c.PELIdleThreshold.Milliseconds(), short(c.Lease)),
		},
		{
			[]string{"REQUEUE_MAX_DELAY_MS", "REQUEUE_BASE_DELAY_MS"}, c.Backoff.max < c.Backoff.base,
			fmt.Sprintf("REQUEUE_MAX_DELAY_MS=%d: must be at least REQUEUE_BASE_DELAY_MS, which is %d", c.Backoff.max.Milliseconds(), c.Backoff.base.Milliseconds()),
		},
		{
			[]string{"MAX_TASK_TIMEOUT", "TASK_TIMEOUT"}, c.MaxTaskTimeout < c.TaskTimeout,
			fmt.Sprintf("MAX_TASK_TIMEOUT=%s: must be at least TASK_TIMEOUT, which is %s", short(c.MaxTaskTimeout), short(c.TaskTimeout)),
		},
		{
			// A blocked read is not interrupted (redis/go-redis#2276) and the process has
			// SHUTDOWN_GRACE and two seconds to end.
			[]string{"BLOCK_MS", "SHUTDOWN_GRACE"}, c.Block > c.ShutdownGrace+2*time.Second,
			fmt.Sprintf("BLOCK_MS=%d: must not exceed SHUTDOWN_GRACE, which is %s, by more than 2s", c.Block.Milliseconds(), short(c.ShutdownGrace)),
		},
		{
			[]string{"READ_API_KEYS", "API_KEYS"}, len(c.ReadAPIKeys) > 0 && len(c.APIKeys) == 0,
			"READ_API_KEYS: needs API_KEYS, or nobody could submit",
		},
		{
			[]string{"READ_API_KEYS", "API_KEYS"}, slices.ContainsFunc(c.ReadAPIKeys, func(key string) bool { return slices.Contains(c.APIKeys, key) }),
			"READ_API_KEYS: one of the keys is in API_KEYS too: a key has one right or the other",
		},
		{
			[]string{"HTTP_ADDR", "API_KEYS", "READ_API_KEYS", "ALLOW_ANONYMOUS", "ROLES"},
			c.Gateway && len(c.APIKeys) == 0 && len(c.ReadAPIKeys) == 0 && !c.AllowAnonymous && !loopback(c.HTTPAddr),
			fmt.Sprintf("HTTP_ADDR=%q: others can reach this address: set API_KEYS, or ALLOW_ANONYMOUS=true, or listen on 127.0.0.1", c.HTTPAddr),
		},
	}
}

// loopback reports whether addr, a valid HTTP_ADDR, can only be reached from this machine.
func loopback(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// unwise returns warnings about settings that are allowed.
func (c *config) unwise() []string {
	const minKeyLen = 16
	for _, key := range slices.Concat(c.APIKeys, c.ReadAPIKeys) {
		if len(key) < minKeyLen {
			return []string{fmt.Sprintf("API_KEYS: a key has fewer than %d characters and may be guessed", minKeyLen)}
		}
	}
	return nil
}

// misspelt returns a warning for each variable that is one edit, or only its
// case, away from a setting.
func misspelt(settings []setting, environ []string) []string {
	var warnings []string
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		known := func(s setting) bool { return s.name == name }
		if value == "" || slices.ContainsFunc(settings, known) {
			continue
		}
		near := func(s setting) bool { return oneEdit(strings.ToUpper(name), s.name) }
		if i := slices.IndexFunc(settings, near); i >= 0 {
			warnings = append(warnings, fmt.Sprintf("%s is not a setting: is %s meant?", name, settings[i].name))
		}
	}
	return warnings
}

// oneEdit reports whether a and b are equal or differ by one letter more, less or
// other, or by two neighbours swapped.
func oneEdit(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	for a != "" && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	switch len(b) - len(a) {
	case 0:
		return a == "" || a[1:] == b[1:] || len(a) > 1 && a[0] == b[1] && a[1] == b[0] && a[2:] == b[2:]
	case 1:
		return a == b[1:]
	}
	return false
}

// secretSettings names the variables that hold secrets: the environment of a
// command that a task runs goes without them. Beside the settings these are
// what pgx and goose read, and what the original's deployments still set.
func secretSettings() []string {
	names := []string{
		"PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE", "PGSSLKEY", "PGSSLPASSWORD", "GOOSE_DBSTRING",
		"POSTGRES_PASSWORD", "REDIS_PASSWORD",
	}
	for _, s := range new(config).settings() {
		if s.secret {
			names = append(names, s.name)
		}
	}
	return names
}

// usage prints the commands and the table of settings.
func usage(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, `Usage:
  nexusflow               serve: gateway and worker in one process (ROLES)
  nexusflow healthcheck   ask the process at HTTP_ADDR whether it is alive; exit 0 if so
  nexusflow version       print the version
  nexusflow -h            print this

Settings are environment variables; an empty one counts as unset.

`)
	fmt.Fprintln(t, "NAME\tDEFAULT\tMEANING")
	for _, s := range new(config).settings() {
		fmt.Fprintf(t, "%s\t%s\t%s\n", s.name, s.defaultText(), s.meaning)
	}
	t.Flush()
}

// LogValue shows the settings that the operator gave, secrets blanked.
func (c config) LogValue() slog.Value { return slog.GroupValue(c.given...) }

// Format makes every verb of fmt print what LogValue shows.
func (c config) Format(f fmt.State, _ rune) { fmt.Fprint(f, c.LogValue()) }
