//go:build linux || freebsd

package main

import "syscall"

// dieWithProgram makes the kernel send SIGINT to the child when the thread that
// started it ends: PostgreSQL and Redis then shut down cleanly by themselves.
// Go sets it after the change of user, which would clear it.
func dieWithProgram(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGINT }
