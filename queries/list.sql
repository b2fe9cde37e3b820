-- name: ListTasks :many
-- ListTasks reads a page of the tasks in the given states, of one name unless that is
-- NULL, that were created at since or later: newest first, from the given place on. It
-- takes no more rows of a state from an index than the page holds; only the running
-- ones are all looked at, and no more of them run than there are slots.
WITH page AS (
    SELECT i.created_at, i.task_id
    FROM (SELECT unnest(@statuses::text[]) AS status) s
    CROSS JOIN LATERAL (
        (SELECT a.created_at, a.task_id FROM tasks a
         WHERE sqlc.narg('name')::text IS NULL
            AND a.status = s.status AND a.lease_until IS NULL
            AND a.created_at >= @since AND (a.created_at, a.task_id) < (@before::timestamptz, @before_id::uuid)
         ORDER BY a.created_at DESC, a.task_id DESC
         LIMIT @max_rows::int)
        UNION ALL
        (SELECT n.created_at, n.task_id FROM tasks n
         WHERE n.status || ' ' || left(n.name, 128) = s.status || ' ' || left(sqlc.narg('name')::text, 128)
            AND n.name = sqlc.narg('name')::text AND n.lease_until IS NULL
            AND n.created_at >= @since AND (n.created_at, n.task_id) < (@before::timestamptz, @before_id::uuid)
         ORDER BY n.created_at DESC, n.task_id DESC
         LIMIT (SELECT @max_rows::int)) -- a number that the planner does not see makes it read in the order of the index, however few it expects
    ) i
    UNION ALL
    SELECT r.created_at, r.task_id FROM tasks r
    WHERE 'processing' = ANY(@statuses::text[]) AND r.status = 'processing'
        AND (sqlc.narg('name')::text IS NULL OR r.name = sqlc.narg('name')::text)
        AND r.created_at >= @since AND (r.created_at, r.task_id) < (@before::timestamptz, @before_id::uuid)
    ORDER BY created_at DESC, task_id DESC
    LIMIT @max_rows::int
)
SELECT t.task_id, t.name, t.status, t.retry_count, t.max_retries, t.error_message, t.created_at, t.updated_at, t.idempotency_key, t.queue,
    t.run_at, t.started_at, t.finished_at, t.timeout_ms, t.cancel_requested, t.attempt, t.lost_count, t.attempts
FROM tasks t
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM page))
ORDER BY t.created_at DESC, t.task_id DESC;
