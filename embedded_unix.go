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

// account is whom a server runs as. A nil account is the user of this program.
type account struct {
	name     string
	uid, gid uint32
}

// serverUser returns the account that a server runs as when this program is root,
// because PostgreSQL refuses root: postgres, else nobody. It must be one that
// passwd knows, initdb asks for its name. For any other user it returns nil.
func serverUser() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(found.Uid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("look up user %s: %w", name, err)
		}
		gid, err := strconv.ParseUint(found.Gid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("look up user %s: %w", name, err)
		}
		return &account{name, uint32(uid), uint32(gid)}, nil
	}
	return nil, errors.New("run PostgreSQL as root: it refuses, and there is neither a user postgres nor nobody to run it as")
}

// clusterUser returns the account that runs the cluster in dir: its owner, who
// under root need not be serverUser (another user or another image may have made
// it), or serverUser when there is no cluster yet.
func clusterUser(dir string) (*account, error) {
	u, err := serverUser()
	if u == nil || err != nil {
		return u, err
	}
	uid, gid, err := owner(dir)
	if errors.Is(err, os.ErrNotExist) || uid == 0 {
		return u, nil // a cluster of root's PostgreSQL refuses by itself
	}
	if err != nil {
		return nil, err
	}
	return &account{"with uid " + strconv.FormatUint(uint64(uid), 10), uid, gid}, nil
}

// owner returns to whom path, itself and not what it links to, belongs.
func owner(path string) (uid, gid uint32, err error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, fmt.Errorf("stat %s: no owner", path)
	}
	return st.Uid, st.Gid, nil
}

// asServerUser makes cmd run as the server user when this program is root, and
// gives that user the folders dirs (not their contents). Otherwise it does nothing.
func asServerUser(cmd *exec.Cmd, dirs ...string) error {
	u, err := serverUser()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := u.give(dir); err != nil {
			return err
		}
	}
	u.run(cmd)
	return nil
}

// give makes u the owner of path.
func (u *account) give(path string) error {
	if u == nil {
		return nil
	}
	if err := os.Lchown(path, int(u.uid), int(u.gid)); err != nil {
		return fmt.Errorf("give folder to user %s: %w", u.name, explainRoot(err))
	}
	return nil
}

// run makes cmd run as u.
func (u *account) run(cmd *exec.Cmd) {
	if u == nil {
		return
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: u.uid, Gid: u.gid}
}

// openToServerUser reports the folder on the way to path that the server user
// cannot pass, such as /root. Missing folders count as open.
func openToServerUser(path string) error {
	u, err := serverUser()
	if err != nil {
		return err
	}
	return u.reach(path)
}

// reach reports the folder on the way to path that u cannot pass.
func (u *account) reach(path string) error {
	if u == nil {
		return nil
	}
	for dir := path; ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil && !u.mayEnter(info) {
			return fmt.Errorf("%s is closed to user %s, as whom PostgreSQL runs because it refuses root", dir, u.name)
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

// mayEnter reports whether the permission bits let u pass through a folder.
func (u *account) mayEnter(info os.FileInfo) bool {
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
