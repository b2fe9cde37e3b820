package main

import (
	"fmt"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// A document is what the page shows of an OpenAPI description.
type document struct {
	Info struct {
		Title, Summary, Version, Description string
	}
	Tags []struct {
		Name, Description string
	}
	Paths      members[pathItem]
	Components struct {
		SecuritySchemes members[securityScheme] `yaml:"securitySchemes"`
		Parameters      members[parameter]
		Headers         members[header]
		Responses       members[response]
		Schemas         members[schema]
	}
	Security []map[string][]string
}

type pathItem struct {
	Parameters []parameter
	Get        *operation
	Post       *operation
}

type operation struct {
	OperationID string `yaml:"operationId"`
	Tags        []string
	Summary     string
	Description string
	Security    *[]map[string][]string
	Parameters  []parameter
	RequestBody *struct {
		Description string
		Content     members[media]
	} `yaml:"requestBody"`
	Responses members[response]
}

type securityScheme struct{ Description string }

type parameter struct {
	Ref         string `yaml:"$ref"`
	Name, In    string
	Required    bool
	Description string
	Schema      schema
	Example     yaml.Node
	Examples    members[example]
}

type header struct {
	Ref         string `yaml:"$ref"`
	Description string
	Required    bool
	Schema      schema
}

type response struct {
	Ref         string `yaml:"$ref"`
	Description string
	Headers     members[header]
	Content     members[media]
}

type media struct {
	Schema   schema
	Example  yaml.Node
	Examples members[example]
}

type example struct {
	Summary string
	Value   yaml.Node
}

type schema struct {
	Ref         string `yaml:"$ref"`
	Description string
	Type        words
	Format      string
	Pattern     string
	Enum        []string
	Const       *string
	Default     yaml.Node
	Minimum     *string
	Maximum     *string
	MinLength   *string `yaml:"minLength"`
	MaxLength   *string `yaml:"maxLength"`
	MinItems    *string `yaml:"minItems"`
	MaxItems    *string `yaml:"maxItems"`
	Required    []string
	Properties  members[schema]
	Items       *schema
	AllOf       []schema `yaml:"allOf"`
	Not         *schema
}

// words is one string or a list of them.
type words []string

func (w *words) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		*w = words{n.Value}
		return nil
	}
	return n.Decode((*[]string)(w))
}

// members is a mapping in the order in which it was written.
type members[T any] []entry[T]

type entry[T any] struct {
	Key   string
	Value T
}

func (m *members[T]) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: expected a mapping", n.Line)
	}
	for i := 0; i < len(n.Content); i += 2 {
		e := entry[T]{Key: n.Content[i].Value}
		if err := n.Content[i+1].Decode(&e.Value); err != nil {
			return err
		}
		*m = append(*m, e)
	}
	return nil
}

// get returns what ref, such as #/components/schemas/Task, names among the members.
func (m members[T]) get(ref string) (T, error) {
	name := ref[strings.LastIndexByte(ref, '/')+1:]
	i := slices.IndexFunc(m, func(e entry[T]) bool { return e.Key == name })
	if i < 0 {
		var none T
		return none, fmt.Errorf("%s: there is no such component", ref)
	}
	return m[i].Value, nil
}
