package main

import (
	"context"
	"net/http"
	"slices"
	"strconv"

	"nexusflow/db"
)

// listQueues answers GET /queues: each queue that this process knows, that is paused or that has
// tasks which have not ended, with what waits in it. In place of a count that fails or takes too
// long stands the one before.
func (s *server) listQueues(w http.ResponseWriter, r *http.Request) {
	if err := noQuery(r.URL); err != nil {
		s.fail(w, r, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), statsLimit)
	defer cancel()
	ask, done := context.WithTimeout(context.WithoutCancel(ctx), readLimit)
	defer done()
	paused, err := db.New(s.pools.api).PausedQueues(ask)
	if !timedOut(err) {
		s.noteRead(err)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	rows, counted, err := s.census.queues.get(ctx)
	if counted.IsZero() {
		s.fail(w, r, err)
		return
	}
	workers := s.countReaders(r.Context(), rows)
	b := []byte(`{"queues":[`)
	for i, q := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(append(b, `{"queue":`...), q.Queue)
		b = strconv.AppendBool(append(b, `,"paused":`...), slices.Contains(paused, q.Queue))
		b = strconv.AppendInt(append(b, `,"pending_due":`...), q.Published+q.Unpublished, 10)
		b = strconv.AppendInt(append(b, `,"pending_later":`...), q.Later, 10)
		b = strconv.AppendInt(append(b, `,"processing":`...), q.Processing, 10)
		b = append(b, `,"oldest_due_seconds":`...)
		if q.OldestMS < 0 {
			b = append(b, "null"...)
		} else {
			b = strconv.AppendFloat(b, float64(q.OldestMS)/1000, 'f', -1, 64)
		}
		b = append(b, `,"workers":`...)
		if workers == nil {
			b = append(b, "null"...)
		} else {
			b = strconv.AppendInt(b, int64(workers[q.Queue]), 10)
		}
		b = append(b, '}')
	}
	b = appendTime(append(b, `],"timestamp":`...), &counted)
	writeBody(w, http.StatusOK, "application/json", append(b, '}'))
}

// countReaders returns how many workers there are for each queue; nil when Redis does not say.
func (s *server) countReaders(ctx context.Context, rows []db.QueueDepthsRow) map[string]int {
	if s.hints.readers == nil || !s.hints.up() {
		return nil
	}
	queues := make([]string, len(rows))
	for i, q := range rows {
		queues[i] = q.Queue
	}
	counts, err := s.hints.readers(context.WithoutCancel(ctx), queues)
	if err != nil {
		s.log.Debug("count readers", "err", err)
		return nil
	}
	return counts
}

// knownQueues lists the queues that a submission can end up in.
func (s *server) knownQueues() []string {
	if slices.Contains(s.limits.queues, defaultQueue) {
		return s.limits.queues
	}
	return append(slices.Clone(s.limits.queues), defaultQueue) // where handlers without a queue put tasks
}

// pauseQueue answers POST /queues/{queue}/pause, also when the queue is paused already. No claim
// that begins after the answer takes a task of it, wherever; what runs goes on.
func (s *server) pauseQueue(w http.ResponseWriter, r *http.Request) {
	s.setPaused(w, r, true, func(ctx context.Context, q *db.Queries, queue string) (int64, error) {
		if !slices.Contains(s.knownQueues(), queue) {
			return 0, queueNotFound(queue)
		}
		return q.PauseQueue(ctx, queue)
	})
}

// resumeQueue answers POST /queues/{queue}/resume, also when the queue is not paused. One that was
// paused when the settings still named it can be resumed all the same.
func (s *server) resumeQueue(w http.ResponseWriter, r *http.Request) {
	s.setPaused(w, r, false, func(ctx context.Context, q *db.Queries, queue string) (int64, error) {
		if !isQueueName(queue) {
			return 0, queueNotFound(queue)
		}
		n, err := q.ResumeQueue(ctx, queue)
		if err == nil && n == 0 && !slices.Contains(s.knownQueues(), queue) {
			return 0, queueNotFound(queue)
		}
		return n, err
	})
}

// setPaused runs a statement that pauses or resumes the queue that the path names and
// answers with what holds now. The statement may run twice.
func (s *server) setPaused(w http.ResponseWriter, r *http.Request, paused bool, set func(context.Context, *db.Queries, string) (int64, error)) {
	if err := noQuery(r.URL); err != nil {
		s.fail(w, r, err)
		return
	}
	queue := r.PathValue("queue")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), readLimit)
	defer cancel()
	q := db.New(s.pools.api)
	n, err := set(ctx, q, queue)
	if broken(err) && ctx.Err() == nil {
		s.pools.api.Reset()
		n, err = set(ctx, q, queue)
	}
	if err != nil {
		if !timedOut(err) {
			s.intake.note(err)
		}
		s.fail(w, r, err)
		return
	}
	if n > 0 {
		s.log.Info("queue changed", "queue", queue, "paused", paused)
	}
	b := appendString([]byte(`{"queue":`), queue)
	b = strconv.AppendBool(append(b, `,"paused":`...), paused)
	writeBody(w, http.StatusOK, "application/json", append(b, '}'))
}

func queueNotFound(queue string) *httpError {
	return &httpError{status: http.StatusNotFound, detail: "Queue '" + shown(queue) + "' not found."}
}
