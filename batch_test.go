package main

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Whatever arrives while a flush is under way is the next batch: batches grow
// with the load and one item alone is flushed at once.
func TestBatcherGathersDuringFlush(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var batches [][]int
	flushing, goOn := make(chan struct{}), make(chan struct{})
	b := newBatcher(10, func(_ context.Context, items []int) {
		batches = append(batches, slices.Clone(items))
		if len(batches) == 1 {
			close(flushing)
			<-goOn
		}
	})
	done := make(chan error)
	go func() { done <- b.run(ctx) }()
	add := func(i int) {
		if err := b.add(t.Context(), i); err != nil {
			t.Error(err)
		}
	}
	add(1)
	<-flushing
	for i := range 12 {
		add(i + 2)
	}
	close(goOn)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("run = %v, want nil", err)
	}
	want := [][]int{{1}, {2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {12, 13}}
	if !slices.EqualFunc(batches, want, slices.Equal) {
		t.Errorf("batches = %v, want %v", batches, want)
	}
}

// A small batch grows while another has the turn, has it next, and gives it back; a large one
// goes at once, and so does one that has waited for turnLimit.
func TestBatcherTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var sizes []int
		b := newBatcher(2*smallBatch, func(_ context.Context, items []int) { sizes = append(sizes, len(items)) })
		b.turn = newTurn()
		go b.run(ctx)
		take := func(rows int) bool {
			_, mine := await(b.turn, make([]int, rows), nil)
			return mine
		}
		add := func(n int) {
			for range n {
				if err := b.add(ctx, 0); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
			}
		}
		expect := func(what string, want ...int) {
			t.Helper()
			synctest.Wait()
			if !slices.Equal(sizes, want) {
				t.Fatalf("%s: batches of %v, want %v", what, sizes, want)
			}
		}
		if !take(1) {
			t.Fatal("the turn is taken, want it free")
		}
		add(3)
		expect("while another has the turn")
		b.turn.give()
		expect("with the turn", 3)
		if !take(1) {
			t.Fatal("the batch kept its turn")
		}
		add(smallBatch)
		expect("a large batch", 3, smallBatch)
		add(2)
		time.Sleep(turnLimit)
		expect("after the limit", 3, smallBatch, 2)
		if take(1) {
			t.Error("the turn was given back by a batch that did not have it")
		}
		if take(smallBatch) {
			t.Error("many rows took a turn, want none")
		}
		cancel()
	})
}

// Adding to a full queue ends with the caller's context, and loses nothing.
func TestBatcherAddGivesUp(t *testing.T) {
	b := newBatcher(1, func(context.Context, []int) {})
	for i := range 4 {
		if err := b.add(t.Context(), i); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errShutdown)
	if err := b.add(ctx, 5); err != errShutdown {
		t.Errorf("add to a full queue = %v, want %v", err, errShutdown)
	}
}

func TestBatcherManyCallers(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	sum := 0 // flush never runs twice at once
	b := newBatcher(32, func(_ context.Context, items []int) {
		for _, i := range items {
			sum += i
		}
	})
	done := make(chan error)
	go func() { done <- b.run(ctx) }()
	var callers sync.WaitGroup
	for range 50 {
		callers.Go(func() {
			for range 200 {
				if err := b.add(t.Context(), 1); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	cancel()
	<-done
	if sum != 50*200 {
		t.Errorf("flushed %d items, want %d", sum, 50*200)
	}
}

func BenchmarkBatcher(b *testing.B) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	batches := newBatcher(512, func(_ context.Context, items []chan struct{}) {
		for _, done := range items {
			done <- struct{}{}
		}
	})
	go batches.run(ctx)
	b.RunParallel(func(pb *testing.PB) {
		done := make(chan struct{}, 1)
		for pb.Next() {
			batches.add(ctx, done)
			<-done
		}
	})
}
