//go:build !linux

package main

// execHelperMain is for the tests that only Linux can pass.
func execHelperMain() {}
