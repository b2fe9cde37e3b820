package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDeploymentSettings checks that every variable that the deployment files set
// for the service is one, and that the values load.
func TestDeploymentSettings(t *testing.T) {
	known := make(map[string]bool)
	for _, s := range new(config).settings() {
		known[s.name] = true
	}
	manifests, err := filepath.Glob("deploy/kubernetes/*.yaml")
	if err != nil || len(manifests) == 0 {
		t.Fatalf("manifests: %v, %v", manifests, err)
	}
	variable := map[string]*regexp.Regexp{
		"Dockerfile":         regexp.MustCompile(`(?m)^ENV ([A-Z_]+)=(\S+)`),
		"docker-compose.yml": regexp.MustCompile(`(?m)^      ((?:[A-Z]+_)+[A-Z]+): "?([^"\n]+)`),
	}
	for _, name := range manifests {
		variable[name] = regexp.MustCompile(`(?m)^ +(?:- name: )?((?:[A-Z]+_)+[A-Z]+|ROLES|LEASE)(?:: "?([^"\n]+)|\n)`)
	}
	found := 0
	for name, pattern := range variable {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range pattern.FindAllStringSubmatch(string(text), -1) {
			if strings.HasPrefix(m[1], "POSTGRES_") {
				continue // the database's own
			}
			found++
			if !known[m[1]] {
				t.Errorf("%s sets %s, which is not a setting", name, m[1])
			}
			if _, _, err := load(map[string]string{m[1]: m[2], "ALLOW_ANONYMOUS": "true"}); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if found < 8 {
		t.Errorf("found %d variables: the patterns no longer fit the files", found)
	}
}

// TestDockerfile holds the rules whose breach shows only when a container is
// stopped, or built without a network.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile("Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`(?m)^ENTRYPOINT \["/nexusflow"\]$`, // exec form: the binary is process 1 and gets SIGTERM
		`(?m)^HEALTHCHECK .*\\?\n? *CMD \["/nexusflow", "healthcheck"\]$`,
		`(?m)^USER 65532:65532$`,
		`(?m)^ENV HTTP_ADDR=:8000$`,
		`(?m)^EXPOSE 8000$`,
		`(?m)^ARG VERSION\nRUN .* -X main\.release=\$VERSION"`,
	} {
		if !regexp.MustCompile(want).Match(text) {
			t.Errorf("Dockerfile lacks %s", want)
		}
	}
	if bytes.Contains(text, []byte("# syntax=")) {
		t.Error("Dockerfile has a syntax line, for which an image is fetched")
	}
	env, err := os.ReadFile(".env")
	if err != nil || bytes.ContainsRune(env, '$') {
		t.Errorf(".env: %v, or a $, which Compose would expand", err)
	}
}
