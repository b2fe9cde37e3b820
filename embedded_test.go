//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// needPostgres returns the folder of the installed PostgreSQL.
func needPostgres(t *testing.T) string {
	t.Helper()
	dir, err := findPostgres("")
	if err != nil {
		missing(t, err)
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
	dir := serverTemp(t)
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

func TestParseVersion(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ text, major, version string }{
		{"postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n", "15", "15.18"},
		{"postgres (PostgreSQL) 9.6.24\n", "9", "9.6.24"},
		{"postgres (PostgreSQL) 19beta1\n", "19", "19beta1"},
		{"command not found\n", "", ""},
	} {
		if major, version := parseVersion(test.text); major != test.major || version != test.version {
			t.Errorf("parseVersion(%q) = %q, %q, want %q, %q", test.text, major, version, test.major, test.version)
		}
	}
}

func TestVersionIn(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]float64{
		"/usr/lib/postgresql/9.6/bin": 9.6, "/usr/lib/postgresql/15/bin": 15, "/opt/homebrew/opt/postgresql@17/bin": 17, "/usr/local/pgsql/bin": 0,
	} {
		if got := versionIn(path); got != want {
			t.Errorf("versionIn(%s) = %v, want %v", path, got, want)
		}
	}
}

// Root in its home, which is closed to the server user, gets another default.
func TestDataFolderOfRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root changes users")
	}
	closed := t.TempDir()
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	open := serverTemp(t)
	for _, test := range []struct {
		dir, want string
		set       bool
	}{
		{closed, rootDataDir, false},
		{open, ".nexusflow", false},
		{closed, ".nexusflow", true},
	} {
		t.Chdir(test.dir)
		if got := chooseDataDir(config{DataDir: ".nexusflow", DataDirSet: test.set}); got != test.want {
			t.Errorf("in %s with DATA_DIR set = %v: data in %s, want %s", test.dir, test.set, got, test.want)
		}
	}
	// A folder that was asked for is used or refused, not replaced.
	needPostgres(t)
	_, err := startPostgres(t.Context(), discardLog(), config{DataDir: filepath.Join(closed, "data"), DataDirSet: true})
	if err == nil || !strings.Contains(err.Error(), "is closed to user") || !strings.Contains(err.Error(), "DATA_DIR") {
		t.Errorf("startPostgres below a closed folder = %v, want it explained", err)
	}
}

// The umask of the operator must not close the data folder to the server user.
func TestDataFolderMode(t *testing.T) {
	temp := serverTemp(t)
	defer syscall.Umask(syscall.Umask(0o077))
	dir, err := dataFolder(config{DataDir: filepath.Join(temp, "data"), DataDirSet: true})
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode of the data folder = %v, %v, want 0755", info.Mode(), err)
	}
}

// A folder that cannot be made, as in an image that only root may write to, is no riddle: the error
// says what to set.
func TestDataFolderRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := dataFolder(config{DataDir: filepath.Join(file, "data"), DataDirSet: true})
	if err == nil {
		t.Fatal("a folder inside a file was made")
	}
	for _, want := range []string{"DATA_DIR", "DATABASE_URL", "REDIS_URL", file} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %s", err, want)
		}
	}
}

// The temporary folder is shared: what others put under our name is refused.
func TestMakePrivate(t *testing.T) {
	t.Parallel()
	temp := serverTemp(t)
	path := func(name string) string { return filepath.Join(temp, name) }
	if err := os.Mkdir(path("loose"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path("file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", path("link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path("foreign"), 0o700); err != nil {
		t.Fatal(err)
	}
	tests := map[string]bool{"new": true, "loose": true, "file": false, "link": false}
	if os.Geteuid() == 0 {
		if err := os.Chown(path("foreign"), 12345, 12345); err != nil {
			t.Fatal(err)
		}
		tests["foreign"] = false
	}
	for name, ok := range tests {
		if err := makePrivate(path(name), nil); (err == nil) != ok {
			t.Errorf("makePrivate(%s) = %v, want ok = %v", name, err, ok)
		}
		if info, err := os.Stat(path(name)); ok && (err != nil || info.Mode().Perm() != 0o700) {
			t.Errorf("mode of %s = %v, %v, want 0700", name, info.Mode(), err)
		}
	}
}

func TestServerLogLast(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("an earlier run\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := openServerLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.close()
	if got := log.last(); got != "" {
		t.Errorf("last before any output = %q, want none of the earlier run", got)
	}
	for n := range 9 {
		fmt.Fprintln(log.file, "line", n)
	}
	if got, want := log.last(), "line 3 | line 4 | line 5 | line 6 | line 7 | line 8"; got != want {
		t.Errorf("last = %q, want %q", got, want)
	}
	if err := os.Truncate(path, maxServerLog+1); err != nil {
		t.Fatal(err)
	}
	second, err := openServerLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.close()
	if info, err := os.Stat(path); err != nil || info.Size() != 0 || !fileExists(path+".old") {
		t.Errorf("a long log was not put aside: %v, %v", info, err)
	}
}
