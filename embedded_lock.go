//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// lockData takes the lock of the data folder dir, the file dir.lock beside it,
// so that two programs never start a server on the same data. The kernel gives
// the lock back when the file is closed or the program dies; the file stays.
func lockData(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		pid, _ := os.ReadFile(f.Name()) // only for the message
		f.Close()
		return nil, fmt.Errorf("%s is in use by another nexusflow (process %s): stop it, or set another DATA_DIR",
			dir, strings.TrimSpace(string(pid)))
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintln(f, os.Getpid())
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return f, nil
}

// socketFolder makes the folder for the socket of the server on the data folder
// dir, open to u alone. Its name depends on dir only: a program that was killed
// leaves one folder, which the next start uses again, and not a new one each time.
// It is in the temporary folder because a socket's path must be short.
func socketFolder(dir string, u *account) (string, error) {
	const longest = 103 // bytes on macOS; 107 on Linux
	var reason error
	for _, temp := range []string{os.TempDir(), "/tmp"} {
		path, err := filepath.Abs(filepath.Join(temp, socketName(dir)))
		if err != nil {
			return "", fmt.Errorf("make socket folder: %w", err)
		}
		if reason = u.reach(filepath.Dir(path)); reason != nil {
			continue
		}
		if len(path)+len("/.s.PGSQL.5432") > longest {
			reason = fmt.Errorf("%s is too long for a socket: set TMPDIR to a shorter path", path)
			continue
		}
		return path, makePrivate(path, u)
	}
	return "", fmt.Errorf("make socket folder: %w", reason)
}

// socketName returns the name of the socket folder of the data folder dir.
func socketName(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return fmt.Sprintf("nexusflow-%x", sum[:6])
}

// makePrivate makes the folder path for u and this program. The temporary folder
// is everybody's: a folder of another user, or a link, could hand that user the
// database, so it is refused.
func makePrivate(path string, u *account) error {
	err := os.Mkdir(path, 0o700)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make socket folder: %w", err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("make socket folder: %w", err)
	}
	uid, _, err := owner(path)
	if err != nil {
		return fmt.Errorf("make socket folder: %w", err)
	}
	if ours := int(uid) == os.Geteuid() || u != nil && uid == u.uid; !info.IsDir() || !ours {
		return fmt.Errorf("make socket folder: %s is there already and not a folder of ours (its owner is uid %d): remove it or set TMPDIR", path, uid)
	}
	if err := os.Chmod(path, 0o700); err != nil {
		return fmt.Errorf("make socket folder: %w", err)
	}
	return u.give(path)
}
