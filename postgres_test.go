package main

import "testing"

func TestPools(t *testing.T) {
	t.Parallel()
	p := testPools(t)
	if err := checkSchema(t.Context(), p.api); err != nil {
		t.Fatal(err)
	}
}
func TestRedisHelper(t *testing.T) {
	t.Log(newRedisURL(t))
	s := startRedisServer(t)
	s.restart(t)
	p := startPostgresServer(t)
	p.restart(t)
	p.crash()
	if err := p.start(); err != nil {
		t.Fatal(err)
	}
}
