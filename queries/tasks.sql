-- Where a statement knows its rows by id it compares status || '', not status: with the plain
-- column the planner may take one of the small partial indexes for cheaper than the ids and
-- read all of it, once a page, which for a long backlog is quadratic (measured: a sweep of
-- 15,000 rows took 166 us a task instead of 9).

-- name: InsertTasks :many
-- InsertTasks stores new pending tasks (T1). A row whose idempotency key is taken does
-- not come back; the caller then asks TasksByKey in a statement of its own, because
-- the snapshot of this one predates a concurrent winner.
-- Empty strings and zeros stand for NULL: sqlc's arrays carry no nulls.
INSERT INTO tasks (task_id, name, queue, payload, idempotency_key, request_hash, max_retries, timeout_ms, traceparent, run_at, published_at)
SELECT i.task_id, i.name, i.queue, i.payload::jsonb, NULLIF(i.idempotency_key, ''), i.request_hash, i.max_retries,
    NULLIF(i.timeout_ms, 0), NULLIF(i.traceparent, ''), i.run_at,
    CASE WHEN @publish::bool AND i.run_at <= now() THEN now() END
FROM (
    SELECT r.task_id, r.name, r.queue, r.payload, r.idempotency_key, r.request_hash, r.max_retries, r.timeout_ms, r.traceparent,
        CASE WHEN r.run_at_us > 0
            THEN GREATEST(now(), timestamptz 'epoch' + r.run_at_us * interval '1 microsecond')
            ELSE now() + r.delay_ms * interval '1 millisecond'
        END AS run_at
    FROM (
        SELECT unnest(@task_ids::uuid[]) AS task_id,
            unnest(@names::text[]) AS name,
            unnest(@queues::text[]) AS queue,
            unnest(@payloads::text[]) AS payload,
            unnest(@idempotency_keys::text[]) AS idempotency_key,
            unnest(@request_hashes::bytea[]) AS request_hash,
            unnest(@max_retries::int[]) AS max_retries,
            unnest(@timeouts_ms::bigint[]) AS timeout_ms,
            unnest(@traceparents::text[]) AS traceparent,
            unnest(@runs_at_us::bigint[]) AS run_at_us,
            unnest(@delays_ms::bigint[]) AS delay_ms
    ) r
) i
ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING task_id, created_at, (published_at IS NOT NULL)::bool AS published;

-- name: TasksByKey :many
-- TasksByKey finds the tasks that hold the given idempotency keys, with what a replay
-- needs: the current state and the fingerprint of the request that created them.
SELECT task_id, name, status, created_at, idempotency_key, request_hash
FROM tasks
WHERE idempotency_key = ANY(@idempotency_keys::text[]);

-- name: TasksByID :many
-- TasksByID tells which of the given tasks exist; asked after an INSERT whose reply was lost,
-- and about entries that nobody can claim.
SELECT task_id, created_at, (published_at IS NOT NULL)::bool AS published
FROM tasks
WHERE task_id = ANY(@task_ids::uuid[]);

-- name: GetTask :one
-- GetTask reads one task whole.
SELECT * FROM tasks WHERE task_id = @task_id;

-- name: ClaimTasks :many
-- ClaimTasks takes those of the given tasks that are pending and due (T2) and raises
-- their fence. A task that does not come back must not be run: it is taken, done, not
-- due, gone, or in a paused queue. Which queues are paused is read once, not for each row.
UPDATE tasks
SET status = 'processing',
    attempt = attempt + 1,
    lease_until = now() + (@lease_ms::bigint) * interval '1 millisecond',
    locked_by = @worker::text,
    started_at = now(),
    updated_at = now()
WHERE task_id = ANY(@task_ids::uuid[])
    AND status = 'pending'
    AND run_at <= now()
    AND queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
RETURNING task_id, name, payload, queue, attempt, retry_count, max_retries, timeout_ms, idempotency_key, traceparent, run_at, now()::timestamptz AS claimed_at;

