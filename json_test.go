package main

import (
	"testing"
	"time"
)

// timeLayout is how answers show times.
const timeLayout = "2006-01-02T15:04:05.000000-07:00"

func TestAppendTime(t *testing.T) {
	t.Parallel()
	for _, at := range []time.Time{
		{},
		time.Unix(0, 0),
		time.Unix(1_700_000_000, 999_999_999),
		time.Date(2026, 11, 30, 23, 59, 59, 1000, time.FixedZone("", -9000)),
		time.Date(9999, 12, 31, 0, 0, 0, 120_000_000, time.UTC),
		time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(-4711, 11, 24, 0, 0, 0, 10_000, time.UTC), // PostgreSQL's first
	} {
		want := `[` + at.UTC().Format(`"`+timeLayout+`"`)
		if got := string(appendTime([]byte("["), &at)); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if got := string(appendTime(nil, nil)); got != "null" {
		t.Errorf("nil is %s", got)
	}
}
