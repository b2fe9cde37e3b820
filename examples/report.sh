#!/bin/sh
# Adds up a CSV file of orders, all of them or those of one month.
#
#   curl localhost:8000/tasks -H 'Content-Type: application/json' \
#     -d '{"name": "report", "payload": {"month": "2026-03"}}'
#
# ORDERS_FILE in the server's environment names another file than the example's.
# Exit 65 fails the task at once.
set -eu

refuse() {
	echo "$1" >&2
	exit 65
}

payload=$(cat)
month=$(printf %s "$payload" | tr -d '\n' | sed -n 's/^.*"month" *: *"\([^"\\]*\)".*$/\1/p')
case $month in
[0-9][0-9][0-9][0-9]-[0-9][0-9]) ;;
*)
	case $payload in
	*'"month"'*) refuse 'payload: month: want a string like "2026-03"' ;;
	esac
	;;
esac
file=${ORDERS_FILE:-examples/data/orders.csv}
[ -f "$file" ] || refuse "$file: no such file"

awk -F, -v month="$month" '
	function bad(what) {
		print "line " NR ": " what | "cat 1>&2"
		failed = 1
		exit 65
	}
	NR == 1 {
		if ($0 != "date,region,product,quantity,unit_cents") bad("not the header of an orders file")
		next
	}
	NF != 5 || $1 !~ /^[0-9-]+$/ || $2 !~ /^[a-z]+$/ || $4 !~ /^[0-9]+$/ || $5 !~ /^[0-9]+$/ { bad("not an order") }
	month != "" && index($1, month "-") != 1 { next }
	{
		if (!($2 in cents)) regions[++n] = $2
		orders++
		total += $4 * $5
		count[$2]++
		cents[$2] += $4 * $5
	}
	END {
		if (failed) exit 65
		printf "{\"month\": \"%s\", \"orders\": %d, \"cents\": %.0f, \"regions\": {", (month == "" ? "all" : month), orders, total
		for (i = 1; i <= n; i++) {
			r = regions[i]
			printf "%s\"%s\": {\"orders\": %d, \"cents\": %.0f}", (i > 1 ? ", " : ""), r, count[r], cents[r]
		}
		print "}}"
	}' "$file"