-- name: ClaimUnlockedTasks :many
-- ClaimUnlockedTasks is ClaimTasks that passes over rows that somebody holds locked, for use
-- when ClaimTasks waited for one in vain. What it passes over stays pending and is
-- published again.
UPDATE tasks
SET status = 'processing',
    attempt = attempt + 1,
    lease_until = now() + (@lease_ms::bigint) * interval '1 millisecond',
    locked_by = @worker::text,
    started_at = now(),
    updated_at = now()
WHERE task_id = ANY(ARRAY(
        SELECT u.task_id FROM tasks u
        WHERE u.task_id = ANY(@task_ids::uuid[]) AND u.status = 'pending' AND u.run_at <= now()
        FOR UPDATE SKIP LOCKED
    ))
    AND status = 'pending'
    AND run_at <= now()
    AND queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
RETURNING task_id, name, payload, queue, attempt, retry_count, max_retries, timeout_ms, idempotency_key, traceparent, run_at, now()::timestamptz AS claimed_at;

-- name: ClaimDueTasks :many
-- ClaimDueTasks is ClaimTasks without the stream: it takes a page of due tasks of the
-- given queues, as far as they are not paused, straight from the table. Those without an entry
-- come first, then queue by queue in the order given, oldest first.
WITH q AS (
    SELECT g.name FROM (SELECT unnest(@queues::text[]) COLLATE "C" AS name) g
    WHERE g.name <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
), unpublished AS (
    SELECT u.task_id
    FROM q
    CROSS JOIN LATERAL (
        SELECT w.task_id, w.run_at FROM tasks w
        WHERE w.status = 'pending' AND w.published_at IS NULL AND w.run_at <= now() AND w.queue = q.name
        ORDER BY w.run_at
        LIMIT @max_rows::int
        FOR UPDATE SKIP LOCKED
    ) u
    ORDER BY u.run_at
    LIMIT @max_rows::int
), published AS (
    SELECT p.task_id
    FROM q
    CROSS JOIN LATERAL (
        SELECT w.task_id FROM tasks w
        WHERE w.status = 'pending' AND w.published_at IS NOT NULL AND w.run_at <= now() AND w.queue = q.name
        ORDER BY w.published_at
        LIMIT @max_rows::int
        FOR UPDATE SKIP LOCKED
    ) p
    LIMIT @max_rows::int
), due AS (
    SELECT task_id FROM unpublished UNION ALL SELECT task_id FROM published LIMIT @max_rows::int
)
UPDATE tasks t
SET status = 'processing',
    attempt = t.attempt + 1,
    lease_until = now() + (@lease_ms::bigint) * interval '1 millisecond',
    locked_by = @worker::text,
    started_at = now(),
    updated_at = now()
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM due))
    AND t.status = 'pending'
    AND t.run_at <= now()
    AND t.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
RETURNING t.task_id, t.name, t.payload, t.queue, t.attempt, t.retry_count, t.max_retries, t.timeout_ms, t.idempotency_key, t.traceparent, t.run_at, now()::timestamptz AS claimed_at;

-- name: BeatTasks :many
-- BeatTasks renews the leases of held attempts (T3), also of one that has expired but was
-- not reaped. An attempt that does not come back is no longer the caller's.
UPDATE tasks t
SET lease_until = now() + (@lease_ms::bigint) * interval '1 millisecond'
FROM (SELECT unnest(@task_ids::uuid[]) AS task_id, unnest(@attempts::int[]) AS attempt) h
WHERE t.task_id = h.task_id
    AND t.attempt = h.attempt
    AND t.status || '' = 'processing'
RETURNING t.task_id, t.attempt, t.cancel_requested;

