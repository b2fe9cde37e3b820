package main

import (
	"os/exec"
	"syscall"
)

// apart gives a child a process group of its own, so that Ctrl-C leaves it to the test binary
// to stop, and lets it die with the thread that starts it.
func apart(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGQUIT}
}
