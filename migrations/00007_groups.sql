-- +goose NO TRANSACTION
-- +goose Up
-- The index is built beside running writers, and what is being built or was left is treated, as in version 5.
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_stat_progress_create_index b
        JOIN pg_locks l ON l.pid = b.pid AND l.database = b.datid
        WHERE b.datname = current_database() AND l.locktype = 'relation' AND l.relation = to_regclass('tasks')
    ) THEN
        RAISE EXCEPTION 'an index on tasks is being built: wait for its end' USING ERRCODE = 'lock_not_available';
    END IF;

    SET LOCAL lock_timeout = '3s';
    IF EXISTS (SELECT FROM pg_index WHERE indexrelid = to_regclass('tasks_group_idx') AND NOT indisvalid) THEN
        DROP INDEX tasks_group_idx;
    END IF;
END
$$;
-- +goose StatementEnd

SET lock_timeout = 0;

-- One index for all lists: they are merged from groups, the tasks of one state and name each, which
-- a list without a name finds by skipping from one to the next. As in version 5 it holds
-- no task that runs, and nothing but a list can use it. The order is that of bytes, which are
-- compared faster, and which depends on no C library, so that the index outlives a
-- move of the data to another image.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_group_idx ON tasks ((status || ' ' || left(name, 128)) COLLATE "C", created_at, task_id) WHERE lease_until IS NULL;

-- A program of version 6 that still runs loses a plan: its lists read the table once for each
-- state and sort what they find. With millions of rows that takes seconds, and is a 503 if
-- it takes longer than its statement_timeout.
DROP INDEX CONCURRENTLY IF EXISTS tasks_list_idx;
DROP INDEX CONCURRENTLY IF EXISTS tasks_name_idx;
-- Bulk retry looks for its tasks as a list does; that of version 6 walks the table for them.
DROP INDEX CONCURRENTLY IF EXISTS tasks_retryable_idx;

RESET lock_timeout;

-- +goose Down
SET lock_timeout = 0;
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_list_idx ON tasks (status, created_at, task_id) WHERE lease_until IS NULL;
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_name_idx ON tasks ((status || ' ' || left(name, 128)), created_at, task_id) WHERE lease_until IS NULL;
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_retryable_idx ON tasks (task_id) WHERE status IN ('failed', 'cancelled');
DROP INDEX CONCURRENTLY IF EXISTS tasks_group_idx;
RESET lock_timeout;
