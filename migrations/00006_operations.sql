-- +goose Up
CREATE TABLE queues (
    queue      text COLLATE "C" PRIMARY KEY,
    paused     bool        NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE queues IS 'What operators decided about queues; one that nobody ever paused has no row';
COMMENT ON COLUMN queues.queue IS 'As in tasks.queue';
COMMENT ON COLUMN queues.paused IS 'No task of the queue begins to run; what runs goes on, and new tasks are accepted';
COMMENT ON COLUMN queues.changed_at IS 'When it was paused or resumed last';

-- By queue first: a million due tasks of a paused queue must not lie in the way of the others.
DROP INDEX tasks_unpublished_idx;
CREATE INDEX tasks_unpublished_idx ON tasks (queue, run_at) WHERE status = 'pending' AND published_at IS NULL;

-- The few tasks that may be retried, among millions that completed; those never write it.
CREATE INDEX tasks_retryable_idx ON tasks (task_id) WHERE status IN ('failed', 'cancelled');

-- +goose Down
DROP INDEX tasks_retryable_idx, tasks_unpublished_idx;
CREATE INDEX tasks_unpublished_idx ON tasks (run_at) WHERE status = 'pending' AND published_at IS NULL;
DROP TABLE queues;
