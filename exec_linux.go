package main

import (
	"os"
	"syscall"
)

// commandAttr gives a command a process group of its own, and lets the kernel kill the
// command when the thread that starts it ends. Programs that the command has
// started itself do not get that signal.
func commandAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// waitCommand waits for p and calls ended when it has exited but is still a zombie. Until
// it is reaped, its process id, which is the id of its group too, cannot be given
// to anybody else, and so ended may signal the group.
func waitCommand(p *os.Process, ended func()) (*os.ProcessState, error) {
	const idIsPID = 1 // P_PID
	for {
		_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, idIsPID, uintptr(p.Pid), 0, syscall.WEXITED|syscall.WNOWAIT, 0, 0)
		if errno != syscall.EINTR {
			break // any other error shows again in Wait
		}
	}
	ended()
	state, err := p.Wait()
	// As process 1 of a container this program inherits what the command left behind,
	// and has to reap it: ended has killed it. Elsewhere there is nothing to wait for.
	for {
		if _, errno := syscall.Wait4(-p.Pid, nil, 0, nil); errno != nil && errno != syscall.EINTR {
			return state, err
		}
	}
}