-- name: BeatUnlockedTasks :many
-- BeatUnlockedTasks is BeatTasks that passes over rows that somebody holds locked: one of
-- them must not cost all others their leases. An attempt that does not come back
-- may be locked or no longer the caller's.
UPDATE tasks t
SET lease_until = now() + (@lease_ms::bigint) * interval '1 millisecond'
FROM (SELECT unnest(@task_ids::uuid[]) AS task_id, unnest(@attempts::int[]) AS attempt) h
WHERE t.task_id = h.task_id
    AND t.attempt = h.attempt
    AND t.status || '' = 'processing'
    AND t.task_id = ANY(ARRAY(
        SELECT u.task_id FROM tasks u
        WHERE u.task_id = ANY(@task_ids::uuid[])
        FOR UPDATE SKIP LOCKED
    ))
RETURNING t.task_id, t.attempt, t.cancel_requested;

-- name: CancelRequests :many
-- CancelRequests tells which of the held tasks somebody asked to cancel.
SELECT task_id FROM tasks
WHERE task_id = ANY(@task_ids::uuid[])
    AND status || '' = 'processing'
    AND cancel_requested;

-- name: CompleteTasks :many
-- CompleteTasks stores results under the fence (T4). An empty result is SQL NULL.
UPDATE tasks t
SET status = 'completed',
    result = NULLIF(o.result, '')::jsonb,
    error_message = NULL,
    finished_at = now(),
    updated_at = now(),
    lease_until = NULL,
    locked_by = NULL
FROM (
    SELECT unnest(@task_ids::uuid[]) AS task_id, unnest(@attempts::int[]) AS attempt, unnest(@results::text[]) AS result
) o
WHERE t.task_id = o.task_id
    AND t.attempt = o.attempt
    AND t.status || '' = 'processing'
RETURNING t.task_id, t.attempt, t.status, t.retry_count;

-- name: FailTasks :many
-- FailTasks stores errors under the fence (T5): the task ends when the error is permanent
-- or its retries are spent, is cancelled when that was asked for (T11), and else waits
-- in the table, holding no worker, until its next attempt is due.
UPDATE tasks t
SET status = CASE
        WHEN o.permanent OR t.retry_count >= t.max_retries THEN 'failed'
        WHEN t.cancel_requested THEN 'cancelled'
        ELSE 'pending'
    END,
    retry_count = CASE WHEN o.permanent OR t.retry_count >= t.max_retries OR t.cancel_requested THEN t.retry_count ELSE t.retry_count + 1 END,
    run_at = CASE WHEN o.permanent OR t.retry_count >= t.max_retries OR t.cancel_requested THEN t.run_at ELSE now() + o.delay_ms * interval '1 millisecond' END,
    published_at = CASE WHEN o.permanent OR t.retry_count >= t.max_retries OR t.cancel_requested THEN t.published_at END,
    finished_at = CASE WHEN o.permanent OR t.retry_count >= t.max_retries OR t.cancel_requested THEN now() END,
    error_message = o.error,
    attempts = task_ledger(t.attempts, t.attempt, t.locked_by, t.started_at,
        CASE WHEN t.cancel_requested AND NOT (o.permanent OR t.retry_count >= t.max_retries) THEN 'cancelled' ELSE 'failed' END, o.error),
    updated_at = now(),
    lease_until = NULL,
    locked_by = NULL
FROM (
    SELECT unnest(@task_ids::uuid[]) AS task_id,
        unnest(@attempts::int[]) AS attempt,
        unnest(@errors::text[]) AS error,
        unnest(@permanents::bool[]) AS permanent,
        unnest(@delays_ms::bigint[]) AS delay_ms
) o
WHERE t.task_id = o.task_id
    AND t.attempt = o.attempt
    AND t.status || '' = 'processing'
RETURNING t.task_id, t.attempt, t.status, t.retry_count;

