//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// needPostgres returns the folder of the installed PostgreSQL.
func needPostgres(t *testing.T) string {
	t.Helper()
	dir, err := findPostgres("")
	if err != nil {
		t.Skipf("SKIPPED, NEEDS POSTGRESQL: %v", err)
	}
	return dir
}

func TestFindPostgres(t *testing.T) {
	installed := needPostgres(t)
	if got, err := findPostgres(installed); err != nil || got != installed {
		t.Errorf("findPostgres(%s) = %s, %v, want the same folder", installed, got, err)
	}
	// An explicit folder that is not one must not fall back on the installed binaries.
	empty := t.TempDir()
	if got, err := findPostgres(empty); err == nil || !strings.Contains(err.Error(), empty) {
		t.Errorf("findPostgres(%s) = %s, %v, want an error that names the folder", empty, got, err)
	}
}

func TestAsServerUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root changes users")
	}
	dir, err := os.MkdirTemp("", "nexusflow-user-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cmd := exec.Command("sh", "-c", "id -un && touch made")
	cmd.Dir = dir
	if err := asServerUser(cmd, dir); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("run as server user: %v: %s", err, out)
	}
	if name := strings.TrimSpace(string(out)); name != "postgres" && name != "nobody" {
		t.Errorf("server user = %s, want postgres or nobody", name)
	}
	if _, err := os.Stat(filepath.Join(dir, "made")); err != nil {
		t.Errorf("the folder is not the server user's: %v", err)
	}
}
