package main

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// sqlState returns the code of the error that PostgreSQL answered with, or "".
func sqlState(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code
	}
	return ""
}
