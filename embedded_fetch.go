//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"cmp"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

const (
	// fetchVersion is the PostgreSQL that is fetched where none is installed.
	fetchVersion = "18.3.0"
	// fetchBase is where its artefacts are published; EMBEDDED_POSTGRES_URL names a mirror with the same layout.
	fetchBase = "https://repo1.maven.org/maven2"

	maxArchive   = 200 << 20        // bytes of one download; they are about 10 to 25 MB
	fetchStall   = 30 * time.Second // a server that sends nothing for so long is given up
	fetchSayEach = 2 * time.Second
)

// waysOut ends the error of a start that has no PostgreSQL to run.
const waysOut = "install PostgreSQL (such as apt-get install postgresql or brew install postgresql; EMBEDDED_POSTGRES_BIN names a folder that is not found), " +
	"or set DATABASE_URL to a running one, or use docker compose up, or set EMBEDDED_POSTGRES_URL to a mirror of " + fetchBase

// fetchChecksums are the checksum files that may lie beside an artefact, the
// strongest first. One of them must.
var fetchChecksums = []struct {
	ext string
	new func() hash.Hash
}{{"sha512", sha512.New}, {"sha256", sha256.New}, {"sha1", sha1.New}}

// errNotThere is a 404 of the artefact server.
var errNotThere = errors.New("not there")

// fetchedPostgres lists the folders of programs that earlier starts have fetched.
func fetchedPostgres(data string) []string {
	parent, err := fetchFolder(data)
	if err != nil {
		return nil
	}
	found, _ := filepath.Glob(filepath.Join(parent, "postgres-*-"+runtime.GOOS+"-"+runtime.GOARCH, "bin"))
	usable := found[:0]
	for _, bin := range found {
		if usablePostgres(bin) == nil {
			usable = append(usable, bin)
		}
	}
	return usable
}

// fetchFolder returns the folder that keeps fetched versions: the user's cache,
// or the data folder where there is none or the server user cannot reach it.
func fetchFolder(data string) (string, error) {
	if cache, err := os.UserCacheDir(); err == nil && openToServerUser(cache) == nil {
		return filepath.Join(cache, "nexusflow"), nil
	}
	return filepath.Join(data, "cache"), openToServerUser(data)
}

// fetchPostgres downloads the programs, checks and unpacks them, and returns the
// folder they are in. A start that is killed in between leaves no half folder
// under the final name.
func fetchPostgres(ctx context.Context, log *slog.Logger, base, data string) (string, error) {
	bin, err := fetchInto(ctx, log, cmp.Or(base, fetchBase), data)
	if err != nil {
		return "", fmt.Errorf("%w, and fetching it went wrong: %w: %s", errNoPostgres, err, waysOut)
	}
	return bin, nil
}

func fetchInto(ctx context.Context, log *slog.Logger, base, data string) (string, error) {
	artefact, err := artefactName(runtime.GOOS, runtime.GOARCH, fileExists("/etc/alpine-release"))
	if err != nil {
		return "", err
	}
	parent, err := fetchFolder(data)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make cache folder: %w", err)
	}
	left, _ := filepath.Glob(filepath.Join(parent, "fetching-*"))
	for _, dir := range left {
		// Another program may be fetching right now; one that was killed is old.
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > time.Hour {
			os.RemoveAll(dir)
		}
	}
	temp, err := os.MkdirTemp(parent, "fetching-")
	if err != nil {
		return "", fmt.Errorf("make cache folder: %w", err)
	}
	defer os.RemoveAll(temp)
	if err := os.Chmod(temp, 0o755); err != nil {
		return "", fmt.Errorf("make cache folder: %w", err)
	}
	url := strings.TrimRight(base, "/") + "/io/zonky/test/postgres/" + artefact + "/" + fetchVersion + "/" + artefact + "-" + fetchVersion + ".jar"
	log.Info("fetching postgres once because none is installed", "version", fetchVersion, "addr", url)
	f := newFetcher(log)
	jar := filepath.Join(temp, "postgres.jar")
	if err := f.download(ctx, url, jar); err != nil {
		return "", err
	}
	tree := filepath.Join(temp, "tree")
	if err := unpackJar(jar, tree); err != nil {
		return "", fmt.Errorf("unpack %s: %w", url, err)
	}
	final := filepath.Join(parent, "postgres-"+fetchVersion+"-"+runtime.GOOS+"-"+runtime.GOARCH)
	bin := filepath.Join(final, "bin")
	if err := usablePostgres(filepath.Join(tree, "bin")); err != nil {
		return "", fmt.Errorf("unpack %s: %w", url, err)
	}
	// A program that fetched the same at the same time may have been faster.
	if err := os.Rename(tree, final); err != nil && usablePostgres(bin) != nil {
		return "", fmt.Errorf("keep fetched postgres: %w", err)
	}
	log.Info("postgres fetched", "version", fetchVersion, "path", final)
	return bin, nil
}

