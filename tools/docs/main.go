// Command docs makes of openapi.yaml what the service serves: ui/openapi.json, the same in
// JSON, and ui/docs.html, the page to read. Both depend on nothing but that file and this
// program. With -check it writes nothing and fails if they are not up to date.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"gopkg.in/yaml.v3"
)

func main() {
	log.SetFlags(0)
	root := flag.String("root", "..", "folder of openapi.yaml and ui")
	check := flag.Bool("check", false, "write nothing, fail if a file is out of date")
	flag.Parse()
	text, err := os.ReadFile(filepath.Join(*root, "openapi.yaml"))
	if err != nil {
		log.Fatal(err)
	}
	files, err := build(text)
	if err != nil {
		log.Fatalf("openapi.yaml: %v", err)
	}
	for name, want := range files {
		path := filepath.Join(*root, "ui", name)
		if !*check {
			err = os.WriteFile(path, want, 0o644)
		} else if got, _ := os.ReadFile(path); !bytes.Equal(got, want) {
			err = fmt.Errorf("%s is out of date: run go generate", path)
		}
		if err != nil {
			log.Fatal(err)
		}
	}
}

// build returns the files that are made of the text of openapi.yaml, by name.
func build(text []byte) (map[string][]byte, error) {
	var node yaml.Node
	if err := yaml.Unmarshal(text, &node); err != nil {
		return nil, err
	}
	root := node.Content[0]
	json, err := appendJSON(nil, root, "")
	if err != nil {
		return nil, err
	}
	var api document
	if err := root.Decode(&api); err != nil {
		return nil, err
	}
	page, err := render(&api)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{"openapi.json": append(json, '\n'), "docs.html": page}, nil
}
