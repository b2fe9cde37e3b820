-- name: CancelTask :one
-- CancelTask ends a pending task as cancelled, and asks the worker of one that is being
-- processed to stop (T10). Against a claim or an outcome at the same moment the row decides: who
-- comes second sees what the first one made of it. No row: there is nothing to cancel, or
-- it was asked for before.
UPDATE tasks
SET status = CASE WHEN status = 'pending' THEN 'cancelled' ELSE status END,
    finished_at = CASE WHEN status = 'pending' THEN now() ELSE finished_at END,
    cancel_requested = (status = 'processing'),
    updated_at = now()
WHERE task_id = @task_id
    AND (status = 'pending' OR status = 'processing' AND NOT cancel_requested)
RETURNING *;

-- name: RetryTask :one
-- RetryTask makes a failed or cancelled task pending again, its budgets whole (T12). The
-- fence stays: a worker of before that comes back is refused. Of several callers one gets the row.
UPDATE tasks
SET status = 'pending',
    retry_count = 0,
    lost_count = 0,
    run_at = now(),
    published_at = NULL,
    cancel_requested = false,
    result = NULL,
    finished_at = NULL,
    updated_at = now()
WHERE task_id = @task_id
    AND status IN ('failed', 'cancelled')
RETURNING *;

-- name: CancelTasks :many
-- CancelTasks is CancelTask for the tasks with the given ids, as far as they are in one of the
-- given states. It passes over those that somebody holds locked, and returns all that
-- could be cancelled: with what they are now, or with '' for those it passed over.
WITH matching AS (
    SELECT m.task_id FROM tasks m
    WHERE m.task_id = ANY(@task_ids::uuid[])
        AND m.status || '' = ANY(@statuses::text[])
        AND (m.status || '' = 'pending' OR m.status || '' = 'processing' AND NOT m.cancel_requested)
), free AS (
    SELECT f.task_id FROM tasks f
    WHERE f.task_id = ANY(ARRAY(SELECT task_id FROM matching))
        AND f.status || '' = ANY(@statuses::text[])
        AND (f.status || '' = 'pending' OR f.status || '' = 'processing' AND NOT f.cancel_requested)
    FOR UPDATE SKIP LOCKED
), changed AS (
    UPDATE tasks t
    SET status = CASE WHEN t.status = 'pending' THEN 'cancelled' ELSE t.status END,
        finished_at = CASE WHEN t.status = 'pending' THEN now() ELSE t.finished_at END,
        cancel_requested = (t.status = 'processing'),
        updated_at = now()
    WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM free))
        AND t.status || '' = ANY(@statuses::text[])
        AND (t.status || '' = 'pending' OR t.status || '' = 'processing' AND NOT t.cancel_requested)
    RETURNING t.task_id, t.status
)
SELECT m.task_id, COALESCE(c.status, '')::text AS status
FROM matching m
LEFT JOIN changed c ON c.task_id = m.task_id;

-- name: RetryTasks :many
-- RetryTasks is RetryTask for the tasks with the given ids, as CancelTasks is CancelTask.
WITH matching AS (
    SELECT m.task_id FROM tasks m
    WHERE m.task_id = ANY(@task_ids::uuid[])
        AND m.status || '' = ANY(@statuses::text[])
        AND m.status || '' IN ('failed', 'cancelled')
), free AS (
    SELECT f.task_id FROM tasks f
    WHERE f.task_id = ANY(ARRAY(SELECT task_id FROM matching))
        AND f.status || '' = ANY(@statuses::text[])
        AND f.status || '' IN ('failed', 'cancelled')
    FOR UPDATE SKIP LOCKED
), changed AS (
    UPDATE tasks t
    SET status = 'pending',
        retry_count = 0,
        lost_count = 0,
        run_at = now(),
        published_at = NULL,
        cancel_requested = false,
        result = NULL,
        finished_at = NULL,
        updated_at = now()
    WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM free))
        AND t.status || '' = ANY(@statuses::text[])
        AND t.status || '' IN ('failed', 'cancelled')
    RETURNING t.task_id, t.status
)
SELECT m.task_id, COALESCE(c.status, '')::text AS status
FROM matching m
LEFT JOIN changed c ON c.task_id = m.task_id;

