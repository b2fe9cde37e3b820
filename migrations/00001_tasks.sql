-- Migrations 1 to 4 make the schema on an empty database and adopt a tasks table made
-- by hand from an earlier init.sql, of any generation, without losing a row.

-- +goose Up
-- +goose StatementBegin
DO $$
DECLARE
    missing text;
BEGIN
    SELECT string_agg(c.name, ', ') INTO missing
    FROM unnest(ARRAY['task_id', 'name', 'status', 'payload', 'result', 'created_at', 'updated_at']) AS c (name)
    WHERE to_regclass('tasks') IS NOT NULL
        AND NOT EXISTS (
            SELECT FROM pg_attribute
            WHERE attrelid = to_regclass('tasks') AND attname = c.name AND NOT attisdropped
        );
    IF missing IS NOT NULL THEN
        RAISE EXCEPTION 'the table tasks in this database is not a NexusFlow table: it has no column %', missing;
    END IF;
END
$$;
-- +goose StatementEnd

CREATE TABLE IF NOT EXISTS tasks (
    task_id    uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    name       text        NOT NULL,
    status     text        NOT NULL DEFAULT 'pending',
    payload    jsonb       NOT NULL DEFAULT '{}',
    result     jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE tasks IS 'A task and all that is known of it: the record that everything else hints at. A plain INSERT of name and payload submits one.';
COMMENT ON COLUMN tasks.task_id IS 'UUID; time-ordered (version 7) when the service made it';
COMMENT ON COLUMN tasks.name IS 'What is to be done: names a handler';
COMMENT ON COLUMN tasks.status IS 'pending, processing, completed, failed or cancelled; waiting for a retry is pending with run_at in the future';
COMMENT ON COLUMN tasks.payload IS 'The submitter''s JSON, handed to the handler';
COMMENT ON COLUMN tasks.result IS 'The handler''s JSON, of the attempt that completed the task';
COMMENT ON COLUMN tasks.created_at IS 'When the task was submitted';
COMMENT ON COLUMN tasks.updated_at IS 'When its state last changed; heartbeats and the stream do not count';

-- +goose Down
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM tasks) THEN
        RAISE EXCEPTION 'the table tasks has rows, which this would delete: empty it first';
    END IF;
END
$$;
-- +goose StatementEnd

DROP TABLE tasks;
