package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// exampleHandlers loads the examples' file as a worker in the repository's root does.
func exampleHandlers(t *testing.T) *handlerTable {
	t.Helper()
	cfg := handlersConfig(t, "")
	cfg.HandlersFile = "examples/handlers.json"
	table, err := loadHandlers(cfg, true, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// runExample runs the handler of name and reads its result into result.
func runExample(t *testing.T, name, payload string, result any) error {
	t.Helper()
	h, ok := exampleHandlers(t).find(name)
	if !ok {
		t.Fatalf("no handler for %s", name)
	}
	got, err := h.run(t.Context(), handlerTask(payload))
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(resultJSON(t, got)), result); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return nil
}

func TestExampleNames(t *testing.T) {
	t.Parallel()
	table := exampleHandlers(t)
	if got, want := table.names(), []string{"fail_task", "notify", "process_video", "report"}; !slices.Equal(got, want) || !table.open() {
		t.Errorf("names() = %q, open() = %v, want %q and true", got, table.open(), want)
	}
}

func TestExampleProcessVideo(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("examples/media/tone.wav")
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Path, SHA256 string
		Bytes        int
		Format       struct{ Duration, Size string }
	}
	if err := runExample(t, "process_video", `{"note": "a \"path\": \"x\"", "path": "tone.wav"}`, &got); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("ffprobe"); err == nil {
		if got.Format.Duration != "0.250000" || got.Format.Size != strconv.Itoa(len(data)) {
			t.Errorf("ffprobe's result = %+v", got)
		}
	} else if got.Path != "tone.wav" || got.Bytes != len(data) || got.SHA256 != fmt.Sprintf("%x", sha256.Sum256(data)) {
		t.Errorf("result = %+v", got)
	}
}

// TestExampleProcessVideoRefuses also looks for traces of names that a shell would run.
func TestExampleProcessVideoRefuses(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace")
	t.Setenv("TRACE", trace)
	for _, path := range []string{
		"", "none.wav", "..", "../handlers.json", "a/../../handlers.json", "/etc/passwd", "a/..", "-rf", "-",
		`$(touch $TRACE)`, "`touch $TRACE`", `; touch $TRACE; `, `x' ; touch $TRACE '`, `x" ; touch $TRACE "`, `x\" ; touch $TRACE`,
		"a\nb", "tone.wav\n", "*", "%s%s%n",
	} {
		payload, err := json.Marshal(map[string]string{"path": path})
		if err != nil {
			t.Fatal(err)
		}
		if err := runExample(t, "process_video", string(payload), nil); err == nil || !isPermanent(err) {
			t.Errorf("path %q: err = %v, want a permanent one", path, err)
		}
	}
	for _, payload := range []string{`{}`, `{"path": 1}`, `{"path": null}`, `{"path": ["tone.wav"]}`} {
		if err := runExample(t, "process_video", payload, nil); err == nil || !isPermanent(err) {
			t.Errorf("payload %s: err = %v, want a permanent one", payload, err)
		}
	}
	if _, err := os.Stat(trace); err == nil {
		t.Error("a path was run as a command")
	}
}

type exampleSum struct{ Orders, Cents int }

type exampleReport struct {
	Month string
	exampleSum
	Regions map[string]exampleSum
}

func TestExampleReport(t *testing.T) {
	t.Parallel()
	for _, month := range []string{"", "2026-03", "1999-01"} {
		want := addUpOrders(t, month)
		payload := `{}`
		if month != "" {
			payload = fmt.Sprintf(`{"month": %q}`, month)
		}
		var got exampleReport
		if err := runExample(t, "report", payload, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(exampleReport{})); diff != "" {
			t.Errorf("report of month %q (-want +got):\n%s", month, diff)
		}
	}
	for _, payload := range []string{`{"month": 3}`, `{"month": "March"}`, `{"month": "2026-03\""}`, `{"month": "$(id)"}`} {
		if err := runExample(t, "report", payload, nil); err == nil || !isPermanent(err) {
			t.Errorf("payload %s: err = %v, want a permanent one", payload, err)
		}
	}
}

