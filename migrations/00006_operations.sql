-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS queues (
    queue      text COLLATE "C" PRIMARY KEY,
    paused     bool        NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE queues IS 'What operators decided about queues; one that nobody ever paused has no row';
COMMENT ON COLUMN queues.queue IS 'As in tasks.queue';
COMMENT ON COLUMN queues.paused IS 'No task of the queue begins to run; what runs goes on, and new tasks are accepted';
COMMENT ON COLUMN queues.changed_at IS 'When it was paused or resumed last';

-- The indexes are built beside running writers, and what is being built or was left is treated, as in version 5.
-- +goose StatementBegin
DO $$
DECLARE
    unfinished text;
BEGIN
    IF EXISTS (
        SELECT FROM pg_stat_progress_create_index b
        JOIN pg_locks l ON l.pid = b.pid AND l.database = b.datid
        WHERE b.datname = current_database() AND l.locktype = 'relation' AND l.relation = to_regclass('tasks')
    ) THEN
        RAISE EXCEPTION 'an index on tasks is being built: wait for its end' USING ERRCODE = 'lock_not_available';
    END IF;

    SET LOCAL lock_timeout = '3s';
    FOR unfinished IN
        SELECT indexrelid::regclass FROM pg_index
        WHERE indexrelid IN (to_regclass('tasks_due_idx'), to_regclass('tasks_retryable_idx')) AND NOT indisvalid
    LOOP
        EXECUTE 'DROP INDEX ' || unfinished;
    END LOOP;
END
$$;
-- +goose StatementEnd

SET lock_timeout = 0;

-- By queue first: a million due tasks of a paused queue must not lie in the way of the others.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_due_idx ON tasks (queue, run_at) WHERE status = 'pending' AND published_at IS NULL;

-- A program of version 5 that still runs only loses a plan: it reads tasks_due_idx whole, or
-- tasks_list_idx, and sorts what it finds. But it knows of no pause.
DROP INDEX CONCURRENTLY IF EXISTS tasks_unpublished_idx;

-- The few tasks that may be retried, among millions that completed; those never write it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_retryable_idx ON tasks (task_id) WHERE status IN ('failed', 'cancelled');

RESET lock_timeout;

-- +goose Down
SET lock_timeout = 0;
CREATE INDEX CONCURRENTLY IF NOT EXISTS tasks_unpublished_idx ON tasks (run_at) WHERE status = 'pending' AND published_at IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS tasks_retryable_idx;
DROP INDEX CONCURRENTLY IF EXISTS tasks_due_idx;
RESET lock_timeout;
DROP TABLE IF EXISTS queues;
