package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// rootDataDir is where root keeps the data when it starts the program below a
// folder that is closed to the user the servers run as, such as /root.
const rootDataDir = "/var/lib/nexusflow"

// dataFolder makes the folder of the embedded servers' data and returns its
// absolute path without links, by which every later start knows it again.
func dataFolder(cfg config) (string, error) {
	dir, err := makeDataFolder(cfg)
	if err != nil {
		return "", fmt.Errorf("make the folder of the embedded servers' data (set DATA_DIR to one that can be written, or DATABASE_URL and REDIS_URL to servers of your own): %w", err)
	}
	return dir, nil
}

func makeDataFolder(cfg config) (string, error) {
	dir, err := filepath.Abs(chooseDataDir(cfg))
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	// The servers' own folders inside are closed to others; this one stays open
	// whatever the umask, because the server user of root has to pass it.
	switch err := os.Mkdir(dir, 0o755); {
	case err == nil:
		err = os.Chmod(dir, 0o755)
		if err != nil {
			return "", err
		}
	case !errors.Is(err, os.ErrExist):
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// chooseDataDir returns DATA_DIR, or rootDataDir when it is not set and the
// default would be out of the server user's reach.
func chooseDataDir(cfg config) string {
	if wd, err := os.Getwd(); !cfg.DataDirSet && err == nil && openToServerUser(wd) != nil {
		return rootDataDir
	}
	return cfg.DataDir
}

// serverEnv is what a server sees of the environment: where programs and their
// libraries are, and nothing secret. Locale C keeps their messages in the
// wording this program looks for.
func serverEnv() []string {
	keep := []string{"PATH", "HOME", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
	env := []string{"LC_ALL=C"}
	for _, kv := range os.Environ() {
		if key, _, _ := strings.Cut(kv, "="); slices.Contains(keep, key) {
			env = append(env, kv)
		}
	}
	return env
}

// explainRoot adds to a refusal what root lacks, as in a container that drops all capabilities.
func explainRoot(err error) error {
	if os.Geteuid() != 0 || !errors.Is(err, os.ErrPermission) {
		return err
	}
	return fmt.Errorf("%w (root needs the capabilities CHOWN, DAC_OVERRIDE, KILL, SETGID and SETUID to run PostgreSQL as another user, or run nexusflow as an ordinary user)", err)
}

// serverLog is the file a server writes its own log to.
type serverLog struct {
	file  *os.File
	start int64 // where the output of the present run begins
}

// maxServerLog is the size in bytes at which a log is put aside at the next start.
const maxServerLog = 16 << 20

// openServerLog opens the log at path for appending. A long one first becomes
// path.old, so that at most two are kept.
func openServerLog(path string) (*serverLog, error) {
	if info, err := os.Stat(path); err == nil && info.Size() > maxServerLog {
		if err := os.Rename(path, path+".old"); err != nil {
			return nil, fmt.Errorf("put log aside: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	l := &serverLog{file: f}
	l.mark()
	return l, nil
}

// mark makes last look only at what is written from now on.
func (l *serverLog) mark() {
	if info, err := l.file.Stat(); err == nil {
		l.start = info.Size()
	}
}

// last returns the last lines of the present run, on one line for an error text.
func (l *serverLog) last() string {
	const lines, most = 6, 4096
	end := l.start
	if info, err := l.file.Stat(); err == nil {
		end = info.Size()
	}
	from := max(l.start, end-most)
	text, _ := io.ReadAll(io.NewSectionReader(l.file, from, end-from)) // what cannot be read is not shown
	all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return string(bytes.Join(all[max(0, len(all)-lines):], []byte(" | ")))
}

func (l *serverLog) close() { l.file.Close() }
