package main

import (
	"context"
	"os"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	embeddedHelperMain()
	os.Exit(m.Run())
}

// eventually waits up to ten seconds for cond.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !cond(); {
		if time.Now().After(deadline) {
			t.Errorf("not within ten seconds: %s", what)
			return
		}
		sleep(context.Background(), 10*time.Millisecond)
	}
}
