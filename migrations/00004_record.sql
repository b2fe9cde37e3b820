-- +goose Up
-- Times without a zone are UTC: this is what turns them into times with one.
SET LOCAL TimeZone = 'UTC';

-- +goose StatementBegin
DO $$
DECLARE
    bad text;
BEGIN
    SELECT string_agg(quote_literal(b.task_id), ', ') INTO bad
    FROM (
        SELECT task_id::text FROM tasks
        WHERE task_id::text !~* '^\{?[0-9a-f]{4}(-?[0-9a-f]{4}){7}\}?$'
        LIMIT 5
    ) b;
    IF bad IS NOT NULL THEN
        RAISE EXCEPTION 'tasks whose task_id is not a UUID cannot be adopted, give them one or delete them: %', bad;
    END IF;
END
$$;
-- +goose StatementEnd

ALTER TABLE tasks
    ALTER COLUMN task_id DROP DEFAULT,
    ALTER COLUMN task_id TYPE uuid USING task_id::uuid,
    ALTER COLUMN name DROP DEFAULT,
    ALTER COLUMN name TYPE text,
    ALTER COLUMN status DROP DEFAULT,
    ALTER COLUMN status TYPE text USING status::text,
    ALTER COLUMN payload DROP DEFAULT,
    ALTER COLUMN payload TYPE jsonb USING payload::jsonb,
    ALTER COLUMN result DROP DEFAULT,
    ALTER COLUMN result TYPE jsonb USING result::jsonb,
    ALTER COLUMN created_at DROP DEFAULT,
    ALTER COLUMN created_at TYPE timestamptz,
    ALTER COLUMN updated_at DROP DEFAULT,
    ALTER COLUMN updated_at TYPE timestamptz,
    ALTER COLUMN retry_count DROP DEFAULT,
    ALTER COLUMN retry_count TYPE int,
    ALTER COLUMN max_retries DROP DEFAULT,
    ALTER COLUMN max_retries TYPE int,
    ALTER COLUMN error_message DROP DEFAULT,
    ALTER COLUMN error_message TYPE text,
    ALTER COLUMN idempotency_key DROP DEFAULT,
    ADD COLUMN request_hash     bytea,
    ADD COLUMN queue            text COLLATE "C" NOT NULL DEFAULT 'default',
    ADD COLUMN run_at           timestamptz      NOT NULL DEFAULT now(),
    ADD COLUMN attempt          int              NOT NULL DEFAULT 0,
    ADD COLUMN lost_count       int              NOT NULL DEFAULT 0,
    ADD COLUMN published_at     timestamptz,
    ADD COLUMN lease_until      timestamptz,
    ADD COLUMN locked_by        text,
    ADD COLUMN started_at       timestamptz,
    ADD COLUMN finished_at      timestamptz,
    ADD COLUMN timeout_ms       bigint,
    ADD COLUMN cancel_requested bool             NOT NULL DEFAULT false,
    ADD COLUMN traceparent      text,
    ADD COLUMN attempts         jsonb            NOT NULL DEFAULT '[]';

-- A status that nobody knows becomes failed, not pending: running the task again is
-- for a person to decide, who can. One that was being processed has no lease and its
-- worker is stopped, so it starts anew.
UPDATE tasks t
SET name = COALESCE(t.name, 'unnamed'),
    status = new.status,
    payload = COALESCE(t.payload, '{}'),
    created_at = COALESCE(t.created_at, t.updated_at, now()),
    updated_at = CASE WHEN new.status = t.status THEN COALESCE(t.updated_at, t.created_at, now()) ELSE now() END,
    max_retries = GREATEST(COALESCE(t.max_retries, 3), 0),
    retry_count = LEAST(GREATEST(COALESCE(t.retry_count, 0), 0), GREATEST(COALESCE(t.max_retries, 3), 0)),
    error_message = CASE WHEN new.known THEN t.error_message ELSE concat_ws('; ', t.error_message, format('unknown status %s', t.status)) END,
    run_at = LEAST(COALESCE(t.created_at, t.updated_at, now()), now()),
    finished_at = CASE WHEN new.status <> 'pending' THEN COALESCE(t.updated_at, t.created_at, now()) END
FROM (
    SELECT s.status AS old,
        COALESCE(m.status, 'failed') AS status,
        m.status IS NOT NULL AS known
    FROM (SELECT DISTINCT status FROM tasks) s
    LEFT JOIN (VALUES
        ('accepted', 'pending'), ('pending', 'pending'), ('queued', 'pending'), ('scheduled', 'pending'), ('retrying', 'pending'),
        ('processing', 'pending'), ('running', 'pending'), ('started', 'pending'), ('in_progress', 'pending'),
        ('completed', 'completed'), ('complete', 'completed'), ('done', 'completed'), ('success', 'completed'), ('succeeded', 'completed'),
        ('failed', 'failed'), ('error', 'failed'), ('dead', 'failed'), ('timeout', 'failed'),
        ('cancelled', 'cancelled'), ('canceled', 'cancelled')
    ) m (old, status) ON m.old = lower(COALESCE(s.status, 'pending'))
) new
WHERE t.status IS NOT DISTINCT FROM new.old;

