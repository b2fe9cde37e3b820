-- Built beside running writers: on a table of millions of rows that takes minutes. What is
-- waited for, transactions that began before, waits for nothing here, so that the wait may
-- last. An index that is there already, built by hand before the update, is taken as it is.

-- +goose NO TRANSACTION
-- +goose Up
-- +goose StatementBegin
DO $$
DECLARE
    unfinished text;
BEGIN
    -- An index that is still being built looks like one that a broken run left. Dropping it
    -- would make all that use the table queue for the end of the build, so that is waited for
    -- first, without a lock. pg_locks tells of the sessions of every role.
    IF EXISTS (
        SELECT FROM pg_stat_progress_create_index b
        JOIN pg_locks l ON l.pid = b.pid AND l.database = b.datid
        WHERE b.datname = current_database() AND l.locktype = 'relation' AND l.relation = to_regclass('tasks')
    ) THEN
        RAISE EXCEPTION 'an index on tasks is being built: wait for its end' USING ERRCODE = 'lock_not_available';
    END IF;

    -- A wait for the drop holds up everybody else, and goose by hand has no limit of its own.
    SET LOCAL lock_timeout = '3s';
    FOR unfinished IN
        SELECT indexrelid::regclass FROM pg_index
        WHERE indexrelid IN (to_regclass('tasks_list_idx'), to_regclass('tasks_name_idx')) AND NOT indisvalid
    LOOP
        EXECUTE 'DROP INDEX ' || unfinished;
    END LOOP;
END
$$;
-- +goose StatementEnd

SET lock_timeout = 0;

-- Tasks that run are few and found by tasks_lease_idx. Without them each task costs an index
-- two entries, not three: at its submit and at its end. The predicate says so by the
-- lease, because one by status would offer itself to the planner of the claim, which
-- would then look for its tasks among all that are pending.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_list_idx ON tasks (status, created_at, task_id) WHERE lease_until IS NULL;

-- One text of state and name, for the same reason: nothing but a list by name can use it, and
-- no list by name can use the other index and pass over millions of other names.
-- Nothing limits the length of a name that SQL inserted, but an index does.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_name_idx ON tasks ((status || ' ' || left(name, 128)), created_at, task_id) WHERE lease_until IS NULL;

RESET lock_timeout;

-- +goose Down
SET lock_timeout = 0;
DROP INDEX CONCURRENTLY IF EXISTS tasks_list_idx;
DROP INDEX CONCURRENTLY IF EXISTS tasks_name_idx;
RESET lock_timeout;
