//go:build !linux

package main

import "os/exec"

// apart does nothing where a child cannot be made to die with its parent.
func apart(*exec.Cmd) {}
