package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// profileSource is added to the program under test, and only there, when a profile is
// asked for: it writes one from the start to SIGUSR1.
const profileSource = `package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
)

func init() {
	name := fmt.Sprintf("%s/nexusflow-%d.prof", os.Getenv("BENCH_PROFILES"), os.Getpid())
	f, err := os.Create(name + ".part")
	if err != nil {
		panic(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		panic(err)
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGUSR1)
	go func() {
		<-ended
		pprof.StopCPUProfile()
		os.Rename(f.Name(), name)
	}()
}
`

// build makes the program under test from the parent folder, so it must be run in bench.
func (b *bench) build(ctx context.Context) error {
	b.nexusflow = filepath.Join(b.dir, "nexusflow")
	args := []string{"build", "-o", b.nexusflow}
	if b.opts.profiles != "" {
		overlay, err := b.profileOverlay()
		if err != nil {
			return fmt.Errorf("prepare profiles: %w", err)
		}
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, ".")...)
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build nexusflow from the parent folder: %w: %s", err, out)
	}
	return nil
}

// profileOverlay writes what lets go build see profileSource in the parent folder, where it
// is not, and returns the path of the list.
func (b *bench) profileOverlay() (string, error) {
	parent, err := filepath.Abs("..")
	if err != nil {
		return "", err
	}
	source, list := filepath.Join(b.dir, "profile.go"), filepath.Join(b.dir, "overlay.json")
	if err := os.WriteFile(source, []byte(profileSource), 0o644); err != nil {
		return "", err
	}
	data, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(parent, "bench_profile.go"): source}})
	if err != nil {
		return "", err
	}
	return list, os.WriteFile(list, data, 0o644)
}

// finishProfile makes a process of the program under test complete its profile, which it
// has no time for once it is told to stop. A profile that does not come is only missed.
func (b *bench) finishProfile(p *process) {
	if p.cmd.Process.Signal(syscall.SIGUSR1) != nil {
		return // it is gone
	}
	name := filepath.Join(b.opts.profiles, fmt.Sprintf("nexusflow-%d.prof", p.pid()))
	for range 300 {
		if _, err := os.Stat(name); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Fprintf(os.Stderr, "bench: no profile %s\n", name)
}
