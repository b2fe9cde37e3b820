package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// load is loadConfig with an environment of its own.
func load(env map[string]string) (config, []string, error) {
	var environ []string
	for name, value := range env {
		environ = append(environ, name+"="+value)
	}
	slices.Sort(environ)
	return loadConfig(func(name string) string { return env[name] }, environ, false)
}

func TestLoadConfigDefaults(t *testing.T) {
	t.Chdir(t.TempDir())
	c, warnings, err := load(map[string]string{"LEASE": ""})
	if err != nil || len(warnings) > 0 {
		t.Fatalf("loadConfig of an empty environment = %v, warnings %q", err, warnings)
	}
	if !c.Gateway || !c.Worker || !c.EmbeddedPostgres || !c.EmbeddedRedis || !c.MigrateOnStart || c.DataDirSet || c.AllowAnonymous {
		t.Errorf("switches are wrong: %#v", [...]bool{c.Gateway, c.Worker, c.EmbeddedPostgres, c.EmbeddedRedis, c.MigrateOnStart, c.DataDirSet, c.AllowAnonymous})
	}
	got := []any{
		c.HTTPAddr, c.DataDir, c.StreamName, c.ConsumerGroup, c.Queues, c.StartupMaxRetries, c.StartupRetryDelay,
		c.WorkerConcurrency, c.Block, c.Backoff, c.PELScanInterval, c.PELIdleThreshold, c.Lease, c.SweepInterval, c.RepublishAfter,
		c.MaxLost, c.MaxRetries, c.TaskTimeout, c.MaxTaskTimeout, c.HandlersFile, c.TaskRetention, c.ShutdownGrace,
		c.MaxBacklogAge, c.LogLevel, c.LogFormat,
	}
	want := []any{
		"127.0.0.1:8000", ".nexusflow", "tasks", "workers", []queueWeight{{"default", 1}}, 10, 2 * time.Second,
		16, 2 * time.Second, backoff{time.Second, 30 * time.Second, 0.1}, 30 * time.Second, time.Minute, 30 * time.Second, time.Second, 15 * time.Second,
		3, 3, 5 * time.Minute, 24 * time.Hour, "", 30 * 24 * time.Hour, 25 * time.Second,
		time.Duration(0), slog.LevelInfo, "json",
	}
	if fmt.Sprint(got...) != fmt.Sprint(want...) {
		t.Errorf("defaults\n got %v\nwant %v", got, want)
	}
	if other, _, _ := load(nil); c.ConsumerName == other.ConsumerName || !strings.Contains(c.ConsumerName, fmt.Sprintf("-%d-", os.Getpid())) {
		t.Errorf("consumer names %q and %q: want host, pid and a random part", c.ConsumerName, other.ConsumerName)
	}
	if tty, _, _ := loadConfig(func(string) string { return "" }, nil, true); tty.LogFormat != "text" {
		t.Errorf("LogFormat on a terminal = %q, want text", tty.LogFormat)
	}
}

// TestLoadConfigSmallValues admits the settings that fault tests run with.
func TestLoadConfigSmallValues(t *testing.T) {
	c, warnings, err := load(map[string]string{
		"LEASE": "2s", "SWEEP_INTERVAL": "200ms", "REPUBLISH_AFTER": "2s", "MAX_LOST": "3", "PEL_SCAN_INTERVAL_S": "1",
		"PEL_IDLE_THRESHOLD_MS": "2500", "REQUEUE_BASE_DELAY_MS": "1", "REQUEUE_MAX_DELAY_MS": "5", "REQUEUE_JITTER": "0",
		"SHUTDOWN_GRACE": "2s", "WORKER_CONCURRENCY": "4", "BLOCK_MS": "200", "MAX_RETRIES": "80", "HTTP_ADDR": "127.0.0.1:0",
		"TASK_RETENTION": "0", "MAX_BACKLOG_AGE": "0s", "QUEUES": "critical:6, default:3,low:1", "ROLES": "worker",
		"PGHOST": "/tmp", "LOG_LEVEL": "WARN", "ALLOW_ANONYMOUS": "true", "MIGRATE_ON_START": "false",
	})
	if err != nil || len(warnings) > 0 {
		t.Fatalf("loadConfig = %v, warnings %q", err, warnings)
	}
	if c.EmbeddedPostgres || c.Gateway || !c.Worker || c.MigrateOnStart || c.LogLevel != slog.LevelWarn || c.TaskRetention != 0 {
		t.Errorf("loadConfig = %v", c)
	}
	if want := []queueWeight{{"critical", 6}, {"default", 3}, {"low", 1}}; !slices.Equal(c.Queues, want) {
		t.Errorf("Queues = %v, want %v", c.Queues, want)
	}
}

