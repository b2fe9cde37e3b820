//go:build unix && !linux

package main

import (
	"os"
	"syscall"
)

// commandAttr gives a command a process group of its own. A server that is killed leaves
// its commands running here: only Linux can tell them.
func commandAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// waitCommand waits for p, then calls ended. Between the two the id of p's group could in
// principle be given away; a call that waits without reaping, as on Linux, is
// not to be had on every system.
func waitCommand(p *os.Process, ended func()) (*os.ProcessState, error) {
	state, err := p.Wait()
	ended()
	return state, err
}
