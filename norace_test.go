//go:build !race

package main

// raceEnabled tells that this test binary looks for data races; the processes it starts then do too.
const raceEnabled = false
