//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is whom a server runs as.
type account struct {
	name     string
	uid, gid uint32
}

// serverUser returns the account that a server runs as when this program is root,
// because PostgreSQL refuses root: postgres, else nobody. It must be one that
// passwd knows, initdb asks for its name. For any other user, ok is false and
// servers run as that user.
func serverUser() (u account, ok bool, err error) {
	if os.Geteuid() != 0 {
		return account{}, false, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(found.Uid, 10, 32)
		if err != nil {
			return account{}, false, fmt.Errorf("look up user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(found.Gid, 10, 32)
		if err != nil {
			return account{}, false, fmt.Errorf("look up user %s: %w", name, err)
		}
		return account{name, uint32(uid), uint32(gid)}, true, nil
	}
	return account{}, false, errors.New("run PostgreSQL as root: it refuses, and there is neither a user postgres nor nobody to run it as")
}

// asServerUser makes cmd run as the server user when this program is root, and
// gives that user the folders dirs (not their contents). Otherwise it does nothing.
func asServerUser(cmd *exec.Cmd, dirs ...string) error {
	u, ok, err := serverUser()
	if err != nil || !ok {
		return err
	}
	return u.own(cmd, dirs...)
}

// own makes cmd run as u and gives u the folders dirs.
func (u account) own(cmd *exec.Cmd, dirs ...string) error {
	for _, dir := range dirs {
		if err := os.Lchown(dir, int(u.uid), int(u.gid)); err != nil {
			return fmt.Errorf("give folder to user %s (root needs the capabilities CHOWN, SETUID, SETGID and KILL): %w", u.name, err)
		}
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: u.uid, Gid: u.gid}
	return nil
}

// openToServerUser reports the folder on the way to path that the server user
// cannot pass, such as /root. Missing folders count as open.
func openToServerUser(path string) error {
	u, ok, err := serverUser()
	if err != nil || !ok {
		return err
	}
	for dir := path; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil && !u.mayEnter(info) {
			return fmt.Errorf("%s is closed to user %s, whom PostgreSQL runs as because it refuses root", dir, u.name)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// mayEnter reports whether the permission bits let u pass through a folder.
func (u account) mayEnter(info os.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return true
	case st.Uid == u.uid:
		return info.Mode()&0o100 != 0
	case st.Gid == u.gid:
		return info.Mode()&0o010 != 0
	default:
		return info.Mode()&0o001 != 0
	}
}