-- name: ReleaseTasks :many
-- ReleaseTasks gives attempts back unfinished under the fence (T6), budgets untouched;
-- a task that somebody asked to cancel ends here as cancelled (T11).
UPDATE tasks t
SET status = CASE WHEN t.cancel_requested THEN 'cancelled' ELSE 'pending' END,
    run_at = CASE WHEN t.cancel_requested THEN t.run_at ELSE now() END,
    published_at = CASE WHEN t.cancel_requested THEN t.published_at END,
    finished_at = CASE WHEN t.cancel_requested THEN now() END,
    attempts = task_ledger(t.attempts, t.attempt, t.locked_by, t.started_at,
        CASE WHEN t.cancel_requested THEN 'cancelled' ELSE 'interrupted' END, o.reason),
    updated_at = now(),
    lease_until = NULL,
    locked_by = NULL
FROM (
    SELECT unnest(@task_ids::uuid[]) AS task_id, unnest(@attempts::int[]) AS attempt, unnest(@reasons::text[]) AS reason
) o
WHERE t.task_id = o.task_id
    AND t.attempt = o.attempt
    AND t.status || '' = 'processing'
RETURNING t.task_id, t.attempt, t.status, t.retry_count;

-- name: AttemptOutcomes :many
-- AttemptOutcomes reads what became of tasks whose outcome statement changed no row.
SELECT task_id, attempt, status, attempts FROM tasks
WHERE task_id = ANY(@task_ids::uuid[]);

-- name: ExpireTasks :many
-- ExpireTasks takes tasks from workers whose lease has passed (T7), oldest first, one page
-- at a time. Its guard is repeated in the UPDATE: a heartbeat or an outcome
-- that came in between wins (riverqueue/river#1302).
WITH dead AS (
    SELECT d.task_id FROM tasks d
    WHERE d.status = 'processing' AND d.lease_until < now()
    ORDER BY d.lease_until
    LIMIT @max_rows::int
    FOR UPDATE SKIP LOCKED
)
UPDATE tasks t
SET status = CASE WHEN t.cancel_requested THEN 'cancelled' WHEN t.lost_count >= @max_lost::int THEN 'failed' ELSE 'pending' END,
    lost_count = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.lost_count ELSE t.lost_count + 1 END,
    run_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.run_at ELSE now() END,
    published_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.published_at END,
    finished_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN now() END,
    error_message = 'worker lost during attempt ' || t.attempt,
    attempts = task_ledger(t.attempts, t.attempt, t.locked_by, t.started_at, 'lost', 'worker lost during attempt ' || t.attempt),
    updated_at = now(),
    lease_until = NULL,
    locked_by = NULL
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM dead))
    AND t.status || '' = 'processing'
    AND t.lease_until < now()
RETURNING t.task_id, t.name, t.status, t.attempt, t.lost_count;

-- name: ExpireTasksByID :many
-- ExpireTasksByID is ExpireTasks for the tasks of reclaimed entries. It passes over rows
-- that somebody holds locked.
UPDATE tasks t
SET status = CASE WHEN t.cancel_requested THEN 'cancelled' WHEN t.lost_count >= @max_lost::int THEN 'failed' ELSE 'pending' END,
    lost_count = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.lost_count ELSE t.lost_count + 1 END,
    run_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.run_at ELSE now() END,
    published_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN t.published_at END,
    finished_at = CASE WHEN t.cancel_requested OR t.lost_count >= @max_lost::int THEN now() END,
    error_message = 'worker lost during attempt ' || t.attempt,
    attempts = task_ledger(t.attempts, t.attempt, t.locked_by, t.started_at, 'lost', 'worker lost during attempt ' || t.attempt),
    updated_at = now(),
    lease_until = NULL,
    locked_by = NULL
WHERE t.task_id = ANY(ARRAY(
        SELECT u.task_id FROM tasks u
        WHERE u.task_id = ANY(@task_ids::uuid[]) AND u.status || '' = 'processing' AND u.lease_until < now()
        FOR UPDATE SKIP LOCKED
    ))
    AND t.status || '' = 'processing'
    AND t.lease_until < now()