func TestLoadConfigRefuses(t *testing.T) {
	numeric := []string{
		"STARTUP_MAX_RETRIES", "STARTUP_RETRY_DELAY_S", "WORKER_CONCURRENCY", "BLOCK_MS", "REQUEUE_BASE_DELAY_MS",
		"REQUEUE_MAX_DELAY_MS", "PEL_SCAN_INTERVAL_S", "PEL_IDLE_THRESHOLD_MS", "MAX_LOST", "MAX_RETRIES",
	}
	durations := []string{"LEASE", "SWEEP_INTERVAL", "REPUBLISH_AFTER", "TASK_TIMEOUT", "MAX_TASK_TIMEOUT", "TASK_RETENTION", "SHUTDOWN_GRACE", "MAX_BACKLOG_AGE"}
	bad := map[string][]string{
		"REQUEUE_JITTER":        {"abc", "1.01", "-0.1", "1e-1", "0x1p-2", "NaN", "0.1.1"},
		"HTTP_ADDR":             {"8000", "localhost", ":http", "127.0.0.1:65536", "::1:8000", ":-1"},
		"ROLES":                 {"boss", "gateway,", "gateway worker"},
		"QUEUES":                {"default", "a:0", "a:101", "A:1", "a b:1", "a:1,a:2", "a:1,,b:1", ":1", "a:1:1", strings.Repeat("a", 65) + ":1"},
		"STREAM_NAME":           {"a b", "ä", strings.Repeat("a", 201)},
		"CONSUMER_NAME":         {"a\nb"},
		"MIGRATE_ON_START":      {"yes", "on"},
		"LOG_LEVEL":             {"verbose", "info+2"},
		"LOG_FORMAT":            {"xml", "JSON"},
		"DATA_DIR":              {" "},
		"TASK_RETENTION":        {"23h", "1s"},
		"EMBEDDED_POSTGRES_URL": {"mirror", "ftp://mirror/", "https://"},
		"API_KEYS":              {"a b", "a,,b", "schlüssel"},
		"WEBHOOK_SECRETS":       {"whsec_", "whsec_%%%", ","},
	}
	for _, name := range numeric {
		bad[name] = append(bad[name], "abc", "30s", "1_000", "1e3", "5.5", " 5", "+5", "-1", "0x10", "99999999999999999999")
	}
	for _, name := range durations {
		bad[name] = append(bad[name], "abc", "30", "1_000", "1e3", "5.5", " 5s", "-1s", "2000000h")
	}
	for _, name := range []string{"PEL_SCAN_INTERVAL_S", "BLOCK_MS", "WORKER_CONCURRENCY"} {
		bad[name] = append(bad[name], "0")
	}
	bad["LEASE"] = append(bad["LEASE"], "0s", "0")
	bad["SWEEP_INTERVAL"] = append(bad["SWEEP_INTERVAL"], "0s")
	secrets := secretSettings()
	for name, values := range bad {
		for _, value := range values {
			_, _, err := load(map[string]string{name: value})
			if err == nil {
				t.Errorf("%s=%q was accepted", name, value)
				continue
			}
			text := err.Error()
			if !strings.HasPrefix(text, name) || !strings.Contains(text, "want ") || strings.Contains(text, "\n") {
				t.Errorf("%s=%q: error %q: want one line with the name and what is allowed", name, value, text)
			}
			if shown := strings.Contains(text, fmt.Sprintf("%q", value)); shown == slices.Contains(secrets, name) && len(value) <= 80 {
				t.Errorf("%s=%q: error %q: the value belongs in it exactly if it is no secret", name, value, text)
			}
		}
	}
}

