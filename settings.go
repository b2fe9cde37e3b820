package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A setting is one environment variable. One table of them drives loading, -h and
// the test of README, so that the three cannot differ.
type setting struct {
	name    string
	def     string // the default as a value, read like any other; "" = none
	words   string // the default in words where it is no value
	meaning string
	set     func(value string) error // stores a value; the error says what is allowed, never the value
	secret  bool
}

// defaultText is the default as the tables show it.
func (s setting) defaultText() string { return cmp.Or(s.words, s.def, "empty") }

// show is a value as logs may show it.
func (s setting) show(value string) string {
	if s.secret {
		return "(secret)"
	}
	return value
}

// label is how a problem names the setting and, unless it is a secret, its value.
func (s setting) label(value string) string {
	if s.secret {
		return s.name
	}
	const most = 80
	if len(value) > most {
		value = value[:most] + "..."
	}
	return fmt.Sprintf("%s=%q", s.name, value)
}

const day = 24 * time.Hour

// settings is the table, bound to c. The names that the original had keep their names
// and units; every other length of time is a Go duration.
func (c *config) settings() []setting {
	return []setting{
		{name: "HTTP_ADDR", def: "127.0.0.1:8000", set: address(&c.HTTPAddr), meaning: "listen address; a gateway that others can reach needs `API_KEYS` or `ALLOW_ANONYMOUS=true`; the image sets `:8000`"},
		{name: "ROLES", def: "gateway,worker", set: c.setRoles, meaning: "what this process does: `gateway`, `worker` or both"},
		{name: "DATABASE_URL", words: "embedded", secret: true, set: postgres(&c.DatabaseURL), meaning: "PostgreSQL as a `postgres://` URL or DSN; when empty but `PGHOST` is set, the PG* variables count"},
		{name: "MIGRATE_ON_START", def: "true", set: toggle(&c.MigrateOnStart), meaning: "bring the schema up to date at start, one process at a time"},
		{name: "MIGRATION_DATABASE_URL", words: "`DATABASE_URL`", secret: true, set: postgres(&c.MigrationDatabaseURL), meaning: "direct connection for migrations where `DATABASE_URL` is a transaction pooler"},
		{name: "REDIS_URL", words: "embedded", secret: true, set: redisURL(&c.RedisURL), meaning: "`redis://`, `rediss://` or `unix://`; with `?addr=` a Cluster, with `?master_name=` Sentinel"},
		{name: "DATA_DIR", def: ".nexusflow", set: text(&c.DataDir), meaning: "where the embedded servers keep their data; as root below a folder closed to others, `/var/lib/nexusflow` unless set"},
		{name: "EMBEDDED_POSTGRES_BIN", set: text(&c.EmbeddedPostgresBin), meaning: "folder with `initdb` and `postgres`, searched first"},
		{name: "EMBEDDED_POSTGRES_URL", secret: true, set: webURL(&c.EmbeddedPostgresURL), meaning: "mirror to fetch PostgreSQL from when none is installed"},
		{name: "STARTUP_MAX_RETRIES", def: "10", set: number(&c.StartupMaxRetries, 1, 10_000), meaning: "attempts to reach PostgreSQL at start before exit 1"},
		{name: "STARTUP_RETRY_DELAY_S", def: "2", set: count(&c.StartupRetryDelay, time.Second, 1, 3600), meaning: "seconds between them"},
		{name: "STREAM_NAME", def: "tasks", set: word(&c.StreamName), meaning: "Redis stream; queue `q` other than `default` uses `STREAM_NAME:q`"},
		{name: "CONSUMER_GROUP", def: "workers", set: word(&c.ConsumerGroup), meaning: "consumer group in each stream"},
		{name: "CONSUMER_NAME", words: "host-pid-random", set: word(&c.ConsumerName), meaning: "this process in the group and in `locked_by`; best left alone"},
		{name: "QUEUES", def: "default:1", set: queues(&c.Queues), meaning: "queues this process reads and their weights, such as `critical:6,default:3,low:1`"},
		{name: "WORKER_CONCURRENCY", def: "16", set: number(&c.WorkerConcurrency, 1, 10_000), meaning: "tasks this process runs at once; for Go functions of a millisecond or less 500 to 1,000, as batches are no larger than what is free"},
		{name: "BLOCK_MS", def: "2000", set: count(&c.Block, time.Millisecond, 1, 60_000), meaning: "longest blocking read from Redis in ms; bounds how fast an idle process stops"},
		{name: "REQUEUE_BASE_DELAY_MS", def: "1000", set: count(&c.Backoff.base, time.Millisecond, 1, 86_400_000), meaning: "back-off before the first and second retry in ms; then it doubles"},
		{name: "REQUEUE_MAX_DELAY_MS", def: "30000", set: count(&c.Backoff.max, time.Millisecond, 1, 86_400_000), meaning: "longest back-off in ms"},
		{name: "REQUEUE_JITTER", def: "0.1", set: fraction(&c.Backoff.jitter), meaning: "share by which a back-off is longer or shorter at random, 0 to 1"},
		{name: "PEL_SCAN_INTERVAL_S", def: "30", set: count(&c.PELScanInterval, time.Second, 1, 86_400), meaning: "seconds between looks for stream entries whose reader died"},
		{name: "PEL_IDLE_THRESHOLD_MS", def: "60000", set: count(&c.PELIdleThreshold, time.Millisecond, 100, 86_400_000), meaning: "idle time in ms after which such an entry is taken over; at least `LEASE`"},
		{name: "LEASE", def: "30s", set: span(&c.Lease, 100*time.Millisecond, time.Hour), meaning: "how long a worker holds a task without a heartbeat, which comes three times as often"},
		{name: "SWEEP_INTERVAL", def: "1s", set: span(&c.SweepInterval, 10*time.Millisecond, time.Hour), meaning: "time between looks for due tasks and expired leases; for the latter never more than a sixth of `LEASE`"},
		{name: "REPUBLISH_AFTER", def: "15s", set: span(&c.RepublishAfter, 100*time.Millisecond, day), meaning: "age at which the entry of a waiting task counts as lost"},
		{name: "MAX_LOST", def: "3", set: number(&c.MaxLost, 0, 1000), meaning: "how many times a task survives the loss of its worker"},
		{name: "MAX_RETRIES", def: "3", set: number(&c.MaxRetries, 0, maxRetryLimit), meaning: "retries after the first attempt where neither task nor handler says"},
		{name: "TASK_TIMEOUT", def: "5m", set: span(&c.TaskTimeout, time.Millisecond, 30*day), meaning: "longest run of one attempt where neither task nor handler says"},
		{name: "MAX_TASK_TIMEOUT", def: "24h", set: span(&c.MaxTaskTimeout, time.Millisecond, 30*day), meaning: "largest time-out a task may ask for"},
		{name: "HANDLERS_FILE", words: "`handlers.json` if there", set: text(&c.HandlersFile), meaning: "which task name runs what; without a file the demonstration set"},
		{name: "WEBHOOK_SECRETS", secret: true, set: list(&c.WebhookSecrets, checkWebhookSecret), meaning: "comma list; calls to URL handlers are signed with each"},
		{name: "TASK_RETENTION", def: "720h", set: spanOrOff(&c.TaskRetention, day, 100*365*day), meaning: "age at which ended tasks and their idempotency keys are deleted; at least 24h; 0 keeps them"},
		{name: "SHUTDOWN_GRACE", def: "25s", set: span(&c.ShutdownGrace, 0, time.Hour), meaning: "how long running tasks may go on after SIGTERM"},
		{name: "API_KEYS", secret: true, set: list(&c.APIKeys, checkToken), meaning: "comma list of bearer tokens that may submit, operate and read; empty = open"},
		{name: "READ_API_KEYS", secret: true, set: list(&c.ReadAPIKeys, checkToken), meaning: "comma list of bearer tokens that may only read"},
		{name: "ALLOW_ANONYMOUS", def: "false", set: toggle(&c.AllowAnonymous), meaning: "listen beyond this machine without API keys"},
		{name: "MAX_BACKLOG_AGE", def: "0", set: spanOrOff(&c.MaxBacklogAge, time.Millisecond, 30*day), meaning: "answer 429 while the oldest due task has waited longer; 0 = never"},
		{name: "LOG_LEVEL", def: "info", set: level(&c.LogLevel), meaning: "`debug`, `info`, `warn` or `error`"},
		{name: "LOG_FORMAT", words: "`json`, on a terminal `text`", set: choice(&c.LogFormat, "json", "text"), meaning: "form of the log on standard output"},
	}
}

