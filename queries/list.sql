-- name: ListTasks :many
-- ListTasks reads a page of the tasks in the given states, of one name unless that is
-- NULL, that were created at since or later: newest first, from the given place on. Running
-- tasks are all looked at, and no more of them run than there are slots. The others are
-- merged from their groups, the tasks of one state and name each (as far as 128 characters
-- tell), which the index holds one after the other, each in the order of the list. Without a
-- name the groups there are have to be found, by one look into the index each. Where the newest
-- task of a group is known, reading begins there: what is newer in the index are tasks that
-- have left the group, a million of them perhaps until the next vacuum.
WITH RECURSIVE groups AS (
    -- With a name the groups are known. Without, these are the places behind the last group of each state, for ! follows the blank.
    SELECT s.status, (s.status || COALESCE(' ' || left(sqlc.narg('name')::text, 128), '!')) COLLATE "C" AS key, @before::timestamptz AS newest
    FROM (SELECT unnest(@statuses::text[]) COLLATE "C" AS status) s
    UNION ALL
    SELECT g.status, n.key, LEAST(n.created_at, @before::timestamptz)
    FROM groups g
    CROSS JOIN LATERAL (
        SELECT (f.status || ' ' || left(f.name, 128)) COLLATE "C" AS key, f.created_at FROM tasks f
        WHERE (f.status || ' ' || left(f.name, 128)) COLLATE "C" < g.key AND (f.status || ' ' || left(f.name, 128)) COLLATE "C" > g.status
            AND f.lease_until IS NULL
        ORDER BY (f.status || ' ' || left(f.name, 128)) COLLATE "C" DESC, f.created_at DESC
        LIMIT 1
    ) n
    WHERE sqlc.narg('name')::text IS NULL
), heads AS (
    -- The first rows of each group: altogether four times what the page holds, so that these fill
    -- it with new ones even if most groups have none. A group that begins behind the place counts only
    -- if its newest task is among the newest of such groups: there are no more rows on the page.
    SELECT g.key, h.created_at, h.task_id
    FROM groups g
    CROSS JOIN LATERAL (
        SELECT f.created_at, f.task_id FROM tasks f
        WHERE (f.status || ' ' || left(f.name, 128)) COLLATE "C" = g.key AND f.lease_until IS NULL
            AND (sqlc.narg('name')::text IS NULL OR f.name = sqlc.narg('name')::text)
            AND f.created_at >= @since::timestamptz AND (f.created_at, f.task_id) < (LEAST(g.newest + interval '1 microsecond', @before::timestamptz), @before_id::uuid)
        ORDER BY f.created_at DESC, f.task_id DESC
        LIMIT (SELECT 1 + 4 * (@max_rows::int) / count(*) FROM groups)
    ) h
    WHERE g.newest >= COALESCE((SELECT k.newest FROM groups k WHERE k.newest < @before::timestamptz ORDER BY k.newest DESC OFFSET (@max_rows::int) - 1 LIMIT 1), @since::timestamptz)
), bound AS (
    -- Nothing behind this is on the page, for there are heads enough to fill it; no row if there are not.
    SELECT h.created_at, h.task_id FROM heads h ORDER BY h.created_at DESC, h.task_id DESC OFFSET (@max_rows::int) - 1 LIMIT 1
), since AS (
    SELECT COALESCE((SELECT b.created_at FROM bound b), @since::timestamptz) AS created_at,
        COALESCE((SELECT b.task_id FROM bound b), '00000000-0000-0000-0000-000000000000') AS task_id
), page AS (
    SELECT i.created_at, i.task_id
    FROM (
        SELECT h.key, max(h.created_at) AS newest FROM heads h
        WHERE (h.created_at, h.task_id) >= ((SELECT l.created_at FROM since l), (SELECT l.task_id FROM since l))
        GROUP BY h.key
    ) g
    CROSS JOIN LATERAL (
        SELECT f.created_at, f.task_id FROM tasks f
        WHERE (f.status || ' ' || left(f.name, 128)) COLLATE "C" = g.key AND f.lease_until IS NULL
            AND (sqlc.narg('name')::text IS NULL OR f.name = sqlc.narg('name')::text)
            AND (f.created_at, f.task_id) >= ((SELECT l.created_at FROM since l), (SELECT l.task_id FROM since l))
            AND (f.created_at, f.task_id) < (LEAST(g.newest + interval '1 microsecond', @before::timestamptz), @before_id::uuid)
        ORDER BY f.created_at DESC, f.task_id DESC
        LIMIT (SELECT @max_rows::int) -- a number that the planner does not see makes it read in the order of the index, however few it expects
    ) i
    UNION ALL
    SELECT r.created_at, r.task_id FROM tasks r
    WHERE 'processing' = ANY(@statuses::text[]) AND r.status = 'processing'
        AND (sqlc.narg('name')::text IS NULL OR r.name = sqlc.narg('name')::text)
        AND r.created_at >= @since::timestamptz AND (r.created_at, r.task_id) < (@before::timestamptz, @before_id::uuid)
    ORDER BY created_at DESC, task_id DESC
    LIMIT @max_rows::int
)
SELECT t.task_id, t.name, t.status, t.retry_count, t.max_retries, t.error_message, t.created_at, t.updated_at, t.idempotency_key, t.queue,
    t.run_at, t.started_at, t.finished_at, t.timeout_ms, t.cancel_requested, t.attempt, t.lost_count, t.attempts
FROM tasks t
WHERE t.task_id = ANY(ARRAY(SELECT task_id FROM page))
ORDER BY t.created_at DESC, t.task_id DESC;
