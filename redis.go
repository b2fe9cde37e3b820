package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// newRedisClient reads a URL the way go-redis does: master_name makes it a
// Sentinel URL, addr a Cluster URL. Contexts bound every command, the library
// repeats none: a repeated XADD is a second entry, a repeated XREADGROUP hides
// the entries of the first reply (both measured).
func newRedisClient(redisURL string, readTimeout time.Duration) (redis.UniversalClient, error) {
	quietRedis()
	u, err := url.Parse(redisURL)
	if err != nil {
		return nil, errors.New("parse REDIS_URL: not a URL; percent-encode special characters in the password")
	}
	switch {
	case u.Query().Has("master_name"):
		o, err := redis.ParseFailoverURL(redisURL)
		if err != nil {
			return nil, fmt.Errorf("parse REDIS_URL: %s", withoutPassword(err, u))
		}
		o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled = -1, 1, true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = commandLimit, readTimeout, commandLimit, commandLimit
		return redis.NewFailoverClient(o), nil
	case u.Query().Has("addr"):
		o, err := redis.ParseClusterURL(redisURL)
		if err != nil {
			return nil, fmt.Errorf("parse REDIS_URL: %s", withoutPassword(err, u))
		}
		o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled = -1, 1, true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = commandLimit, readTimeout, commandLimit, commandLimit
		return redis.NewClusterClient(o), nil
	default:
		o, err := redis.ParseURL(redisURL)
		if err != nil {
			return nil, fmt.Errorf("parse REDIS_URL: %s", withoutPassword(err, u))
		}
		o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled = -1, 1, true
		o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = commandLimit, readTimeout, commandLimit, commandLimit
		return redis.NewClient(o), nil
	}
}

// quietRedis keeps the library from writing to stderr: each failed dial would be a
// line beside our log, many a second while Redis is away. The errors reach us anyway.
var quietRedis = sync.OnceFunc(func() { redis.SetLogger(noLog{}) })

type noLog struct{}

func (noLog) Printf(context.Context, string, ...any) {}

// withoutPassword is err's text with the URL's password struck out.
func withoutPassword(err error, u *url.URL) string {
	text := err.Error()
	if password, ok := u.User.Password(); ok && password != "" {
		text = strings.ReplaceAll(text, password, "xxxxx")
		text = strings.ReplaceAll(text, url.QueryEscape(password), "xxxxx")
	}
	return text
}

// hasPrefix reports whether err is a Redis error of that kind: the server's error
// code is the first word of its text, and go-redis has no type for it.
func hasPrefix(err error, code string) bool {
	return err != nil && strings.HasPrefix(err.Error(), code)
}