func TestLoadConfigContradictions(t *testing.T) {
	for _, test := range []struct {
		name string
		env  map[string]string
		want string // in the error; "" = none
	}{
		{"threshold below lease", map[string]string{"PEL_IDLE_THRESHOLD_MS": "29999"}, "PEL_IDLE_THRESHOLD_MS=29999: must be at least LEASE, which is 30s"},
		{"threshold is lease", map[string]string{"PEL_IDLE_THRESHOLD_MS": "30000"}, ""},
		{"cap below base", map[string]string{"REQUEUE_MAX_DELAY_MS": "999"}, "REQUEUE_MAX_DELAY_MS=999: must be at least"},
		{"time-outs", map[string]string{"MAX_TASK_TIMEOUT": "1m"}, "MAX_TASK_TIMEOUT=1m: must be at least TASK_TIMEOUT, which is 5m"},
		{"slow stop", map[string]string{"SHUTDOWN_GRACE": "1s", "BLOCK_MS": "3001"}, "BLOCK_MS=3001: "},
		{"open to others", map[string]string{"HTTP_ADDR": ":8000"}, "HTTP_ADDR=\":8000\": others can reach"},
		{"open to others by name", map[string]string{"HTTP_ADDR": "example.org:8000"}, "HTTP_ADDR="},
		{"open to others in v6", map[string]string{"HTTP_ADDR": "[::]:8000"}, "HTTP_ADDR="},
		{"loopback in v6", map[string]string{"HTTP_ADDR": "[::1]:8000"}, ""},
		{"loopback by name", map[string]string{"HTTP_ADDR": "localhost:8000"}, ""},
		{"loopback mapped", map[string]string{"HTTP_ADDR": "[::ffff:127.0.0.2]:8000"}, ""},
		{"open on purpose", map[string]string{"HTTP_ADDR": ":8000", "ALLOW_ANONYMOUS": "true"}, ""},
		{"open with keys", map[string]string{"HTTP_ADDR": ":8000", "API_KEYS": "0123456789abcdef"}, ""},
		{"worker has nothing to guard", map[string]string{"HTTP_ADDR": ":8000", "ROLES": "worker"}, ""},
		{"nobody may submit", map[string]string{"READ_API_KEYS": "0123456789abcdef"}, "READ_API_KEYS: needs API_KEYS"},
		{"key with two rights", map[string]string{"READ_API_KEYS": "0123456789abcdef", "API_KEYS": "a,0123456789abcdef"}, "READ_API_KEYS: one of the keys"},
		{"migrations elsewhere", map[string]string{"MIGRATION_DATABASE_URL": "postgres://u@h/d"}, "MIGRATION_DATABASE_URL: needs DATABASE_URL"},
		{"the original's PostgreSQL", map[string]string{"POSTGRES_DB": "nexusflow"}, "POSTGRES_DB: is not read and DATABASE_URL is not set"},
		{"the original's Redis", map[string]string{"REDIS_HOST": "redis"}, "REDIS_HOST: is not read and REDIS_URL is not set"},
		{"the original's servers beside URLs", map[string]string{"POSTGRES_HOST": "p", "REDIS_HOST": "r", "DATABASE_URL": "postgres://u@p/d", "REDIS_URL": "redis://r"}, ""},
		{"the original's PostgreSQL beside PGHOST", map[string]string{"POSTGRES_HOST": "p", "PGHOST": "p"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, _, err := load(test.env)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("loadConfig = %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n")):
				t.Errorf("loadConfig = %v, want the one line %q", err, test.want)
			}
		})
	}
}

func TestLoadConfigReportsAllProblems(t *testing.T) {
	_, _, err := load(map[string]string{
		"LEASE": "abc", "PEL_IDLE_THRESHOLD_MS": "100", // no contradiction with a lease nobody knows
		"MAX_LOST": "-1", "REDIS_HOST": "redis", "HTTP_ADDR": ":8000", "ROLES": "gateway",
	})
	if err == nil {
		t.Fatal("loadConfig = nil")
	}
	var names []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		names = append(names, regexp.MustCompile(`^[A-Z_]+`).FindString(line))
	}
	if want := []string{"LEASE", "MAX_LOST", "REDIS_HOST", "HTTP_ADDR"}; !slices.Equal(names, want) {
		t.Errorf("problems of %q, want of %q:\n%v", names, want, err)
	}
}

