package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

// The file describes the routes that there are, and no others.
func TestContractRoutes(t *testing.T) {
	t.Parallel()
	g := startGateway(t, newDatabase(t), nil)
	routes := slices.Sorted(slices.Values(g.server.mux.patterns))
	if diff := cmp.Diff(testContract(t).patterns(), routes); diff != "" {
		t.Errorf("openapi.yaml and the routes (-file +routes):\n%s", diff)
	}
}

// Every schema can be read, and every example obeys the schema beside it.
func TestContractExamples(t *testing.T) {
	t.Parallel()
	c := testContract(t)
	for name := range c.doc["components"].(map[string]any)["schemas"].(map[string]any) {
		if _, err := c.schema("components", "schemas", name); err != nil {
			t.Errorf("schema %s: %v", name, err)
		}
	}
	examples := 0
	var walk func(value any, place []string)
	walk = func(value any, place []string) {
		switch v := value.(type) {
		case []any:
			for i, item := range v {
				walk(item, append(slices.Clone(place), strconv.Itoa(i)))
			}
		case map[string]any:
			for name, member := range v {
				if name != "value" { // of an example, which is data
					walk(member, append(slices.Clone(place), name))
				}
			}
			if v["schema"] == nil {
				return
			}
			check := func(name string, example any) {
				examples++
				if err := c.validate(example, append(slices.Clone(place), "schema")...); err != nil {
					t.Errorf("%s, example %s: %v", strings.Join(place, " "), name, err)
				}
			}
			if example, ok := v["example"]; ok {
				check("", example)
			}
			several, _ := v["examples"].(map[string]any)
			for name, example := range several {
				check(name, example.(map[string]any)["value"])
			}
		}
	}
	walk(c.doc, nil)
	if examples < 80 {
		t.Errorf("%d examples were checked: there are more", examples)
	}
}

// The page tells of every problem type that the file has. That the file has those of the program, every
// checked answer shows.
func TestContractProblems(t *testing.T) {
	t.Parallel()
	c := testContract(t)
	problem, _ := c.at("components", "schemas", "Problem", "properties", "type")
	for _, kind := range problem["enum"].([]any) {
		if !strings.Contains(string(docsPage), fmt.Sprintf("<td><code>%s</code></td>", kind)) {
			t.Errorf("the table of errors has no %s", kind)
		}
	}
}

// A check that lets everything pass would go unnoticed.
func TestContractRefuses(t *testing.T) {
	t.Parallel()
	c := testContract(t)
	g := startGateway(t, newDatabase(t), nil)
	id := g.submitted(t, `{"name":"a"}`)
	good := g.do(t, "GET", "/tasks/"+id, "")
	change := func(f func(*answer)) answer {
		a := answer{good.status, good.header.Clone(), good.body}
		f(&a)
		return a
	}
	for what, a := range map[string]answer{
		"status":             change(func(a *answer) { a.status = 201 }),
		"media type":         change(func(a *answer) { a.header.Set("Content-Type", "text/plain") }),
		"missing header":     change(func(a *answer) { a.header.Del("Etag") }),
		"unknown header":     change(func(a *answer) { a.header.Set("X-New", "1") }),
		"wrong header":       change(func(a *answer) { a.header.Set("Cache-Control", "public") }),
		"header of no digit": change(func(a *answer) { a.header.Set("Retry-After", "soon") }),
		"unknown member":     change(func(a *answer) { a.body = strings.Replace(a.body, "{", `{"new":1,`, 1) }),
		"missing member":     change(func(a *answer) { a.body = strings.Replace(a.body, `"attempt":0,`, "", 1) }),
		"wrong type":         change(func(a *answer) { a.body = strings.Replace(a.body, `"attempt":0`, `"attempt":"0"`, 1) }),
		"unknown word":       change(func(a *answer) { a.body = strings.Replace(a.body, `"pending"`, `"waiting"`, 1) }),
		"time":               change(func(a *answer) { a.body = strings.Replace(a.body, "+00:00", "Z", 1) }),
		"no JSON":            change(func(a *answer) { a.body += "}" }),
	} {
		if err := c.check("GET", "/tasks/"+id, a); err == nil {
			t.Errorf("%s: not noticed", what)
		}
	}
	if err := c.check("GET", "/tasks/"+id, good); err != nil {
		t.Error(err)
	}
	if err := c.check("GET", "/none", good); err == nil {
		t.Error("an answer to an unknown path: not noticed")
	}
	var value any
	if value, _ = jsonschema.UnmarshalJSON(strings.NewReader(`{"type":"about:blank"}`)); c.validate(value, "components", "schemas", "Problem") == nil {
		t.Error("a problem without members: not noticed")
	}
}