ALTER TABLE tasks
    ALTER COLUMN task_id SET DEFAULT gen_random_uuid(),
    ALTER COLUMN task_id SET NOT NULL,
    ALTER COLUMN name SET NOT NULL,
    ALTER COLUMN status SET DEFAULT 'pending',
    ALTER COLUMN status SET NOT NULL,
    ALTER COLUMN payload SET DEFAULT '{}',
    ALTER COLUMN payload SET NOT NULL,
    ALTER COLUMN result DROP NOT NULL,
    ALTER COLUMN created_at SET DEFAULT now(),
    ALTER COLUMN created_at SET NOT NULL,
    ALTER COLUMN updated_at SET DEFAULT now(),
    ALTER COLUMN updated_at SET NOT NULL,
    ALTER COLUMN retry_count SET DEFAULT 0,
    ALTER COLUMN retry_count SET NOT NULL,
    ALTER COLUMN max_retries SET DEFAULT 3,
    ALTER COLUMN max_retries SET NOT NULL,
    ALTER COLUMN error_message DROP NOT NULL,
    ALTER COLUMN idempotency_key DROP NOT NULL,
    ADD CONSTRAINT tasks_status_check CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'cancelled')),
    ADD CONSTRAINT tasks_retry_count_check CHECK (retry_count <= max_retries),
    ADD CONSTRAINT tasks_lease_check CHECK ((status = 'processing') = (lease_until IS NOT NULL)),
    ADD CONSTRAINT tasks_attempts_check CHECK (jsonb_typeof(attempts) = 'array'),
    ADD CONSTRAINT tasks_attempt_check CHECK (attempt BETWEEN 0 AND 1000000000),
    ADD CONSTRAINT tasks_timeout_check CHECK (timeout_ms > 0),
    ADD CONSTRAINT tasks_run_at_check CHECK (isfinite(run_at));

-- An index on status would have to be written at every step of every task.
DROP INDEX IF EXISTS idx_tasks_status;
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

COMMENT ON FUNCTION task_ledger IS 'tasks.attempts with one more attempt, the last 20 of them';

COMMENT ON COLUMN tasks.request_hash IS 'Fingerprint of the request, to tell a repetition from another request under the same key; NULL when unknown';
COMMENT ON COLUMN tasks.queue IS 'Which queue, and so which stream, the task waits in';
COMMENT ON COLUMN tasks.run_at IS 'When the first attempt or the next one is due';
COMMENT ON COLUMN tasks.attempt IS 'How often the task was claimed. The fence: each write of an attempt names its number and fails when a later one began. Never goes down';
COMMENT ON COLUMN tasks.lost_count IS 'Attempts whose worker vanished; not counted as retries';
COMMENT ON COLUMN tasks.published_at IS 'When it was last added to the stream; NULL when it is not there';
COMMENT ON COLUMN tasks.lease_until IS 'Until when the running attempt holds the task unless its worker asks for more; NULL when none runs';
COMMENT ON COLUMN tasks.locked_by IS 'The worker of the running attempt';
COMMENT ON COLUMN tasks.started_at IS 'When the latest attempt began';
COMMENT ON COLUMN tasks.finished_at IS 'When the task ended: completed, failed or cancelled';
COMMENT ON COLUMN tasks.timeout_ms IS 'Milliseconds an attempt may run; NULL leaves it to the handler';
COMMENT ON COLUMN tasks.cancel_requested IS 'Somebody asked to cancel the running attempt';
COMMENT ON COLUMN tasks.traceparent IS 'W3C trace context of the submitter';
COMMENT ON COLUMN tasks.attempts IS 'The last 20 attempts that did not complete the task, newest last: attempt, worker, started_at, finished_at, outcome (failed, lost, cancelled, interrupted), error';

-- +goose Down
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM tasks) THEN
        RAISE EXCEPTION 'the table tasks has rows, of which this would delete a part: empty it first';
    END IF;
END
$$;
-- +goose StatementEnd

DROP FUNCTION task_ledger;
DROP INDEX tasks_unpublished_idx, tasks_published_idx, tasks_lease_idx;
ALTER TABLE tasks
    DROP CONSTRAINT tasks_status_check,
    DROP CONSTRAINT tasks_retry_count_check,
    DROP CONSTRAINT tasks_lease_check,
    DROP CONSTRAINT tasks_attempts_check,
    DROP CONSTRAINT tasks_attempt_check,
    DROP CONSTRAINT tasks_timeout_check,
    DROP CONSTRAINT tasks_run_at_check,
    DROP COLUMN request_hash,
    DROP COLUMN queue,
    DROP COLUMN run_at,
    DROP COLUMN attempt,
    DROP COLUMN lost_count,
    DROP COLUMN published_at,
    DROP COLUMN lease_until,
    DROP COLUMN locked_by,
    DROP COLUMN started_at,
    DROP COLUMN finished_at,
    DROP COLUMN timeout_ms,
    DROP COLUMN cancel_requested,
    DROP COLUMN traceparent,
    DROP COLUMN attempts;