func TestLoadConfigServers(t *testing.T) {
	const password = "hunter2"
	for _, test := range []struct {
		name, value string
		ok          bool
	}{
		{"DATABASE_URL", "postgres://u:hunter2@h:5432/d?sslmode=disable&pool_max_conns=20", true},
		{"DATABASE_URL", "postgresql://u:p%40ss%23w%2F@[::1]:5432/d", true},
		{"DATABASE_URL", "postgres://u:hunter2@h1:5432,h2:5433/d?target_session_attrs=read-write", true},
		{"DATABASE_URL", "postgres:///d?host=/run/postgresql", true},
		{"DATABASE_URL", "postgres://u@h/d?application_name=me@here&default_query_exec_mode=exec", true},
		{"DATABASE_URL", "host=h user=u password='hunter2 # @' dbname=d", true},
		{"DATABASE_URL", "postgres://u:p@hunter2#w@host/db", false},
		{"DATABASE_URL", "postgres://u:p@hunter2@host/db", false},
		{"DATABASE_URL", "postgres://u:5/hunter2@host/db", false},
		{"DATABASE_URL", "postgres://u:hunter2%zz@host/db", false},
		{"DATABASE_URL", "postgres://u:hunter2@host:port/db", false},
		{"DATABASE_URL", "postgres://u:hunter2@host/db?sslmode=maybe", false},
		{"DATABASE_URL", "postgres://u:hunter2@host/db?pool_max_conns=many", false},
		{"DATABASE_URL", "postgresql+asyncpg://u:hunter2@host/db", false},
		{"DATABASE_URL", "mysql://u:hunter2@host/db", false},
		{"DATABASE_URL", "u:hunter2@host/db", false},
		{"DATABASE_URL", "host=h password=hunter2 password", false},
		{"REDIS_URL", "redis://h", true},
		{"REDIS_URL", "redis://:p%40s%3As%2Fw%231%25%3F@h:6379/0", true},
		{"REDIS_URL", "rediss://u:hunter2@[::1]:6380/3?dial_timeout=1s", true},
		{"REDIS_URL", "redis://u:hunter2@h1:6379?addr=h2:6379&addr=h3:6379", true},
		{"REDIS_URL", "redis://u:hunter2@s1:26379/0?master_name=m&addr=s2:26379", true},
		{"REDIS_URL", "unix://u:hunter2@/run/redis.sock?db=1", true},
		{"REDIS_URL", "redis://:p@hunter2#1@h:6379", false},
		{"REDIS_URL", "redis://:1/hunter2@h:6379", false},
		{"REDIS_URL", "redis://:1?hunter2@h:6379", false},
		{"REDIS_URL", "redis://:hunter2:x@h:port", false},
		{"REDIS_URL", "redis://:hunter2@h:65536", false},
		{"REDIS_URL", "redis://:hunter2%zz@h", false},
		{"REDIS_URL", "redis://:hunter2@h:6379/one", false},
		{"REDIS_URL", "http://:hunter2@h:6379", false},
		{"REDIS_URL", "unix://:hunter2@", false},
		{"REDIS_URL", "hunter2@h:6379", false},
	} {
		c, _, err := load(map[string]string{test.name: test.value})
		if (err == nil) != test.ok {
			t.Errorf("%s=%s: error %v, want ok %t", test.name, test.value, err, test.ok)
		}
		if err != nil && (strings.Contains(err.Error(), password) || !strings.HasPrefix(err.Error(), test.name+": ")) {
			t.Errorf("%s=%s: error %q shows the password or no name", test.name, test.value, err)
		}
		if test.ok && c.DatabaseURL+c.RedisURL != test.value {
			t.Errorf("%s=%s: read as %q and %q", test.name, test.value, c.DatabaseURL, c.RedisURL)
		}
		if c.MigrationDatabaseURL != c.DatabaseURL {
			t.Errorf("%s=%s: migrations go to %q", test.name, test.value, c.MigrationDatabaseURL)
		}
	}
}