// setRoles reads ROLES.
func (c *config) setRoles(value string) error {
	var roles []string
	if err := list(&roles, nil)(value); err != nil {
		return err
	}
	for _, role := range roles {
		if role != "gateway" && role != "worker" {
			return errors.New("want gateway, worker or both, separated by a comma")
		}
	}
	c.Gateway, c.Worker = slices.Contains(roles, "gateway"), slices.Contains(roles, "worker")
	return nil
}

func text(p *string) func(string) error {
	return func(value string) error {
		if strings.TrimSpace(value) == "" {
			return errors.New("want more than white space")
		}
		*p = value
		return nil
	}
}

// word is a name inside Redis.
func word(p *string) func(string) error {
	return func(value string) error {
		if len(value) > 200 || !printable(value) {
			return errors.New("want 1 to 200 printable ASCII characters without spaces")
		}
		*p = value
		return nil
	}
}

func printable(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// digits reads a whole number strictly: strconv would take +5 as well, and an
// operator who writes 1_000, 1e3 or 30s is told, not guessed at.
func digits(value string, low, high int) (int, error) {
	n, err := strconv.Atoi(value)
	if strings.Trim(value, "0123456789") != "" || err != nil || n < low || n > high {
		return 0, fmt.Errorf("want a whole number from %d to %d, digits only", low, high)
	}
	return n, nil
}

func number(p *int, low, high int) func(string) error {
	return func(value string) (err error) {
		n, err := digits(value, low, high)
		if err == nil {
			*p = n
		}
		return err
	}
}

// count is a length of time written as a whole number of units.
func count(p *time.Duration, unit time.Duration, low, high int) func(string) error {
	return func(value string) error {
		n, err := digits(value, low, high)
		if err == nil {
			*p = time.Duration(n) * unit
		}
		return err
	}
}

func span(p *time.Duration, low, high time.Duration) func(string) error {
	return func(value string) error {
		d, err := time.ParseDuration(value)
		if err != nil || d < low || d > high {
			return fmt.Errorf("want a duration with its unit, such as 500ms, 30s or 24h, from %s to %s", short(low), short(high))
		}
		*p = d
		return nil
	}
}

// short is a duration without its empty parts: 24h, not 24h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func spanOrOff(p *time.Duration, low, high time.Duration) func(string) error {
	return func(value string) error {
		if d, err := time.ParseDuration(value); err == nil && d == 0 {
			*p = 0
			return nil
		}
		if err := span(p, low, high)(value); err != nil {
			return fmt.Errorf("want 0 or else: %w", err)
		}
		return nil
	}
}

