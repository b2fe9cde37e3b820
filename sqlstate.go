package main

import (
	"context"
	"errors"
	"io"
	"net"

	"github.com/jackc/pgx/v5/pgconn"
)

// The SQLSTATEs that are told apart by name.
const (
	readOnly    = "25006" // a standby, or made read-only by its operator
	stalePlan   = "0A000" // a column changed its type under a prepared statement
	tookTooLong = "57014" // statement_timeout, unless a person cancelled the statement
)

// errReadOnly is what PostgreSQL says of a write to a read-only database.
var errReadOnly = &pgconn.PgError{Severity: "ERROR", Code: readOnly, Message: "the database is read-only"}

// sqlState returns the SQLSTATE of an error that PostgreSQL reported, else "".
func sqlState(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// badData reports whether a statement was refused for its values (classes 22 data, 23
// constraint, 54 limit): repeated with the same values it fails for ever.
func badData(err error) bool {
	switch class(sqlState(err)) {
	case "22", "23", "54":
		return true
	}
	return false
}

// storeAway reports whether PostgreSQL cannot serve now and the same statement may
// succeed later. Whether it took effect is unknown when the connection broke. An end of
// the caller's own context is no fault of the store, unless it is a deadline.
func storeAway(err error) bool {
	if err == nil || errors.Is(err, context.Canceled) {
		return false
	}
	switch state := sqlState(err); state {
	case "":
	case readOnly, stalePlan,
		"25P03",          // idle in transaction too long: the process was stopped
		"3D000",          // database missing, as while it is restored
		"40001", "40P01", // serialization, deadlock
		"55P03": // lock_timeout
		return true
	default:
		switch class(state) {
		case "08", // connection
			"28", // password
			"53", // disk, memory, connections used up
			"57", // shut down, starting up, statement_timeout
			"58": // I/O
			return true
		}
		return false
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	for _, target := range []error{context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, pgconn.ErrConnClosed} {
		if errors.Is(err, target) {
			return true
		}
	}
	return pgconn.SafeToRetry(err) || pgconn.Timeout(err)
}

// class returns the first two characters of a SQLSTATE.
func class(state string) string {
	return state[:min(2, len(state))]
}
