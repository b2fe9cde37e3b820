package main

import (
	"encoding/json"
	"fmt"

	"gopkg.in/yaml.v3"
)

// appendJSON appends a node as JSON with its members in their order, two blanks deeper than
// indent at each level. Anchors are written out.
func appendJSON(b []byte, n *yaml.Node, indent string) ([]byte, error) {
	inner := indent + "  "
	var err error
	switch n.Kind {
	case yaml.AliasNode:
		return appendJSON(b, n.Alias, indent)
	case yaml.MappingNode:
		if len(n.Content) == 0 {
			return append(b, "{}"...), nil
		}
		for i := 0; i < len(n.Content); i += 2 {
			b = append(append(b, separator("{", i)...), inner...)
			b = append(appendText(b, n.Content[i].Value), ": "...)
			if b, err = appendJSON(b, n.Content[i+1], inner); err != nil {
				return nil, err
			}
		}
		return append(append(append(b, '\n'), indent...), '}'), nil
	case yaml.SequenceNode:
		if len(n.Content) == 0 {
			return append(b, "[]"...), nil
		}
		for i, item := range n.Content {
			b = append(append(b, separator("[", i)...), inner...)
			if b, err = appendJSON(b, item, inner); err != nil {
				return nil, err
			}
		}
		return append(append(append(b, '\n'), indent...), ']'), nil
	}
	switch n.Tag {
	case "!!str":
		return appendText(b, n.Value), nil
	case "!!int", "!!float", "!!bool", "!!null":
		if !json.Valid([]byte(n.Value)) {
			break
		}
		return append(b, n.Value...), nil
	}
	return nil, fmt.Errorf("line %d: write %q as a string, or as JSON has it", n.Line, n.Value)
}

func separator(open string, i int) string {
	if i == 0 {
		return open + "\n"
	}
	return ",\n"
}

func appendText(b []byte, s string) []byte {
	text, err := json.Marshal(s)
	if err != nil { // a string always encodes
		panic(err)
	}
	return append(b, text...)
}
