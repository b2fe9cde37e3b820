//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package main

import "os/exec"

// asServerUser does nothing: a system without uids has none to change to.
func asServerUser(*exec.Cmd, ...string) error { return nil }

// openToServerUser does nothing, see asServerUser.
func openToServerUser(string) error { return nil }
