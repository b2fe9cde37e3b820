package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// A contract is openapi.json as tests read it. It is safe for concurrent use.
type contract struct {
	doc      map[string]any
	mux      *http.ServeMux // has the file's paths, and so finds the one of a request
	mu       sync.Mutex
	compiler *jsonschema.Compiler
}

var theContract = sync.OnceValues(loadContract)

func testContract(t testing.TB) *contract {
	t.Helper()
	c, err := theContract()
	if err != nil {
		t.Fatalf("openapi.json: %v", err)
	}
	return c
}

func loadContract() (*contract, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(openapiJSON))
	if err != nil {
		return nil, err
	}
	c := &contract{doc: doc.(map[string]any), mux: http.NewServeMux(), compiler: jsonschema.NewCompiler()}
	c.compiler.DefaultDraft(jsonschema.Draft2020)
	c.compiler.AssertFormat()
	c.compiler.UseRegexpEngine(func(pattern string) (jsonschema.Regexp, error) {
		// JavaScript's \u0000 is \x{0000} in Go.
		return regexp.Compile(regexp.MustCompile(`\\u([0-9a-f]{4})`).ReplaceAllString(pattern, `\x{$1}`))
	})
	for _, pattern := range c.patterns() {
		c.mux.Handle(pattern, http.NotFoundHandler())
	}
	return c, c.compiler.AddResource("openapi.json", doc)
}

// patterns returns what the file describes as the mux writes it.
func (c *contract) patterns() (patterns []string) {
	for path, item := range c.doc["paths"].(map[string]any) {
		for _, method := range []string{"get", "post", "put", "patch", "delete", "head", "options", "trace"} {
			if _, ok := item.(map[string]any)[method]; !ok {
				continue
			}
			if strings.HasSuffix(path, "/") {
				path += "{$}"
			}
			patterns = append(patterns, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(patterns)
	return patterns
}

// at returns what is at a place in the file, following references.
func (c *contract) at(place ...string) (map[string]any, []string) {
	var value any = c.doc
	for _, name := range place {
		value = value.(map[string]any)[name]
	}
	object, _ := value.(map[string]any)
	if ref, ok := object["$ref"].(string); ok {
		return c.at(strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
	}
	return object, place
}

// schema returns the schema at a place in the file.
func (c *contract) schema(place ...string) (*jsonschema.Schema, error) {
	var pointer strings.Builder
	for _, name := range place {
		pointer.WriteString("/" + strings.NewReplacer("~", "~0", "/", "~1", "%", "%25", " ", "%20").Replace(name))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.compiler.Compile("openapi.json#" + pointer.String())
}

// validate checks a decoded JSON value against the schema at a place in the file.
func (c *contract) validate(value any, place ...string) error {
	s, err := c.schema(place...)
	if err != nil {
		return err
	}
	return s.Validate(value)
}

// operation returns where the file describes what answers a request: nil if no path is the
// request's, or not by this method.
func (c *contract) operation(method, target string) []string {
	_, pattern := c.mux.Handler(httptest.NewRequest(method, target, nil))
	method, path, _ := strings.Cut(pattern, " ")
	if pattern == "" {
		return nil
	}
	return []string{"paths", strings.TrimSuffix(path, "{$}"), strings.ToLower(method)}
}

// check returns everything in which the answer to a request departs from the file:
// status, headers and body, and whatever the file does not know.
func (c *contract) check(method, target string, a answer) error {
	if a.status == http.StatusTemporaryRedirect {
		return nil // to the shortest form of the path
	}
	place := c.operation(method, target)
	shared := map[int]string{http.StatusNotFound: "NoTask", http.StatusMethodNotAllowed: "MethodNotAllowed", http.StatusInternalServerError: "Bug"}
	switch {
	case place != nil:
		place = append(place, "responses", strconv.Itoa(a.status))
	case shared[a.status] != "":
		place = []string{"components", "responses", shared[a.status]}
	}
	response, place := c.at(place...)
	var errs []error
	if response == nil {
		errs = append(errs, errors.New("the status is not in the file"))
	} else {
		errs = append(errs, c.checkHeader(a.header, place), c.checkBody(method, a, place))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s %.200s = %d: departs from openapi.yaml: %w\n%.2000s", method, target, a.status, err, a.body)
	}
	return nil
}

// transport are the headers that HTTP itself describes.
var transport = []string{"Content-Type", "Content-Length", "Date", "Connection", "Transfer-Encoding"}

func (c *contract) checkHeader(header http.Header, place []string) error {
	var errs []error
	response, _ := c.at(place...)
	declared, _ := response["headers"].(map[string]any)
	known := slices.Clone(transport)
	for name := range declared {
		known = append(known, http.CanonicalHeaderKey(name))
		h, at := c.at(append(slices.Clone(place), "headers", name)...)
		values := header.Values(name)
		if len(values) == 0 && h["required"] == true {
			errs = append(errs, fmt.Errorf("no header %s", name))
		}
		for _, value := range values {
			var typed any = value
			if h["schema"].(map[string]any)["type"] == "integer" {
				typed = json.Number(value)
			}
			if err := c.validate(typed, append(slices.Clone(at), "schema")...); err != nil {
				errs = append(errs, fmt.Errorf("header %s: %s: %w", name, value, err))
			}
		}
	}
	for name := range header {
		if !slices.Contains(known, name) {
			errs = append(errs, fmt.Errorf("header %s is not in the file", name))
		}
	}
	return errors.Join(errs...)
}

func (c *contract) checkBody(method string, a answer, place []string) error {
	response, _ := c.at(place...)
	content, _ := response["content"].(map[string]any)
	mediaType := a.header.Get("Content-Type")
	if content == nil || method == http.MethodHead {
		if a.body != "" {
			return errors.New("there is a body")
		}
		return nil
	}
	if content[mediaType] == nil {
		return fmt.Errorf("the media type %q is not in the file", mediaType)
	}
	if mediaType == "text/event-stream" {
		return c.checkEvents(a.body, place)
	}
	if !strings.HasSuffix(mediaType, "json") || a.header.Get("Content-Encoding") != "" {
		return nil
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(a.body))
	if err != nil {
		return err
	}
	return c.validate(value, append(slices.Clone(place), "content", mediaType, "schema")...)
}

// checkEvents checks as much of a stream as there is: the end of the last event may be missing.
func (c *contract) checkEvents(stream string, place []string) error {
	if whole := strings.LastIndex(stream, "\n\n"); whole >= 0 {
		stream = stream[:whole]
	}
	member := "Task"
	if place[1] == "/events" {
		member = "ListedTask"
	}
	for event := range strings.SplitSeq(stream, "\n\n") {
		fields := map[string]string{}
		for line := range strings.SplitSeq(event, "\n") {
			name, value, _ := strings.Cut(line, ": ")
			fields[name] = value
		}
		if fields["event"] == "" || fields["event"] == "gap" && fields["data"] == "{}" {
			continue
		}
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(fields["data"]))
		if err == nil {
			err = c.validate(value, "components", "schemas", member)
		}
		if err == nil && (fields["id"] == "" || fields["event"] != value.(map[string]any)["status"]) {
			err = errors.New("the event is not named as the status, or has no id")
		}
		if err != nil {
			return fmt.Errorf("event %q: %w", event, err)
		}
	}
	return nil
}
