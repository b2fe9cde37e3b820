-- +goose Up
ALTER TABLE tasks
    ADD COLUMN IF NOT EXISTS retry_count      int         NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_retries      int         NOT NULL DEFAULT 3,
    ADD COLUMN IF NOT EXISTS error_message    text,
    ADD COLUMN IF NOT EXISTS idempotency_key  text COLLATE "C",
    ADD COLUMN IF NOT EXISTS request_hash     bytea,
    ADD COLUMN IF NOT EXISTS queue            text COLLATE "C" NOT NULL DEFAULT 'default',
    ADD COLUMN IF NOT EXISTS run_at           timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN IF NOT EXISTS attempt          int         NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS lost_count       int         NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS published_at     timestamptz,
    ADD COLUMN IF NOT EXISTS lease_until      timestamptz,
    ADD COLUMN IF NOT EXISTS locked_by        text,
    ADD COLUMN IF NOT EXISTS started_at       timestamptz,
    ADD COLUMN IF NOT EXISTS finished_at      timestamptz,
    ADD COLUMN IF NOT EXISTS timeout_ms       bigint,
    ADD COLUMN IF NOT EXISTS cancel_requested bool        NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS traceparent      text,
    ADD COLUMN IF NOT EXISTS attempts         jsonb       NOT NULL DEFAULT '[]';

ALTER TABLE tasks
    ADD CONSTRAINT tasks_status_check CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'cancelled')),
    ADD CONSTRAINT tasks_retry_count_check CHECK (retry_count <= max_retries),
    ADD CONSTRAINT tasks_lease_check CHECK ((status = 'processing') = (lease_until IS NOT NULL)),
    ADD CONSTRAINT tasks_attempts_check CHECK (jsonb_typeof(attempts) = 'array');

CREATE UNIQUE INDEX IF NOT EXISTS tasks_idempotency_key_idx ON tasks (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX tasks_unpublished_idx ON tasks (run_at) WHERE status = 'pending' AND published_at IS NULL;
CREATE INDEX tasks_published_idx ON tasks (queue, published_at) WHERE status = 'pending' AND published_at IS NOT NULL;
CREATE INDEX tasks_lease_idx ON tasks (lease_until) WHERE status = 'processing';

-- +goose StatementBegin
CREATE FUNCTION task_ledger(attempts jsonb, attempt int, worker text, started_at timestamptz, outcome text, error text)
RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN jsonb_array_length(attempts) >= 20 THEN attempts - 0 ELSE attempts END
        || jsonb_build_object(
            'attempt', attempt,
            'worker', worker,
            'started_at', to_char(started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
            'finished_at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
            'outcome', outcome,
            'error', error)
$$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION task_ledger;
