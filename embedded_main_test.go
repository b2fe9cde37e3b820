package main

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	embeddedHelperMain()
	os.Exit(m.Run())
}

// eventually waits up to fifteen seconds for ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within 15 s: %s", what)
		}
		sleep(context.Background(), 10*time.Millisecond)
	}
}

func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

func missing(t testing.TB, err error) {
	t.Helper()
	if os.Getenv("REQUIRE_SERVERS") == "1" {
		t.Fatalf("REQUIRE_SERVERS=1: %v", err)
	}
	t.Skipf("SKIPPED, NOT TESTED: %v", err)
}
