package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// cpu is processor time in seconds, by who used it.
type cpu struct {
	app, postgres, redis, load float64
	other                      float64 // by processes outside the run, in cores
}

// A meter measures the processor time between its making and stop.
type meter struct {
	b       *bench
	apps    []*process
	start   cpu
	busy    float64
	started time.Time
}

// newMeter begins to measure; apps are the processes of the service.
func (b *bench) newMeter(apps ...*process) *meter {
	m := &meter{b: b, apps: apps}
	m.start, m.busy, m.started = m.read(), busy(), time.Now()
	return m
}

// stop returns what was used since. The processes must still run.
func (m *meter) stop() cpu {
	now, all, took := m.read(), busy()-m.busy, time.Since(m.started).Seconds()
	c := cpu{
		app:      now.app - m.start.app,
		postgres: now.postgres - m.start.postgres,
		redis:    now.redis - m.start.redis,
		load:     now.load - m.start.load,
	}
	c.other = max(0, all-c.app-c.postgres-c.redis-c.load) / took
	return c
}

func (m *meter) read() cpu {
	procs := processes()
	c := cpu{
		postgres: treeTime(procs, m.b.postgres.pid()),
		redis:    treeTime(procs, m.b.redis.pid()),
		load:     procs[os.Getpid()].used,
	}
	for _, p := range m.apps {
		c.app += treeTime(procs, p.pid())
	}
	return c
}

// clockTicks is USER_HZ, which Linux shows to programs as 100 on every architecture of today.
const clockTicks = 100

type procTime struct {
	parent int
	used   float64 // seconds, without children
	reaped float64 // seconds of children that ended
}

// processes reads the processor times of all processes of the machine.
func processes() map[int]procTime {
	list := map[int]procTime{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is well formed
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // it ended
		}
		if pid, t, ok := parseStat(string(data)); ok {
			list[pid] = t
		}
	}
	return list
}

// parseStat reads a line of proc_pid_stat(5).
func parseStat(line string) (pid int, t procTime, ok bool) {
	head, _, _ := strings.Cut(line, " ")
	pid, err := strconv.Atoi(head)
	fields := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if err != nil || len(fields) < 15 {
		return 0, t, false
	}
	ticks := func(i int) float64 {
		n, _ := strconv.ParseFloat(fields[i], 64)
		return n / clockTicks
	}
	t.parent, _ = strconv.Atoi(fields[1])
	t.used = ticks(11) + ticks(12)
	t.reaped = ticks(13) + ticks(14)
	return pid, t, true
}

// treeTime adds up the times of a process and of all below it.
func treeTime(procs map[int]procTime, root int) float64 {
	var sum float64
	for pid, p := range procs {
		for at := pid; at > 1; at = procs[at].parent {
			if at == root {
				sum += p.used + p.reaped
				break
			}
		}
	}
	return sum
}

// busy returns the processor time that the whole machine has used, in seconds.
func busy() float64 {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(data, []byte("\n"))
	var sum float64
	for i, f := range strings.Fields(string(line))[1:] {
		if i == 3 || i == 4 || i >= 8 { // idle, waiting for disks, guests (counted as user already)
			continue
		}
		n, _ := strconv.ParseFloat(f, 64)
		sum += n
	}
	return sum / clockTicks
}

// rss returns the resident memory of a process in MB.
func rss(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, fmt.Errorf("read memory of process: %w", err)
	}
	_, rest, _ := strings.Cut(string(data), "VmRSS:")
	kb, err := strconv.ParseFloat(strings.TrimSpace(rest[:max(0, strings.Index(rest, "kB"))]), 64)
	if err != nil {
		return 0, fmt.Errorf("read memory of process: %w", err)
	}
	return kb / 1024, nil
}
