#!/bin/sh
# Probes a media file: its format and streams where ffprobe is installed, else its
# size and SHA-256.
#
#   curl localhost:8000/tasks -H 'Content-Type: application/json' \
#     -d '{"name": "process_video", "payload": {"path": "tone.wav"}}'
#
# path is looked up below MEDIA_DIR, which is examples/media unless the server's
# environment says otherwise. Exit 65 fails the task at once: such a payload does
# not get better with time.
set -eu

refuse() {
	echo "$1" >&2
	exit 65
}

# Only a name without quotes and backslashes is taken out of the JSON, so that it can
# be put into JSON again as it is.
path=$(tr -d '\n' | sed -n 's/^.*"path" *: *"\([^"\\]*\)".*$/\1/p')
case $path in
'') refuse 'payload: want {"path": "<file>"}, the name without quotes and backslashes' ;;
/* | .. | ../* | */.. | */../*) refuse 'payload: path leads out of the media folder' ;;
esac
file=${MEDIA_DIR:-examples/media}/$path
[ -f "$file" ] || refuse "$path: no such file"

if command -v ffprobe >/dev/null 2>&1; then
	# A playlist could name other files and hosts: only this file is opened.
	ffprobe -v error -protocol_whitelist file -of json \
		-show_entries format=format_name,duration,size,bit_rate:stream=codec_type,codec_name,width,height,sample_rate \
		"file:$file" || refuse "$path: not a media file"
	exit
fi

size=$(wc -c <"$file")
if command -v sha256sum >/dev/null 2>&1; then
	sum=$(sha256sum <"$file")
else
	sum=$(shasum -a 256 <"$file")
fi
printf '{"path": "%s", "bytes": %d, "sha256": "%s"}\n' "$path" "$size" "${sum%% *}"
