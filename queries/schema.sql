-- name: TryLock :one
-- TryLock takes the advisory lock of the given number for this connection unless another holds it.
SELECT pg_try_advisory_lock(@id::bigint) AS locked;

-- name: Unlock :one
-- Unlock gives the lock back; false means that the connection did not hold it.
SELECT pg_advisory_unlock(@id::bigint) AS unlocked;

-- name: ReadOnly :one
-- ReadOnly tells whether statements may change nothing: on a standby, and where an operator said so.
SELECT (current_setting('transaction_read_only') = 'on')::bool AS read_only;

-- name: HasKeyIndex :one
-- HasKeyIndex tells whether the task table is there with a usable unique index on its idempotency keys.
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_index
    WHERE indexrelid = to_regclass('tasks_idempotency_key_idx') AND indrelid = to_regclass('tasks') AND indisunique AND indisvalid
)::bool AS present;

-- name: MissingGrants :many
-- MissingGrants lists the statements that would give this role what it lacks of the rights a process
-- needs, whatever its roles: one for each table. A table that is not there is left out.
SELECT format('GRANT %s ON %s TO %I', string_agg(p.privilege, ', ' ORDER BY p.privilege), to_regclass(t.name), current_user)::text AS statement
FROM unnest(ARRAY['tasks', 'queues', 'goose_db_version']) AS t (name)
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (privilege)
WHERE NOT has_table_privilege(to_regclass(t.name), p.privilege)
    AND (t.name = 'tasks' OR p.privilege = 'SELECT' OR (t.name = 'queues' AND p.privilege <> 'DELETE'))
GROUP BY t.name
ORDER BY t.name;
