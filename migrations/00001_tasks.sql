-- +goose Up
CREATE TABLE IF NOT EXISTS tasks (
    task_id    uuid        NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
    name       text        NOT NULL,
    status     text        NOT NULL DEFAULT 'pending',
    payload    jsonb       NOT NULL DEFAULT '{}',
    result     jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- +goose Down
DROP TABLE tasks;
