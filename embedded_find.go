package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// errNoPostgres says that no installed PostgreSQL was found, so that fetching
// one is the next thing to try.
var errNoPostgres = errors.New("no installed PostgreSQL found")

// postgresFolders are the places where packages put initdb and postgres without
// adding them to PATH. Of several versions in one place the newest comes first.
var postgresFolders = []string{
	"/usr/lib/postgresql/*/bin",         // Debian, Ubuntu
	"/usr/pgsql-*/bin",                  // the PostgreSQL project's own RPMs
	"/usr/libexec/postgresql*",          // Alpine
	"/usr/lib64/postgresql-*/bin",       // Gentoo
	"/opt/homebrew/opt/postgresql*/bin", // Homebrew on Apple silicon
	"/usr/local/opt/postgresql*/bin",    // Homebrew on Intel
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/opt/local/lib/postgresql*/bin", // MacPorts
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/run/current-system/sw/bin", // NixOS
	"/nix/var/nix/profiles/default/bin",
	"/usr/local/pgsql/bin", // built from source
}

// findPostgres returns the folder of the initdb and postgres to run. An explicit
// folder is the only one looked at: falling back from a misspelt one would start
// another version than the operator asked for. Without it come PATH, what
// pg_config says, and the usual folders. The error is errNoPostgres when there is none.
func findPostgres(explicit string) (string, error) {
	if explicit != "" {
		dir, err := filepath.Abs(explicit)
		if err == nil {
			err = usablePostgres(dir)
		}
		if err != nil {
			return "", fmt.Errorf("EMBEDDED_POSTGRES_BIN: %w", err)
		}
		return dir, nil
	}
	dirs := installedPostgres()
	if len(dirs) == 0 {
		return "", errNoPostgres
	}
	return dirs[0], nil
}

// installedPostgres lists every usable PostgreSQL of this machine, the preferred one first.
func installedPostgres() []string {
	var dirs []string
	if initdb, err := exec.LookPath("initdb"); err == nil {
		if initdb, err = filepath.EvalSymlinks(initdb); err == nil {
			dirs = append(dirs, filepath.Dir(initdb))
		}
	}
	// A pg_config that hangs must not hold up the start.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range postgresFolders {
		found, _ := filepath.Glob(pattern) // the patterns are constants and well formed
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(versionIn(b), versionIn(a)) })
		dirs = append(dirs, found...)
	}
	usable := dirs[:0]
	for _, dir := range dirs {
		if abs, err := filepath.Abs(dir); err == nil && usablePostgres(abs) == nil && !slices.Contains(usable, abs) {
			usable = append(usable, abs)
		}
	}
	return usable
}

// usablePostgres reports why dir cannot be run from: a program is missing, or the
// user whom the servers run as cannot get there.
func usablePostgres(dir string) error {
	for _, name := range []string{"initdb", "postgres", "pg_ctl"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return openToServerUser(dir)
}

// versionIn returns the last number in path: 17 of /usr/lib/postgresql/17/bin,
// 16.2 of /usr/pgsql-16.2/bin. A path without a number sorts last.
func versionIn(path string) float64 {
	fields := strings.FieldsFunc(path, func(r rune) bool { return r != '.' && (r < '0' || r > '9') })
	for _, f := range slices.Backward(fields) {
		if v, err := strconv.ParseFloat(f, 64); err == nil {
			return v
		}
	}
	return 0
}

// majorVersion returns the major version of the postgres in dir and its full text,
// such as 15 and 15.18. It runs the program as the server user.
func majorVersion(ctx context.Context, dir string) (major, version string, err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version")
	cmd.Dir, cmd.Env = dir, serverEnv()
	if err := asServerUser(cmd); err != nil {
		return "", "", err
	}
	out, err := cmd.Output()
	if err != nil {
		return "", "", fmt.Errorf("ask postgres in %s for its version: %w", dir, explainRoot(err))
	}
	major, version = parseVersion(string(out))
	if major == "" {
		return "", "", fmt.Errorf("ask postgres in %s for its version: unexpected answer %q", dir, out)
	}
	return major, version, nil
}

// parseVersion reads what postgres --version prints, such as
// "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)" or "postgres (PostgreSQL) 19beta1".
func parseVersion(text string) (major, version string) {
	_, text, _ = strings.Cut(strings.TrimSpace(text), ") ")
	version, _, _ = strings.Cut(text, " ")
	return version[:len(version)-len(strings.TrimLeft(version, "0123456789"))], version
}
