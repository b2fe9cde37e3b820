package main

import (
	"compress/gzip"
	"io"
	"regexp"
	"strings"
	"testing"
)

func TestDocuments(t *testing.T) {
	t.Parallel()
	var lines lineLog
	g := startGatewayLog(t, newDatabase(t), func(c *config) { c.APIKeys = []string{"secret"} }, lines.logger())
	for path, text := range map[string][]byte{"/openapi.json": openapiJSON, "/openapi.yaml": openapiYAML, "/docs": docsPage, "/docs/style.css": docsStyle} {
		plain := g.do(t, "GET", path, "", "Accept-Encoding", "br, gzip;q=0")
		if plain.status != 200 || plain.body != string(text) || len(text) < 1000 {
			t.Errorf("%s = %d, %d bytes, want %d", path, plain.status, len(plain.body), len(text))
		}
		packed := g.do(t, "GET", path, "", "Accept-Encoding", "br, gzip")
		z, err := gzip.NewReader(strings.NewReader(packed.body))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if unpacked, err := io.ReadAll(z); err != nil || string(unpacked) != string(text) || len(packed.body) > len(text)/2 {
			t.Errorf("%s: %d bytes compressed, %d unpacked, %v", path, len(packed.body), len(unpacked), err)
		}
		if head := g.do(t, "HEAD", path, "", "Accept-Encoding", "gzip"); head.status != 200 || head.body != "" || head.header.Get("Etag") != packed.header.Get("Etag") {
			t.Errorf("HEAD %s = %d %v", path, head.status, head.header)
		}
		tag, tagPacked := plain.header.Get("Etag"), packed.header.Get("Etag")
		if tag == tagPacked {
			t.Errorf("%s: one ETag for two bodies", path)
		}
		for _, test := range []struct {
			tag, coding string
			status      int
		}{{tag, "identity", 304}, {tagPacked, "gzip", 304}, {tag, "gzip", 200}, {tagPacked, "identity", 200}, {`"x"`, "gzip", 200}} {
			a := g.do(t, "GET", path, "", "Accept-Encoding", test.coding, "If-None-Match", test.tag)
			if a.status != test.status {
				t.Errorf("%s with %s, %s = %d, want %d", path, test.coding, test.tag, a.status, test.status)
			}
		}
	}
	for _, path := range []string{"/docs/", "/redoc"} {
		if a := g.do(t, "GET", path, ""); a.status != 308 || a.header.Get("Location") != "/docs" {
			t.Errorf("%s = %d %v", path, a.status, a.header)
		}
	}
	if a := g.do(t, "GET", "/docs/nothing", ""); a.status != 404 {
		t.Errorf("/docs/nothing = %d", a.status)
	}
	if n := lines.count(`"level":"INFO","msg":"request"`); n != 1 { // the 404
		t.Errorf("%d requests at info", n)
	}
}

func TestAcceptsGzip(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]bool{
		"": false, "gzip": true, "GZIP": true, "br, gzip": true, "gzip;q=1": true, "gzip; q=0.001": true,
		"gzip;q=0": false, "gzip; q=0.000": false, "xgzip": false, "*": false, "identity": false,
	} {
		if got := acceptsGzip([]string{"deflate", value}); got != want {
			t.Errorf("acceptsGzip(%q) = %t, want %t", value, got, want)
		}
	}
}

// The page works offline under its policy, each of its links has an aim, and what the Link
// header of idempotency errors names is there and says what has to be said.
func TestDocsPage(t *testing.T) {
	t.Parallel()
	page := string(docsPage)
	ids := map[string]bool{}
	for _, id := range regexp.MustCompile(` id="([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if ids[id[1]] {
			t.Errorf("id %s twice", id[1])
		}
		ids[id[1]] = true
	}
	links := regexp.MustCompile(`(href|src)="([^"]+)"`).FindAllStringSubmatch(page, -1)
	for _, link := range links {
		switch aim, local := strings.CutPrefix(link[2], "#"); {
		case local && !ids[aim]:
			t.Errorf("link to #%s, which is nowhere", aim)
		case !local && link[1] == "src":
			t.Errorf("the page loads %s", link[2])
		}
	}
	if len(links) < 100 {
		t.Errorf("%d links", len(links))
	}
	if found := regexp.MustCompile(`<script|<style| style=| on[a-z]+="|@import`).FindString(page + string(docsStyle)); found != "" {
		t.Errorf("%q does not work under the policy", found)
	}
	_, section, _ := strings.Cut(page, `<h2 id="idempotency">`)
	section, _, _ = strings.Cut(section, "<h2")
	for _, word := range []string{"1 to 255 printable ASCII", "RFC 8941", "idempotency-key-invalid", "idempotency-key-reused", "Idempotent-Replayed", "TASK_RETENTION", "30 days", "24 hours", "H[0]"} {
		if !strings.Contains(section, word) {
			t.Errorf("the section on idempotency does not say %s", word)
		}
	}
	for _, word := range []string{"TASK_RETENTION", "30 days"} {
		parameter, _ := testContract(t).at("components", "parameters", "IdempotencyKey")
		if !strings.Contains(parameter["description"].(string), word) {
			t.Errorf("the key's description does not say %s", word)
		}
	}
}
