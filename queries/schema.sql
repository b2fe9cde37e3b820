-- name: TryLock :one
-- TryLock takes the advisory lock of the given number for this connection unless another holds it.
SELECT pg_try_advisory_lock(@id::bigint) AS locked;

-- name: Unlock :one
-- Unlock gives the lock back; false means that the connection did not hold it.
SELECT pg_advisory_unlock(@id::bigint) AS unlocked;

-- name: HasKeyIndex :one
-- HasKeyIndex tells whether the task table is there with a usable unique index on its idempotency keys.
SELECT EXISTS (
    SELECT FROM pg_catalog.pg_index
    WHERE indexrelid = to_regclass('tasks_idempotency_key_idx') AND indrelid = to_regclass('tasks') AND indisunique AND indisvalid
)::bool AS present;
