package main

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// What batches send arrives as it was, NULLs and empty elements told apart, in every mode.
func TestSliceCodec(t *testing.T) {
	t.Parallel()
	dsn := newDatabase(t)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		p := openTestPools(t, dsn+"&default_query_exec_mode="+mode, testLease)
		var same bool
		query := "SELECT $1::text[] = ARRAY['', 'a\"b{,}\\', 'null', 'ü'] AND $2::int[] = ARRAY[0, -1, 2147483647] AND $3::bigint[] = ARRAY[0, -1, 9223372036854775807]"
		texts := []string{"", `a"b{,}\`, "null", "ü"}
		if err := p.submit.QueryRow(t.Context(), query, texts, []int32{0, -1, math.MaxInt32}, []int64{0, -1, math.MaxInt64}).Scan(&same); err != nil || !same {
			t.Errorf("%s: texts and numbers arrive as sent: %v, %v", mode, same, err)
		}
		for _, test := range []struct {
			name   string
			ids    []uuid.UUID
			hashes [][]byte
			want   [4]any
		}{
			{"nil", nil, nil, [4]any{nil, nil, nil, nil}},
			{"empty", []uuid.UUID{}, [][]byte{}, [4]any{"{}", "{}", int64(0), int64(0)}},
			{"one", []uuid.UUID{{15: 1}}, [][]byte{{0xab}}, [4]any{"{00000000-0000-0000-0000-000000000001}", `{"\\xab"}`, int64(1), int64(1)}},
			{
				"NULLs and empty ones", []uuid.UUID{{0: 255}, {}}, [][]byte{nil, {}, {0, 1}},
				[4]any{"{ff000000-0000-0000-0000-000000000000,00000000-0000-0000-0000-000000000000}", `{NULL,"\\x","\\x0001"}`, int64(2), int64(3)},
			},
		} {
			var got [4]any
			rows, err := p.submit.Query(t.Context(), "SELECT $1::uuid[]::text, $2::bytea[]::text, cardinality($1::uuid[])::bigint, cardinality($2::bytea[])::bigint", test.ids, test.hashes)
			if err != nil {
				t.Fatal(err)
			}
			list, err := pgx.CollectExactlyOneRow(rows, func(r pgx.CollectableRow) ([]any, error) { return r.Values() })
			if err != nil {
				t.Fatalf("%s, %s: %v", mode, test.name, err)
			}
			copy(got[:], list)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", mode, test.name, diff)
			}
		}
	}
}
