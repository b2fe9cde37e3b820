-- +goose Up
ALTER TABLE tasks
    ADD COLUMN IF NOT EXISTS retry_count   int NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_retries   int NOT NULL DEFAULT 3,
    ADD COLUMN IF NOT EXISTS error_message text;

COMMENT ON COLUMN tasks.retry_count IS 'Retries begun after an error; at most max_retries';
COMMENT ON COLUMN tasks.max_retries IS 'Retries after an error before the task fails; runs are one more';
COMMENT ON COLUMN tasks.error_message IS 'The last error; NULL again once the task completed';

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

ALTER TABLE tasks
    DROP COLUMN retry_count,
    DROP COLUMN max_retries,
    DROP COLUMN error_message;
