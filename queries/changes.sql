-- name: TaskStates :many
-- TaskStates tells what the ETags of tasks are made of, and reads nothing large: it is
-- asked five times a second for all tasks that somebody waits for.
SELECT task_id, status, retry_count, updated_at
FROM tasks
WHERE task_id = ANY(@task_ids::uuid[]);

-- name: LiveTasks :many
-- LiveTasks reads where changes are to be expected, through indexes that are there anyway:
-- running tasks, those that are due soon without a stream entry, the heads of the
-- queues, and what the service created between two moments, which are given as the UUIDs
-- (version 7) they begin with. It takes at most max_rows of each, of running tasks eight times
-- as many, and one task perhaps twice. The planner does not see these numbers, and so reads in the
-- order of the indexes also while it has no statistics.
WITH RECURSIVE q AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NOT NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NOT NULL AND n.queue > q.queue
            ORDER BY n.queue LIMIT 1)
    FROM q WHERE q.queue IS NOT NULL
), waiting AS (
    (SELECT f.queue FROM tasks f
     WHERE f.status = 'pending' AND f.published_at IS NULL
     ORDER BY f.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT n.queue FROM tasks n
            WHERE n.status = 'pending' AND n.published_at IS NULL AND n.queue > w.queue
            ORDER BY n.queue LIMIT 1)
    FROM waiting w WHERE w.queue IS NOT NULL
)
SELECT l.task_id, l.status, l.retry_count, l.updated_at, (l.updated_at > now() - interval '10 seconds')::bool AS recent
FROM (
    (SELECT r.task_id, r.status, r.retry_count, r.updated_at FROM tasks r
     WHERE r.status = 'processing'
     ORDER BY r.lease_until DESC
     LIMIT (SELECT 8 * @max_rows::int))
    UNION ALL
    SELECT s.task_id, s.status, s.retry_count, s.updated_at
    FROM waiting w
    CROSS JOIN LATERAL (
        SELECT u.task_id, u.status, u.retry_count, u.updated_at FROM tasks u
        WHERE u.status = 'pending' AND u.published_at IS NULL AND u.queue = w.queue AND u.run_at < now() + interval '1 minute'
        ORDER BY u.run_at
        LIMIT (SELECT @max_rows::int)
    ) s
    WHERE w.queue IS NOT NULL
    UNION ALL
    SELECT h.task_id, h.status, h.retry_count, h.updated_at
    FROM q
    CROSS JOIN LATERAL (
        SELECT p.task_id, p.status, p.retry_count, p.updated_at FROM tasks p
        WHERE p.status = 'pending' AND p.published_at IS NOT NULL AND p.queue = q.queue
        ORDER BY p.published_at
        LIMIT (SELECT @max_rows::int)
    ) h
    WHERE q.queue IS NOT NULL
    UNION ALL
    (SELECT c.task_id, c.status, c.retry_count, c.updated_at FROM tasks c
     WHERE c.task_id >= @from_id::uuid AND c.task_id < @to_id::uuid
     ORDER BY c.task_id DESC
     LIMIT (SELECT @max_rows::int))
) l;

-- name: TaskSummaries :many
-- TaskSummaries reads tasks as lists and events show them: without payload and result.
SELECT task_id, name, status, retry_count, max_retries, error_message, created_at, updated_at, idempotency_key, queue,
    run_at, started_at, finished_at, timeout_ms, cancel_requested, attempt, lost_count, attempts
FROM tasks
WHERE task_id = ANY(@task_ids::uuid[]);
