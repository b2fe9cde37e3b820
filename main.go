// Command nexusflow runs tasks that are submitted over HTTP: reliably, and so
// that what became of them can be asked.
package main

func main() {}