// artefactName returns the name under which the programs for a platform are published.
func artefactName(system, arch string, musl bool) (string, error) {
	names := map[string]string{"amd64": "amd64", "arm64": "arm64v8", "386": "i386", "arm": "arm32v7", "ppc64le": "ppc64le"}
	name := names[arch]
	if system != "linux" && (system != "darwin" || arch != "amd64" && arch != "arm64") || name == "" {
		return "", fmt.Errorf("none is published for %s on %s", system, arch)
	}
	if musl {
		if arch == "arm" {
			name = "arm32v6" // the only 32 bit one for musl
		}
		name += "-alpine"
	}
	return "embedded-postgres-binaries-" + system + "-" + name, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// fetcher downloads files and says how far it is.
type fetcher struct {
	log    *slog.Logger
	client *http.Client
	stall  time.Duration
}

func newFetcher(log *slog.Logger) *fetcher {
	return &fetcher{log: log, stall: fetchStall, client: &http.Client{Transport: &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: fetchStall,
		DisableKeepAlives:     true, // a handful of requests in a program's life
	}}}
}

// download stores what url names at path. A missing or wrong checksum is an
// error: a damaged server is worse than none.
func (f *fetcher) download(ctx context.Context, url, path string) error {
	var want []byte
	var sum hash.Hash
	for _, kind := range fetchChecksums {
		text, err := f.checksum(ctx, url+"."+kind.ext)
		if errors.Is(err, errNotThere) {
			continue
		}
		if err != nil {
			return err
		}
		sum = kind.new()
		want, err = hex.DecodeString(text)
		if err != nil || len(want) != sum.Size() {
			return fmt.Errorf("read %s.%s: %q is not a checksum", url, kind.ext, text)
		}
		break
	}
	if sum == nil {
		return fmt.Errorf("fetch %s: %w, or without a checksum beside it", url, errNotThere)
	}
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("store download: %w", err)
	}
	defer file.Close()
	if err := f.get(ctx, url, io.MultiWriter(file, sum), maxArchive); err != nil {
		return err
	}
	if got := sum.Sum(nil); string(got) != string(want) {
		return fmt.Errorf("fetch %s: its checksum is %x, not %x as published", url, got, want)
	}
	return nil
}

// checksum returns the first word of the file at url.
func (f *fetcher) checksum(ctx context.Context, url string) (string, error) {
	var text strings.Builder
	if err := f.get(ctx, url, &text, 4096); err != nil {
		return "", err
	}
	word, _, _ := strings.Cut(strings.TrimSpace(text.String()), " ")
	return word, nil
}

// get copies the body at url to w, most bytes at most.
func (f *fetcher) get(ctx context.Context, url string, w io.Writer, most int64) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return fmt.Errorf("fetch %s: %w", url, errNotThere)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("fetch %s: %s", url, resp.Status)
	case resp.ContentLength > most:
		return fmt.Errorf("fetch %s: %d bytes, more than the %d that are taken", url, resp.ContentLength, most)
	}
	idle := time.AfterFunc(f.stall, func() { cancel(fmt.Errorf("nothing came for %v", f.stall)) })
	defer idle.Stop()
	body := &progress{log: f.log, r: resp.Body, total: resp.ContentLength, said: time.Now(), moved: func() { idle.Reset(f.stall) }}
	n, err := io.Copy(w, io.LimitReader(body, most+1))
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil && n > most {
		err = fmt.Errorf("more than the %d bytes that are taken", most)
	}
	if err != nil {
		return fmt.Errorf("fetch %s: %w", url, err)
	}
	return nil
}

// progress passes a body on and says every two seconds how much of it has come.
type progress struct {
	log         *slog.Logger
	r           io.Reader
	done, total int64 // bytes; total is -1 when the server does not say
	said        time.Time
	moved       func() // called when something came
}

func (p *progress) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.done += int64(n)
	if n > 0 {
		p.moved()
	}
	if time.Since(p.said) > fetchSayEach {
		p.said = time.Now()
		p.log.Info("fetching postgres", "bytes", p.done, "total_bytes", p.total)
	}
	return n, err
}
