package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"gopkg.in/yaml.v3"
)

// The page that a template shows. Texts of the description are Markdown and come as HTML.
type page struct {
	Title, Summary, Version string
	Intro                   template.HTML
	Chapters                []chapter // of the intro
	Groups                  []group
	Access                  []row
	Shared                  []answer
	Headers                 []row
	Schemas                 []object
}

type chapter struct{ ID, Title string }

type group struct {
	ID, Name    string
	Description template.HTML
	Operations  []request
}

type request struct {
	ID, Method, Path, Summary string
	Description               template.HTML
	Access                    []string // security schemes, of which one is needed
	Parameters                []row
	Body                      *content
	BodyText                  template.HTML
	Answers                   []answer
}

// A row describes one named thing.
type row struct {
	Name, Where string
	Required    bool
	Type, Text  template.HTML
}

type answer struct {
	ID, Status, Phrase string
	Text               template.HTML
	Headers            []row
	Content            []content
}

type content struct {
	Media    string
	Type     template.HTML
	Examples []sample
}

type sample struct{ Summary, Text string }

type object struct {
	ID   string
	Text template.HTML
	Type template.HTML // of a schema without members
	Rows []row
}

//go:embed page.html
var pageText string

// render returns the page that describes the API.
func render(api *document) ([]byte, error) {
	r := renderer{api: api, markdown: goldmark.New(
		goldmark.WithExtensions(extension.Table),
		goldmark.WithParserOptions(parser.WithAutoHeadingID()),
	)}
	p := page{
		Title:   api.Info.Title,
		Summary: api.Info.Summary,
		Version: api.Info.Version,
		Intro:   r.html(api.Info.Description),
	}
	for line := range strings.Lines(api.Info.Description) {
		if title, ok := strings.CutPrefix(strings.TrimSpace(line), "## "); ok {
			p.Chapters = append(p.Chapters, chapter{anchor(title), title})
		}
	}
	for _, tag := range api.Tags {
		p.Groups = append(p.Groups, group{anchor(tag.Name), tag.Name, r.html(tag.Description), r.requests(tag.Name)})
	}
	for _, s := range api.Components.SecuritySchemes {
		p.Access = append(p.Access, row{Name: s.Key, Text: r.html(s.Value.Description)})
	}
	for _, e := range api.Components.Responses {
		a := r.answer("", e.Value)
		a.ID = e.Key
		p.Shared = append(p.Shared, a)
	}
	p.Headers = r.headers
	slices.SortFunc(p.Headers, func(a, b row) int { return strings.Compare(a.Name, b.Name) })
	for _, e := range api.Components.Schemas {
		p.Schemas = append(p.Schemas, r.object(e.Key, e.Value))
	}
	t, err := template.New("page").Parse(pageText)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, p); err != nil {
		return nil, err
	}
	return b.Bytes(), r.err
}

// A renderer turns parts of the description into what the page shows of them, and keeps
// the first error.
type renderer struct {
	api      *document
	markdown goldmark.Markdown
	headers  []row // of all answers, each name and meaning once
	err      error
}

func (r *renderer) note(err error) {
	if r.err == nil {
		r.err = err
	}
}

func anchor(title string) string { return strings.ReplaceAll(strings.ToLower(title), " ", "-") }

// html renders Markdown. A wide table scrolls by itself, with the keyboard too.
func (r *renderer) html(text string) template.HTML {
	var b bytes.Buffer
	r.note(r.markdown.Convert([]byte(text), &b))
	html := strings.ReplaceAll(b.String(), "<table>", `<div class="scroll" tabindex="0"><table>`)
	return template.HTML(strings.ReplaceAll(html, "</table>", "</table></div>"))
}

func (r *renderer) requests(tag string) (requests []request) {
	for _, path := range r.api.Paths {
		for _, o := range []struct {
			method string
			*operation
		}{{"GET", path.Value.Get}, {"POST", path.Value.Post}} {
			if o.operation != nil && slices.Contains(o.Tags, tag) {
				requests = append(requests, r.request(path.Key, o.method, path.Value, o.operation))
			}
		}
	}
	return requests
}

func (r *renderer) request(path, method string, item pathItem, o *operation) request {
	v := request{
		ID:          o.OperationID,
		Method:      method,
		Path:        path,
		Summary:     o.Summary,
		Description: r.html(o.Description),
		Access:      r.access(o),
	}
	for _, p := range slices.Concat(o.Parameters, item.Parameters) {
		v.Parameters = append(v.Parameters, r.parameter(p))
	}
	slices.SortStableFunc(v.Parameters, func(a, b row) int {
		places := []string{"path", "query", "header"}
		return slices.Index(places, a.Where) - slices.Index(places, b.Where)
	})
	if o.RequestBody != nil {
		v.BodyText = r.html(o.RequestBody.Description)
		v.Body = &r.contents(o.RequestBody.Content)[0]
	}
	for _, e := range o.Responses {
		a := r.answer(e.Key, e.Value)
		v.Answers = append(v.Answers, a)
		for _, h := range a.Headers {
			if !slices.Contains(r.headers, h) {
				r.headers = append(r.headers, h)
			}
		}
	}
	return v
}

// access lists the security schemes of which a request needs one.
func (r *renderer) access(o *operation) (names []string) {
	required := r.api.Security
	if o.Security != nil {
		required = *o.Security
	}
	for _, scheme := range required {
		names = slices.AppendSeq(names, maps.Keys(scheme))
	}
	return names
}

