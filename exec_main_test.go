package main

import (
	"os"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	execHelperMain()
	os.Exit(m.Run())
}

// eventually waits until ok reports true, for at most ten seconds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 10 s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
