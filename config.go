package main

import (
	"log/slog"
	"time"
)

// config holds every setting; nothing else reads the environment.
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
}

// queueWeight is one entry of QUEUES.
type queueWeight struct {
	name   string
	weight int
}
