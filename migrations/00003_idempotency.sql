-- +goose Up
ALTER TABLE tasks ADD COLUMN IF NOT EXISTS idempotency_key text COLLATE "C";

-- The order of bytes does not depend on the C library or ICU version, so the index
-- outlives a move of the data to another image.
ALTER TABLE tasks ALTER COLUMN idempotency_key TYPE text COLLATE "C";

-- A blank was taken for a key once: all who sent it shared one task.
UPDATE tasks SET idempotency_key = NULL WHERE idempotency_key = '';

-- Without the index two requests with one key could become two tasks. The oldest
-- keeps the key; the others say which key they had.
UPDATE tasks t
SET idempotency_key = NULL,
    error_message = concat_ws('; ', t.error_message, format('idempotency key %s was also given to task %s, which keeps it', t.idempotency_key, lower(d.holder::text)))
FROM (
    SELECT task_id,
        first_value(task_id) OVER same_key AS holder,
        row_number() OVER same_key AS n
    FROM tasks
    WHERE idempotency_key IS NOT NULL
    WINDOW same_key AS (PARTITION BY idempotency_key ORDER BY created_at, task_id)
) d
WHERE t.task_id = d.task_id AND d.n > 1;

DROP INDEX IF EXISTS idx_tasks_idempotency_key;
CREATE UNIQUE INDEX IF NOT EXISTS tasks_idempotency_key_idx ON tasks (idempotency_key) WHERE idempotency_key IS NOT NULL;

COMMENT ON COLUMN tasks.idempotency_key IS 'The submitter''s name for the request: at most one task per key';

-- +goose Down
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM tasks) THEN
        RAISE EXCEPTION 'the table tasks has rows, of which this would delete a part: empty it first';
    END IF;
END
$$;
-- +goose StatementEnd

ALTER TABLE tasks DROP COLUMN idempotency_key;
