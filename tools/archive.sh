#!/usr/bin/env bash
# Puts files into an archive of tests, in place of those with the same names. Equal files make equal
# archives.
#
# Usage: tools/archive.sh ARCHIVE FILE...
set -euo pipefail
export LC_ALL=C
archive=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -e $archive ]]; then tar -xf "$archive" -C "$folder"; fi
cp "${@:2}" "$folder"
cd "$folder"
tar --format=ustar --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=644 \
  -cf "$archive" -- *
