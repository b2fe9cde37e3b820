package main

import (
	"bytes"
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/common/expfmt"
)

// scrapeLimit is how long a scrape waits for figures that others have to deliver. What is
// not there by then is left out.
const scrapeLimit = 950 * time.Millisecond

const metricsType = "text/plain; version=0.0.4; charset=utf-8"

// metrics counts what happens in this process. Its counters are made once, so that an event
// costs an atomic addition and no allocation. Labels have few values, all of them ours:
// never a task's name, id or key, of which callers make as many as they like.
type metrics struct {
	registry *prometheus.Registry

	created, replayed, conflict, invalid        prometheus.Counter // submissions
	completed, retried, failed, lost, cancelled prometheus.Counter // attempts
	reclaimed, republished, refused, unknown    prometheus.Counter
	wait, duration                              prometheus.Histogram
	submitRows, claimRows, outcomeRows          prometheus.Observer
	workers, busy                               prometheus.Gauge

	requests  *prometheus.CounterVec
	latencies *prometheus.HistogramVec
	mu        sync.RWMutex
	answered  map[requestKind]requestSeries
}

// A requestKind is what requests are told apart by.
type requestKind struct {
	method, route string
	code          int
}

type requestSeries struct {
	count prometheus.Counter
	took  prometheus.Observer
}

// newMetrics returns metrics in a registry of their own: a process may run several services.
func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), answered: make(map[requestKind]requestSeries)}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	f := promauto.With(m.registry)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: "nexusflow_" + name, Help: help})
	}
	counters := func(name, help, label string, values map[string]*prometheus.Counter) {
		v := f.NewCounterVec(prometheus.CounterOpts{Name: "nexusflow_" + name, Help: help}, []string{label})
		for value, c := range values {
			*c = v.WithLabelValues(value)
		}
	}

	m.requests = f.NewCounterVec(prometheus.CounterOpts{
		Name: "nexusflow_http_requests_total",
		Help: "Requests that were answered.",
	}, []string{"method", "route", "code"})
	m.latencies = f.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "nexusflow_http_request_duration_seconds",
		Help:    "Time from a request's header to the end of its answer.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30},
	}, []string{"method", "route"})
	counters("tasks_submitted_total", "Submissions: new tasks, known keys, keys of other requests, and what broke a rule.", "outcome", map[string]*prometheus.Counter{
		"created": &m.created, "replayed": &m.replayed, "conflict": &m.conflict, "invalid": &m.invalid,
	})
	counters("task_attempts_total", "Attempts by what became of them; lost is counted by the process that noticed.", "outcome", map[string]*prometheus.Counter{
		"completed": &m.completed, "retried": &m.retried, "failed": &m.failed, "lost": &m.lost, "cancelled": &m.cancelled,
	})
	m.duration = f.NewHistogram(prometheus.HistogramOpts{
		Name:    "nexusflow_task_duration_seconds",
		Help:    "Run time of attempts whose outcome was stored.",
		Buckets: []float64{.001, .005, .01, .05, .1, .5, 1, 5, 15, 60, 300, 900, 3600, 21600},
	})
	m.wait = f.NewHistogram(prometheus.HistogramOpts{
		Name:    "nexusflow_task_queue_wait_seconds",
		Help:    "Time from when an attempt was due to its claim, by the clock of PostgreSQL.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 15, 60, 300, 1800, 7200},
	})
	rows := f.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "nexusflow_batch_rows",
		Help:    "Tasks that one statement submitted, tried to claim or settled.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 10),
	}, []string{"statement"})
	m.submitRows, m.claimRows, m.outcomeRows = rows.WithLabelValues("submit"), rows.WithLabelValues("claim"), rows.WithLabelValues("outcome")
	m.refused = counter("outcomes_refused_total", "Outcomes that were not stored because the task was no longer this worker's.")
	m.reclaimed = counter("reclaimed_total", "Stream entries taken over from readers that neither dropped nor kept them.")
	m.republished = counter("republished_total", "Tasks whose stream entry was lost and added again.")
	m.unknown = counter("unknown_entries_total", "Stream entries dropped by workers because their task is not in the table.")
	m.workers = f.NewGauge(prometheus.GaugeOpts{Name: "nexusflow_workers", Help: "Tasks that this process can run at once."})
	m.busy = f.NewGauge(prometheus.GaugeOpts{Name: "nexusflow_workers_busy", Help: "Handlers that run in this process."})
	f.NewGauge(prometheus.GaugeOpts{
		Name:        "nexusflow_build_info",
		Help:        "1, with the version of the program.",
		ConstLabels: prometheus.Labels{"version": version()},
	}).Set(1)
	return m
}

