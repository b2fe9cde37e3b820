package main

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

func webURL(p *string) func(string) error {
	return func(value string) error {
		u, err := url.Parse(value)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return errors.New("want an http:// or https:// URL")
		}
		*p = value
		return nil
	}
}

// errEscape is for URLs that parse to something else than was meant, or not at
// all, because a character of the password means something in a URL.
var errEscape = errors.New("not a valid URL: percent-encode the special characters of user and password, such as @ as %40, # as %23, / as %2F and ? as %3F")

func postgres(p *string) func(string) error {
	return func(value string) error {
		if err := checkDatabaseURL(value); err != nil {
			return err
		}
		*p = value
		return nil
	}
}

// checkDatabaseURL tells whether pgx can read a URL or DSN, and refuses URLs that it
// reads wrongly: in postgres://u:p@ss#w@host/db the host is "ss#w@host", which
// would show only as a name that cannot be found. Nothing of dsn is in the error.
func checkDatabaseURL(dsn string) error {
	scheme, rest, isURL := strings.Cut(dsn, "://")
	if isURL && !strings.Contains(scheme, "=") {
		if scheme != "postgres" && scheme != "postgresql" {
			return errors.New("want a URL that begins with postgres:// or postgresql://")
		}
		if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
			rest = rest[i+1:]
		}
		server, _, _ := strings.Cut(rest, "?")
		if strings.ContainsAny(server, "@ ") || strings.Contains(dsn, "#") {
			return errEscape
		}
	}
	_, err := pgxpool.ParseConfig(dsn)
	if err == nil {
		return nil
	}
	// pgx masks passwords in its text as well as it can; only its verdict is kept.
	reason := "cannot be read"
	if e, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
		full := e.Error()
		if inner := e.Unwrap(); inner != nil {
			full = strings.TrimSuffix(full, " ("+inner.Error()+")")
		}
		reason = full[strings.LastIndex(full, "`: ")+len("`: "):]
	}
	return fmt.Errorf("%s: want postgres://user:password@host:5432/database?option=value or \"host=... user=... dbname=...\", special characters of the password percent-encoded in the URL", reason)
}

// redisURL checks what go-redis would refuse in words that show the password, and
// what it would read wrongly. The options after the question mark are left to it.
func redisURL(p *string) func(string) error {
	return func(value string) error {
		u, err := url.Parse(value)
		switch {
		case err != nil, strings.Contains(value, "#"):
			return errEscape
		case u.Scheme == "unix" && strings.TrimSpace(u.Path) == "":
			return errors.New("want the path of a socket after unix://")
		case u.Scheme != "unix" && u.Scheme != "redis" && u.Scheme != "rediss":
			return errors.New("want a URL that begins with redis://, rediss:// or unix://")
		}
		for name := range strings.SplitSeq(u.RawQuery, "&") {
			if name, _, _ = strings.Cut(name, "="); strings.Contains(name, "@") {
				return errEscape
			}
		}
		if u.Scheme != "unix" {
			if strings.Contains(u.Path, "@") {
				return errEscape
			}
			if database := strings.Trim(u.Path, "/"); database != "" {
				if _, err := digits(database, 0, 1<<20); err != nil {
					return errors.New("want a database number or nothing as the path, such as redis://host:6379/0")
				}
			}
			if port := u.Port(); port != "" {
				if _, err := digits(port, 1, 65535); err != nil {
					return errors.New("want a port from 1 to 65535")
				}
			}
		}
		*p = value
		return nil
	}
}
