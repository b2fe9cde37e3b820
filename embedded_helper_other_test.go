//go:build !(linux || darwin || freebsd || netbsd || openbsd || dragonfly)

package main

// embeddedHelperMain is for the systems that embedded servers run on.
func embeddedHelperMain() {}