func TestLoadConfigHandlersFile(t *testing.T) {
	t.Chdir(t.TempDir())
	if c, _, err := load(nil); err != nil || c.HandlersFile != "" {
		t.Errorf("without a file: HandlersFile = %q, %v", c.HandlersFile, err)
	}
	if err := os.WriteFile("handlers.json", []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, _, err := load(nil); err != nil || c.HandlersFile != "handlers.json" {
		t.Errorf("with a file: HandlersFile = %q, %v", c.HandlersFile, err)
	}
	if c, _, err := load(map[string]string{"HANDLERS_FILE": "x.json"}); err != nil || c.HandlersFile != "x.json" {
		t.Errorf("with a setting: HandlersFile = %q, %v", c.HandlersFile, err)
	}
}

func TestLoadConfigWarnings(t *testing.T) {
	_, warnings, err := load(map[string]string{
		"LAESE": "2s", "MAX_RETRIE": "1", "SWEEP_INTERVALS": "1s", "LOG_LEVEI": "info", "http_addr": "x",
		"PLEASE_": "no", "PATH": "/bin", "HOSTNAME": "h", "LEASES": "", "API_KEYS": "short",
	})
	want := []string{
		"LAESE is not a setting: is LEASE meant?",
		"LOG_LEVEI is not a setting: is LOG_LEVEL meant?",
		"MAX_RETRIE is not a setting: is MAX_RETRIES meant?",
		"SWEEP_INTERVALS is not a setting: is SWEEP_INTERVAL meant?",
		"http_addr is not a setting: is HTTP_ADDR meant?",
		"API_KEYS: a key has fewer than 16 characters and may be guessed",
	}
	if err != nil || !slices.Equal(warnings, want) {
		t.Errorf("loadConfig = %v, warnings\n%q\nwant\n%q", err, warnings, want)
	}
	for _, s := range new(config).settings() {
		for _, other := range new(config).settings() {
			if s.name != other.name && oneEdit(s.name, other.name) {
				t.Errorf("%s and %s are one edit apart", s.name, other.name)
			}
		}
	}
}

// TestConfigHidesSecrets prints a config in every way that a careless line may.
func TestConfigHidesSecrets(t *testing.T) {
	secret := "hunter2hunter2hunter2"
	c, _, err := load(map[string]string{
		"DATABASE_URL": "postgres://u:" + secret + "@h/d", "MIGRATION_DATABASE_URL": "postgres://u:" + secret + "@h/e",
		"REDIS_URL": "redis://:" + secret + "@h", "EMBEDDED_POSTGRES_URL": "https://u:" + secret + "@mirror/",
		"API_KEYS": secret, "READ_API_KEYS": "r" + secret, "WEBHOOK_SECRETS": secret, "LEASE": "7s",
	})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	slog.New(slog.NewJSONHandler(&out, nil)).Info("starting", "settings", c)
	slog.New(slog.NewTextHandler(&out, nil)).Info("starting", "settings", &c)
	fmt.Fprintf(&out, "%v %+v %#v %s %q %v %+v", c, c, c, c, c, &c, &c)
	if strings.Contains(out.String(), secret) {
		t.Errorf("a secret is shown: %s", out.String())
	}
	if strings.Count(out.String(), "7s") != 9 {
		t.Errorf("LEASE is not shown each time: %s", out.String())
	}
	for _, name := range []string{"DATABASE_URL", "MIGRATION_DATABASE_URL", "REDIS_URL", "EMBEDDED_POSTGRES_URL", "API_KEYS", "READ_API_KEYS", "WEBHOOK_SECRETS", "PGPASSWORD"} {
		if !slices.Contains(secretSettings(), name) {
			t.Errorf("secretSettings() lacks %s", name)
		}
	}
}

// TestReadmeSettings compares the README's table of settings with the code's.
func TestReadmeSettings(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, s := range new(config).settings() {
		def := s.defaultText()
		if s.def != "" {
			def = "`" + def + "`"
		}
		fmt.Fprintf(&want, "| `%s` | %s | %s |\n", s.name, def, s.meaning)
	}
	if !strings.Contains(string(readme), "| name | default | meaning |\n|---|---|---|\n"+want.String()+"\n") {
		t.Errorf("README.md lacks this table of settings:\n%s", want.String())
	}
}

func TestUsage(t *testing.T) {
	var out bytes.Buffer
	usage(&out)
	for _, s := range new(config).settings() {
		if !regexp.MustCompile(`(?m)^` + s.name + ` +` + regexp.QuoteMeta(s.defaultText()) + ` +\S`).MatchString(out.String()) {
			t.Errorf("usage lacks %s with its default:\n%s", s.name, out.String())
		}
	}
}