RETURNING t.task_id, t.name, t.status, t.attempt, t.lost_count;

-- name: SweepUnpublished :many
-- SweepUnpublished marks due tasks that have no stream entry as published (T8); the caller
-- adds the entries, and undoes the mark with UnpublishTasks where that failed. It goes from
-- queue to queue, so that those of a paused one, however many, are not even looked at.
WITH RECURSIVE q AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NULL AND n.queue > q.queue
            ORDER BY n.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
), due AS (
    SELECT d.task_id
    FROM (
        SELECT o.queue FROM q o
        WHERE o.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
    ) o
    CROSS JOIN LATERAL (
        SELECT w.task_id, w.run_at FROM tasks w
        WHERE w.status = 'pending' AND w.published_at IS NULL AND w.queue = o.queue AND w.run_at <= now()
        ORDER BY w.run_at
        LIMIT @max_rows::int
        FOR UPDATE SKIP LOCKED
    ) d
    ORDER BY d.run_at
    LIMIT @max_rows::int
)
UPDATE tasks t
SET published_at = now()
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM due))
    AND t.status || '' = 'pending'
    AND t.published_at IS NULL
RETURNING t.task_id, t.queue;

-- name: OverdueQueues :many
-- OverdueQueues names the queues that have tasks published longer ago than the given age
-- and are not paused: one index probe a queue, however many tasks wait.
WITH RECURSIVE q AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NOT NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NOT NULL AND n.queue > q.queue
            ORDER BY n.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
)
SELECT q.queue::text AS queue FROM q
WHERE q.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
    AND EXISTS (
        SELECT FROM tasks o
        WHERE o.status = 'pending' AND o.queue = q.queue AND o.published_at < now() - (@age_ms::bigint) * interval '1 millisecond'
    );

-- name: SweepPublished :many
-- SweepPublished picks tasks of one queue whose entry is older than the given age and so
-- may be lost (T8).
WITH stale AS (
    SELECT s.task_id FROM tasks s
    WHERE s.status = 'pending' AND s.queue = @queue AND s.published_at < now() - (@age_ms::bigint) * interval '1 millisecond'
        AND s.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
    ORDER BY s.published_at
    LIMIT @max_rows::int
    FOR UPDATE SKIP LOCKED
)
UPDATE tasks t
SET published_at = now()
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM stale))
    AND t.status || '' = 'pending'
    AND t.published_at < now() - (@age_ms::bigint) * interval '1 millisecond'
RETURNING t.task_id, t.queue;

-- name: UnpublishTasks :execrows
-- UnpublishTasks says that pending tasks have no stream entry (T9); the dispatcher adds one.
-- It passes over rows that somebody holds locked; theirs is added when it counts as lost.
UPDATE tasks
SET published_at = NULL
WHERE task_id = ANY(ARRAY(
        SELECT u.task_id FROM tasks u
        WHERE u.task_id = ANY(@task_ids::uuid[]) AND u.status = 'pending'
        FOR UPDATE SKIP LOCKED
    ))
    AND status = 'pending';

-- name: DeleteFinished :one
-- DeleteFinished walks the table by its key, a page at a time, and deletes what ended
-- longer ago than the given age, idempotency key and all. It needs no index of its own
-- and skips rows that somebody holds. It returns the key to go on from; a short page is the last one.
WITH page AS (
    SELECT p.task_id, p.status, p.finished_at FROM tasks p
    WHERE p.task_id > @after_id::uuid
    ORDER BY p.task_id
    LIMIT @max_rows::int
), old AS (
    SELECT o.task_id FROM tasks o
    WHERE o.task_id IN (
            SELECT task_id FROM page
            WHERE status IN ('completed', 'failed', 'cancelled') AND finished_at < now() - (@age_ms::bigint) * interval '1 millisecond'
        )
        AND o.status IN ('completed', 'failed', 'cancelled')
        AND o.finished_at < now() - (@age_ms::bigint) * interval '1 millisecond'
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM tasks t USING old WHERE t.task_id = old.task_id RETURNING t.task_id
)
SELECT (SELECT count(*) FROM gone)::int AS deleted,
    (SELECT count(*) FROM page)::int AS seen,
    COALESCE((SELECT task_id FROM page ORDER BY task_id DESC LIMIT 1), @after_id::uuid)::uuid AS last_id;

