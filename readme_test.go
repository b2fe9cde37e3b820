package main

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Each client of the README, as it stands there, gets its task done once although the answer to
// its submission is lost and the service is busy for a moment.
func TestReadmeClients(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(readme), "\n## Clients\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for language, command := range map[string][]string{
		"sh":     {"sh", "client.sh"},
		"python": {"python3", "client.py"},
		"js":     {"node", "client.mjs"},
		"go":     {"go", "run", "client.go"},
	} {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			blocks := regexp.MustCompile("(?s)\n```"+language+"\n(.*?)```\n").FindAllStringSubmatch(section, -1)
			if len(blocks) != 1 {
				t.Fatalf("%d snippets, want 1", len(blocks))
			}
			for _, program := range []string{command[0], map[string]string{"sh": "curl"}[language]} {
				if _, err := exec.LookPath(program); err != nil && program != "" {
					t.Skipf("SKIPPED, NOT TESTED: %v", err)
				}
			}
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, command[len(command)-1]), []byte(blocks[0][1]), 0o644); err != nil {
				t.Fatal(err)
			}
			svc := startService(t, fastConfig(t), nil)
			busy := busyProxy(t, svc.url)
			cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "NEXUSFLOW_URL="+busy.URL)
			cmd.Stderr = t.Output()
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %v", command, err)
			}
			var task struct {
				Name, Status string
				Payload      struct{ File string }
				Result       struct{ Processed bool }
			}
			if err := json.Unmarshal(out, &task); err != nil || task.Name != "process_video" || task.Status != "completed" || task.Payload.File != "clip.mp4" || !task.Result.Processed {
				t.Errorf("%v printed %s", command, out)
			}
			var tasks int
			if err := svc.pool.QueryRow(t.Context(), "SELECT count(*) FROM tasks").Scan(&tasks); err != nil || tasks != 1 {
				t.Errorf("%d tasks, %v, want 1", tasks, err)
			}
		})
	}
}

// busyProxy is in front of a service and passes everything on, but loses the answer to the first
// submission and answers the first question itself, with 503.
func busyProxy(t testing.TB, to string) *httptest.Server {
	t.Helper()
	target, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	var posts, gets atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost && posts.Add(1) == 1:
			pass.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case r.Method == http.MethodGet && gets.Add(1) == 1:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"status":503}`)
		default:
			pass.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(server.Close)
	return server
}

// The README names the start-up parameters that a pooler has to be told of: all but the two
// that PgBouncer keeps track of itself.
func TestReadmeNamesStartupParameters(t *testing.T) {
	t.Parallel()
	p, err := openPools(t.Context(), "postgres://u@h/db", testLease)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	params := map[string]bool{}
	for _, pool := range []*pgxpool.Pool{p.api, p.submit, p.work, p.lease} {
		for name := range pool.Config().ConnConfig.RuntimeParams {
			params[name] = name != "application_name" && name != "timezone"
		}
	}
	maps.DeleteFunc(params, func(_ string, tell bool) bool { return !tell })
	want := "ignore_startup_parameters = " + strings.Join(slices.Sorted(maps.Keys(params)), ", ") + "\n"
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), want) {
		t.Errorf("README.md lacks the line\n%s", want)
	}
}