-- name: PauseQueue :execrows
-- PauseQueue keeps the tasks of a queue from being claimed and published from its commit on.
-- No row changes if it was paused before.
INSERT INTO queues (queue, paused) VALUES (@queue, true)
ON CONFLICT (queue) DO UPDATE SET paused = true, changed_at = now() WHERE NOT queues.paused;

-- name: ResumeQueue :execrows
-- ResumeQueue ends what PauseQueue began. The row stays: for a while it tells workers that a
-- claim of theirs may have been refused because of it.
UPDATE queues SET paused = false, changed_at = now() WHERE queue = @queue AND paused;

-- name: PausedQueues :many
-- PausedQueues lists the queues that are paused; there cannot be more than operators paused.
SELECT queue FROM queues WHERE paused ORDER BY queue LIMIT 10000;

-- name: UnpublishRefused :execrows
-- UnpublishRefused is UnpublishTasks (T9) for tasks that were not claimed, as far as their queue is paused or
-- was until a moment ago: their entries go, and the sweep after the resumption adds new ones.
UPDATE tasks
SET published_at = NULL
WHERE task_id = ANY(ARRAY(
        SELECT u.task_id FROM tasks u
        WHERE u.task_id = ANY(@task_ids::uuid[])
            AND u.status = 'pending'
            AND u.queue = ANY(ARRAY(SELECT p.queue FROM queues p WHERE p.paused OR p.changed_at > now() - interval '1 minute' ORDER BY p.queue))
        FOR UPDATE SKIP LOCKED
    ))
    AND status = 'pending';

-- name: QueueDepths :many
-- QueueDepths counts the tasks that have not ended, by queue: of the queues given, of those
-- that are paused and of all that have such tasks. It reads partial indexes only and stops
-- counting at the given number, for each queue and kind. A published task is due; the age of the
-- oldest due one is that of the row whose entry is oldest, or of the oldest without an
-- entry, in milliseconds; -1 if none is due.
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
), running AS (
    SELECT r.queue, count(*) AS n FROM tasks r WHERE r.status = 'processing' GROUP BY r.queue
), names AS (
    SELECT unnest(@queues::text[]) COLLATE "C" AS queue
    UNION SELECT queue FROM published
    UNION SELECT queue FROM unpublished
    UNION SELECT queue FROM running
    UNION (SELECT p.queue FROM queues p WHERE p.paused ORDER BY p.queue)
)
SELECT n.queue::text AS queue,
    (SELECT count(*) FROM (
        SELECT FROM tasks p WHERE p.status = 'pending' AND p.published_at IS NOT NULL AND p.queue = n.queue LIMIT @most::int
    ) c)::bigint AS published,
    (SELECT count(*) FROM (
        SELECT FROM tasks u WHERE u.status = 'pending' AND u.published_at IS NULL AND u.queue = n.queue AND u.run_at <= now() LIMIT @most::int
    ) c)::bigint AS unpublished,
    (SELECT count(*) FROM (
        SELECT FROM tasks l WHERE l.status = 'pending' AND l.published_at IS NULL AND l.queue = n.queue AND l.run_at > now() LIMIT @most::int
    ) c)::bigint AS later,
    COALESCE((SELECT r.n FROM running r WHERE r.queue = n.queue), 0)::bigint AS processing,
    COALESCE(EXTRACT(EPOCH FROM now() - LEAST(
        (SELECT p.run_at FROM tasks p
         WHERE p.status = 'pending' AND p.published_at IS NOT NULL AND p.queue = n.queue
         ORDER BY p.published_at LIMIT 1),
        (SELECT u.run_at FROM tasks u
         WHERE u.status = 'pending' AND u.published_at IS NULL AND u.queue = n.queue AND u.run_at <= now()
         ORDER BY u.run_at LIMIT 1)
    )) * 1000, -1)::bigint AS oldest_ms
FROM names n
WHERE n.queue IS NOT NULL
ORDER BY n.queue;
