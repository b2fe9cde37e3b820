//go:build darwin || netbsd || openbsd || dragonfly

package main

import "syscall"

// dieWithProgram does nothing: this system cannot do it, and the next start
// stops the server that was left over.
func dieWithProgram(*syscall.SysProcAttr) {}