-- name: BacklogAge :one
-- BacklogAge tells for how many milliseconds the longest waiting due task has been due; 0 if
-- none is. It reads two rows of each queue: the one whose entry is oldest, and the oldest
-- without an entry. A paused queue does not count: its tasks wait because somebody wants it.
WITH RECURSIVE published AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NOT NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NOT NULL AND n.queue > q.queue
            ORDER BY n.queue LIMIT 1)
    FROM published q WHERE q.queue IS NOT NULL
), unpublished AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NULL AND n.queue > q.queue
            ORDER BY n.queue LIMIT 1)
    FROM unpublished q WHERE q.queue IS NOT NULL
), oldest AS (
    SELECT (SELECT p.run_at FROM tasks p
            WHERE p.status = 'pending' AND p.published_at IS NOT NULL AND p.queue = q.queue
            ORDER BY p.published_at LIMIT 1) AS run_at
    FROM published q
    WHERE q.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
    UNION ALL
    SELECT (SELECT u.run_at FROM tasks u
            WHERE u.status = 'pending' AND u.published_at IS NULL AND u.queue = q.queue AND u.run_at <= now()
            ORDER BY u.run_at LIMIT 1)
    FROM unpublished q
    WHERE q.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
)
SELECT COALESCE(EXTRACT(EPOCH FROM now() - min(run_at)) * 1000, 0)::bigint AS age_ms FROM oldest;

-- name: CountOpenTasks :one
-- CountOpenTasks counts the tasks that have not ended, from the partial indexes alone: what it
-- costs grows with them and not with the table, and each count stops at the given number. overdue are due,
-- have no stream entry and are in no paused queue, expired are processing under a lease that has
-- passed: at rest there are none of either.
SELECT (SELECT count(*) FROM (
        SELECT 1 FROM tasks u WHERE u.status = 'pending' AND u.published_at IS NULL
        UNION ALL
        SELECT 1 FROM tasks p WHERE p.status = 'pending' AND p.published_at IS NOT NULL
        LIMIT @most::int
    ) c)::bigint AS pending,
    (SELECT count(*) FROM (SELECT FROM tasks r WHERE r.status = 'processing' LIMIT @most::int) c)::bigint AS processing,
    (SELECT count(*) FROM (
        SELECT FROM tasks d
        WHERE d.status = 'pending' AND d.published_at IS NULL AND d.run_at <= now()
            AND d.queue <> ALL(ARRAY(SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue))
        LIMIT @most::int
    ) c)::bigint AS overdue,
    (SELECT count(*) FROM (
        SELECT FROM tasks e WHERE e.status = 'processing' AND e.lease_until < now() LIMIT @most::int
    ) c)::bigint AS expired;

-- name: CountEndedTasks :one
-- CountEndedTasks counts the tasks that have ended. It reads the whole table: an index on status
-- would have to be written at every step of every task.
SELECT count(*) FILTER (WHERE status = 'completed')::bigint AS completed,
    count(*) FILTER (WHERE status = 'failed')::bigint AS failed,
    count(*) FILTER (WHERE status = 'cancelled')::bigint AS cancelled
FROM tasks;

-- name: AllowTime :exec
-- AllowTime gives the statements of the rest of this transaction another statement_timeout, in milliseconds.
SELECT set_config('statement_timeout', (@timeout_ms::bigint)::text, true);
