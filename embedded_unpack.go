//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/ulikunitz/xz"
)

const (
	maxUnpacked = 1 << 30 // bytes; a PostgreSQL is about 60 MB
	maxEntries  = 50_000
)

// unpackJar unpacks the tree in the artefact jar, a zip with one .txz inside, to
// the new folder dir.
func unpackJar(jar, dir string) error {
	z, err := zip.OpenReader(jar)
	if err != nil {
		return err
	}
	defer z.Close()
	for _, entry := range z.File {
		if !strings.HasSuffix(entry.Name, ".txz") {
			continue
		}
		r, err := entry.Open()
		if err != nil {
			return err
		}
		defer r.Close()
		x, err := xz.NewReader(bufio.NewReader(r))
		if err != nil {
			return fmt.Errorf("%s: %w", entry.Name, err)
		}
		if err := unpackTar(x, dir); err != nil {
			return fmt.Errorf("%s: %w", entry.Name, err)
		}
		return nil
	}
	return errors.New("no .txz inside")
}

// unpackTar unpacks r to the new folder dir, readable by everybody because the
// server user of root need not be its owner. Nothing is written outside dir,
// os.Root sees to that, and nothing in it leads there.
func unpackTar(r io.Reader, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Chmod(".", 0o755); err != nil {
		return err
	}
	limited := &io.LimitedReader{R: r, N: maxUnpacked}
	t := tar.NewReader(limited)
	var links []string
	for range maxEntries {
		header, err := t.Next()
		if err == io.EOF {
			return checkLinks(root, links)
		}
		if err == nil && header.Typeflag == tar.TypeSymlink {
			links = append(links, path.Clean(header.Name))
		}
		if err == nil {
			err = unpackEntry(root, header, t)
		}
		if limited.N <= 0 {
			return fmt.Errorf("more than %d bytes", maxUnpacked)
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("more than %d files", maxEntries)
}

// checkLinks follows every link, which os.Root refuses when one leads out, also by
// way of others. That is known only when all are there.
func checkLinks(root *os.Root, links []string) error {
	for _, name := range links {
		if _, err := root.Stat(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// unpackEntry makes one file, folder or link below root.
func unpackEntry(root *os.Root, header *tar.Header, content io.Reader) error {
	name := path.Clean(header.Name)
	if !filepath.IsLocal(name) {
		return fmt.Errorf("%q leads out of the folder", header.Name)
	}
	if err := makeFolder(root, path.Dir(name)); err != nil {
		return err
	}
	switch header.Typeflag {
	case tar.TypeDir:
		return makeFolder(root, name)
	case tar.TypeReg:
		mode := os.FileMode(0o644)
		if header.Mode&0o100 != 0 {
			mode = 0o755
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, content)
		return errors.Join(err, f.Chmod(mode), f.Close()) // the umask may be stricter
	case tar.TypeSymlink:
		return root.Symlink(header.Linkname, name)
	case tar.TypeLink:
		return root.Link(path.Clean(header.Linkname), name)
	default:
		return fmt.Errorf("%q is neither a file, a folder nor a link", header.Name)
	}
}

// makeFolder makes the folder name and those above it, open to everybody whatever the umask.
func makeFolder(root *os.Root, name string) error {
	if name == "." {
		return nil
	}
	err := root.Mkdir(name, 0o755)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if errors.Is(err, os.ErrNotExist) {
		if err := makeFolder(root, path.Dir(name)); err != nil {
			return err
		}
		err = root.Mkdir(name, 0o755)
	}
	if err != nil {
		return err
	}
	return root.Chmod(name, 0o755)
}