// addUpOrders does what the example does, by other means.
func addUpOrders(t *testing.T, month string) exampleReport {
	t.Helper()
	f, err := os.Open("examples/data/orders.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	report := exampleReport{Month: month, Regions: map[string]exampleSum{}}
	if month == "" {
		report.Month = "all"
	}
	for _, row := range rows[1:] {
		if !strings.HasPrefix(row[0], month) {
			continue
		}
		n, _ := strconv.Atoi(row[3])
		price, err := strconv.Atoi(row[4])
		if err != nil {
			t.Fatal(err)
		}
		sum := report.Regions[row[1]]
		report.Regions[row[1]] = exampleSum{sum.Orders + 1, sum.Cents + n*price}
		report.exampleSum = exampleSum{report.Orders + 1, report.Cents + n*price}
	}
	return report
}

func TestExampleReportOfABrokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "orders.csv")
	if err := os.WriteFile(file, []byte("date,region,product,quantity,unit_cents\n2026-01-01,north,lamp,one,5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ORDERS_FILE", file)
	if err := runExample(t, "report", `{}`, nil); err == nil || !isPermanent(err) || err.Error() != "line 2: not an order" {
		t.Errorf("err = %v, want a permanent one about line 2", err)
	}
}

// TestExampleReceiver runs the receiver with two secrets, as in a rotation.
func TestExampleReceiver(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("SKIPPED: python3 is not installed, so examples/receiver.py is not tested")
	}
	const first, second = "whsec_c2VjcmV0IGZvciB0aGUgZXhhbXBsZQ==", "plain text secret"
	receiver := exec.CommandContext(t.Context(), python, "examples/receiver.py", "0")
	receiver.Env = append(os.Environ(), "WEBHOOK_SECRETS="+first+","+second)
	receiver.Stderr = t.Output()
	stdout, err := receiver.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := receiver.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		receiver.Process.Kill()
		receiver.Wait() // reports the kill
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("read the receiver's port: %v", err)
	}
	target := "http://127.0.0.1:" + strings.TrimSpace(strings.TrimPrefix(line, "listening on port ")) + "/notify"

	const payload = `{"id": 12345678901234567890}`
	want := fmt.Sprintf(`{"payload":{"id":12345678901234567890},"sha256":"%x"}`, sha256.Sum256([]byte(payload)))
	for _, secrets := range [][]string{{first}, {second}, {"unknown", second}} {
		result, err := endpointOf(t, target, secrets...)(t.Context(), handlerTask(payload))
		if err != nil {
			t.Fatalf("signed with %q: %v", secrets, err)
		}
		if got := resultJSON(t, result); got != want {
			t.Errorf("signed with %q: result = %s, want %s", secrets, got, want)
		}
	}
	for _, secrets := range [][]string{nil, {"unknown"}} {
		_, err := endpointOf(t, target, secrets...)(t.Context(), handlerTask(payload))
		if err == nil || !isPermanent(err) || !strings.Contains(err.Error(), "401 Unauthorized") {
			t.Errorf("signed with %q: err = %v, want a permanent refusal", secrets, err)
		}
	}
	p, err := newPusher(config{WebhookSecrets: []string{first}})
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]struct {
		age  time.Duration
		body string
	}{
		"as signed":       {0, payload},
		"replayed":        {10 * time.Minute, payload},
		"another payload": {0, `{"id": 1}`},
	} {
		stamp := strconv.FormatInt(time.Now().Add(-change.age).Unix(), 10)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target, strings.NewReader(change.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Idempotency-Key", name)
		req.Header.Set("webhook-id", "1")
		req.Header.Set("webhook-timestamp", stamp)
		req.Header.Set("webhook-signature", p.signature("1", stamp, []byte(payload)))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if wantCode := map[bool]int{true: 200, false: 401}[name == "as signed"]; resp.StatusCode != wantCode {
			t.Errorf("%s: %d, want %d", name, resp.StatusCode, wantCode)
		}
	}
}