// request counts one answered request. route is the path of a pattern and code a status of
// ours, so that the series are few.
func (m *metrics) request(method, route string, code int, took time.Duration) {
	kind := requestKind{method, route, code}
	m.mu.RLock()
	series, ok := m.answered[kind]
	m.mu.RUnlock()
	if !ok {
		series = requestSeries{
			count: m.requests.WithLabelValues(method, route, strconv.Itoa(code)),
			took:  m.latencies.WithLabelValues(method, route),
		}
		m.mu.Lock()
		m.answered[kind] = series
		m.mu.Unlock()
	}
	series.count.Inc()
	series.took.Observe(took.Seconds())
}

// submitted counts a submission that was stored, found its key or met another request's.
func (m *metrics) submitted(o *receipt) {
	switch {
	case o.err != nil:
		m.conflict.Inc()
	case o.replayed:
		m.replayed.Inc()
	default:
		m.created.Inc()
	}
}

// attempt counts an attempt whose outcome was stored and left its task in status. One that
// a shutdown cut short is none of the outcomes, and shows in duration only.
func (m *metrics) attempt(kind outcomeKind, status string, took time.Duration) {
	m.duration.Observe(took.Seconds())
	switch {
	case status == statusCompleted:
		m.completed.Inc()
	case status == statusFailed:
		m.failed.Inc()
	case status == statusCancelled:
		m.cancelled.Inc()
	case kind == outcomeFail:
		m.retried.Inc()
	}
}

// showMetrics answers GET /metrics in the text format that every scraper reads. It takes
// little more than scrapeLimit, whatever is away.
func (s *server) showMetrics(w http.ResponseWriter, r *http.Request) {
	families, err := s.metrics.registry.Gather()
	if err != nil { // some of them; the others are right
		s.log.Error("gather metrics", "err", err)
	}
	var buf bytes.Buffer
	for _, family := range families {
		// A buffer takes everything, and what Gather returns is consistent.
		_, _ = expfmt.MetricFamilyToText(&buf, family)
	}
	writeBody(w, http.StatusOK, metricsType, buf.Bytes())
}

var (
	tasksDesc      = prometheus.NewDesc("nexusflow_tasks", "Tasks in the table.", []string{"status"}, nil)
	oldestDesc     = prometheus.NewDesc("nexusflow_oldest_pending_seconds", "For how long the longest waiting due task has been due.", nil, nil)
	overdueDesc    = prometheus.NewDesc("nexusflow_unpublished_tasks", "Due tasks without a stream entry; 0 when at rest.", nil, nil)
	expiredDesc    = prometheus.NewDesc("nexusflow_expired_leases", "Tasks that are processing under a lease that has passed; 0 when at rest.", nil, nil)
	lengthDesc     = prometheus.NewDesc("nexusflow_stream_length", "Entries in the streams.", nil, nil)
	pendingDesc    = prometheus.NewDesc("nexusflow_stream_pending", "Stream entries that a worker took and has not dropped.", nil, nil)
	lagDesc        = prometheus.NewDesc("nexusflow_stream_lag", "Stream entries that no worker has taken.", nil, nil)
	dependencyDesc = prometheus.NewDesc("nexusflow_dependency_up", "1 while the server is there for this process, as in /readyz.", []string{"dependency"}, nil)
)

// censusMetrics shows the figures of a census to a registry. They are what is true of the
// installation, and so the same in each of its processes. What could not be counted is absent,
// also if it was counted before: a sample tells nobody how old its figure is.
type censusMetrics struct{ *census }

func (c censusMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{tasksDesc, oldestDesc, overdueDesc, expiredDesc, lengthDesc, pendingDesc, lagDesc, dependencyDesc} {
		ch <- d
	}
}

func (c censusMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(c.base, scrapeLimit)
	defer cancel()
	gauge := func(d *prometheus.Desc, value float64, label ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, label...)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _, err := c.record.get(ctx)
		gauge(dependencyDesc, oneIf(err == nil), "postgres")
	})
	wg.Go(func() {
		gauge(dependencyDesc, oneIf(c.hints.up()), "redis")
		if d, _, err := c.depth.get(ctx); err == nil {
			gauge(lengthDesc, float64(d.length))
			gauge(pendingDesc, float64(d.pending))
			gauge(lagDesc, float64(d.lag()))
		}
	})
	wg.Go(func() {
		t := c.tasks(ctx)
		if t.oldestErr == nil {
			gauge(oldestDesc, t.oldest.Seconds())
		}
		if t.openErr == nil {
			gauge(tasksDesc, float64(t.open.Pending), statusPending)
			gauge(tasksDesc, float64(t.open.Processing), statusProcessing)
			gauge(overdueDesc, float64(t.open.Overdue))
			gauge(expiredDesc, float64(t.open.Expired))
		}
		if t.endedErr == nil {
			gauge(tasksDesc, float64(t.ended.Completed), statusCompleted)
			gauge(tasksDesc, float64(t.ended.Failed), statusFailed)
			gauge(tasksDesc, float64(t.ended.Cancelled), statusCancelled)
		}
	})
	wg.Wait()
}

func oneIf(ok bool) float64 {
	if ok {
		return 1
	}
	return 0
}