func fraction(p *float64) func(string) error {
	return func(value string) error {
		f, err := strconv.ParseFloat(value, 64)
		if strings.Trim(value, ".0123456789") != "" || err != nil || f > 1 {
			return errors.New("want a number from 0 to 1, such as 0.1")
		}
		*p = f
		return nil
	}
}

func toggle(p *bool) func(string) error {
	return func(value string) error {
		b, err := strconv.ParseBool(value)
		if err != nil {
			return errors.New("want true or false")
		}
		*p = b
		return nil
	}
}

func choice(p *string, allowed ...string) func(string) error {
	return func(value string) error {
		if !slices.Contains(allowed, value) {
			return errors.New("want " + strings.Join(allowed, " or "))
		}
		*p = value
		return nil
	}
}

func level(p *slog.Level) func(string) error {
	return func(value string) error {
		// slog would take INFO+2 as well; the four words are all there is in the log.
		if !slices.Contains([]string{"debug", "info", "warn", "error"}, strings.ToLower(value)) {
			return errors.New("want debug, info, warn or error")
		}
		return p.UnmarshalText([]byte(value))
	}
}

// list splits at commas and trims each item; check may be nil.
func list(p *[]string, check func(string) error) func(string) error {
	return func(value string) error {
		var items []string
		for item := range strings.SplitSeq(value, ",") {
			item = strings.TrimSpace(item)
			if item == "" {
				return errors.New("want a comma list without empty items")
			}
			if check != nil {
				if err := check(item); err != nil {
					return err
				}
			}
			items = append(items, item)
		}
		*p = items
		return nil
	}
}

func checkToken(item string) error {
	if !printable(item) {
		return errors.New("want keys of printable ASCII characters without spaces, separated by commas")
	}
	return nil
}

// checkWebhookSecret accepts any token and, in the form of the Standard Webhooks
// scheme, base64 after whsec_.
func checkWebhookSecret(item string) error {
	if encoded, ok := strings.CutPrefix(item, "whsec_"); ok {
		if _, err := base64.StdEncoding.DecodeString(encoded); err != nil || encoded == "" {
			return errors.New("want base64 after whsec_")
		}
	}
	return checkToken(item)
}

var queueName = regexp.MustCompile(`^[a-z0-9_-]{1,64}$`)

func queues(p *[]queueWeight) func(string) error {
	return func(value string) error {
		var items []string
		if err := list(&items, nil)(value); err != nil {
			return err
		}
		var read []queueWeight
		for _, item := range items {
			name, weight, _ := strings.Cut(item, ":")
			n, err := digits(weight, 1, 100)
			if err != nil || !queueName.MatchString(name) {
				return errors.New("want name:weight,... with names of 1 to 64 characters a-z, 0-9, _ and -, and weights from 1 to 100")
			}
			if slices.ContainsFunc(read, func(q queueWeight) bool { return q.name == name }) {
				return fmt.Errorf("want each queue once, %q is there twice", name)
			}
			read = append(read, queueWeight{name, n})
		}
		*p = read
		return nil
	}
}

func address(p *string) func(string) error {
	return func(value string) error {
		_, port, err := net.SplitHostPort(value)
		if err == nil {
			_, err = digits(port, 0, 65535)
		}
		if err != nil {
			return errors.New("want host:port, such as 127.0.0.1:8000, [::1]:8000 or :8000")
		}
		*p = value
		return nil
	}
}