func (r *renderer) parameter(p parameter) row {
	if p.Ref != "" {
		found, err := r.api.Components.Parameters.get(p.Ref)
		r.note(err)
		p = found
	}
	return row{p.Name, p.In, p.Required, r.typeOf(p.Schema), r.html(p.Description)}
}

// answer describes one response. Of one that many requests share, its text and headers are
// told where it is used, its content once for all.
func (r *renderer) answer(status string, a response) answer {
	v := answer{Status: status}
	if a.Ref != "" {
		found, err := r.api.Components.Responses.get(a.Ref)
		r.note(err)
		v.ID = a.Ref[strings.LastIndexByte(a.Ref, '/')+1:]
		a = found
	} else {
		v.Content = r.contents(a.Content)
	}
	if code, err := strconv.Atoi(status); err == nil {
		v.Phrase = http.StatusText(code)
	}
	v.Text = r.html(a.Description)
	for _, e := range a.Headers {
		h := e.Value
		if h.Ref != "" {
			found, err := r.api.Components.Headers.get(h.Ref)
			r.note(err)
			h = found
		}
		v.Headers = append(v.Headers, row{Name: e.Key, Type: r.typeOf(h.Schema), Text: r.html(h.Description)})
	}
	return v
}

func (r *renderer) contents(medias members[media]) (contents []content) {
	for _, m := range medias {
		c := content{Media: m.Key, Type: r.typeOf(m.Value.Schema)}
		if !m.Value.Example.IsZero() {
			c.Examples = append(c.Examples, sample{"Example", r.sample(&m.Value.Example)})
		}
		for _, e := range m.Value.Examples {
			c.Examples = append(c.Examples, sample{e.Value.Summary, r.sample(&e.Value.Value)})
		}
		contents = append(contents, c)
	}
	return contents
}

// sample returns an example as it would be sent: a text as it is, anything else as JSON.
func (r *renderer) sample(n *yaml.Node) string {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		return n.Value
	}
	b, err := appendJSON(nil, n, "")
	r.note(err)
	return string(b)
}

func (r *renderer) object(name string, s schema) object {
	o := object{ID: name, Text: r.html(s.Description)}
	members, required := r.members(s)
	if len(members) == 0 {
		o.Type = r.typeOf(s)
	}
	if s.Not != nil {
		o.Text += r.html(s.Not.Description)
	}
	o.Rows = r.rows("", members, required)
	return o
}

// rows lists members, those of nested objects by their paths.
func (r *renderer) rows(prefix string, of members[schema], required []string) (rows []row) {
	for _, m := range of {
		text := m.Value.Description
		if text == "" && m.Value.Ref != "" {
			found, err := r.api.Components.Schemas.get(m.Value.Ref)
			r.note(err)
			text = found.Description
		}
		rows = append(rows, row{
			Name:     prefix + m.Key,
			Required: slices.Contains(required, m.Key),
			Type:     r.typeOf(m.Value),
			Text:     r.html(text),
		})
		rows = append(rows, r.rows(prefix+m.Key+".", m.Value.Properties, m.Value.Required)...)
	}
	return rows
}

// members returns the members of a schema, those that it takes from others included.
func (r *renderer) members(s schema) (all members[schema], required []string) {
	for _, part := range s.AllOf {
		found, err := r.api.Components.Schemas.get(part.Ref)
		r.note(err)
		more, names := r.members(found)
		all, required = append(all, more...), append(required, names...)
	}
	return append(all, s.Properties...), append(required, s.Required...)
}

// typeOf describes what a value may be.
func (r *renderer) typeOf(s schema) template.HTML {
	if len(s.AllOf) > 0 {
		s.Ref = s.AllOf[0].Ref
	}
	if s.Ref != "" {
		name := s.Ref[strings.LastIndexByte(s.Ref, '/')+1:]
		_, err := r.api.Components.Schemas.get(s.Ref)
		r.note(err)
		return template.HTML(fmt.Sprintf(`<a href="#%s">%[1]s</a>`, name))
	}
	var parts []string
	add := func(format string, args ...any) {
		parts = append(parts, template.HTMLEscapeString(fmt.Sprintf(format, args...)))
	}
	code := func(text string) string { return "<code>" + template.HTMLEscapeString(text) + "</code>" }
	switch {
	case s.Const != nil:
		return template.HTML(code(*s.Const))
	case s.Enum != nil:
		values := make([]string, len(s.Enum))
		for i, value := range s.Enum {
			values[i] = code(value)
		}
		return template.HTML(strings.Join(values, ", "))
	case s.Items != nil:
		parts = append(parts, "array of "+string(r.typeOf(*s.Items)))
	case len(s.Type) == 0:
		add("any JSON")
	default:
		add("%s", strings.Join(s.Type, " or "))
	}
	if s.Format != "" {
		add("%s", s.Format)
	}
	limits := func(low, high *string, unit string) {
		switch {
		case low != nil && *low == "1" && high == nil && unit != "":
			add("not empty")
		case low != nil && high != nil:
			add("%s to %s%s", *low, *high, unit)
		case low != nil:
			add("at least %s%s", *low, unit)
		case high != nil:
			add("at most %s%s", *high, unit)
		}
	}
	limits(s.Minimum, s.Maximum, "")
	limits(s.MinLength, s.MaxLength, " characters")
	limits(s.MinItems, s.MaxItems, " items")
	if s.Pattern != "" {
		parts = append(parts, code(s.Pattern))
	}
	if !s.Default.IsZero() {
		parts = append(parts, "default "+code(r.sample(&s.Default)))
	}
	return template.HTML(strings.Join(parts, ", "))
}
