#!/usr/bin/env bash
# Runs a command with its output in a log. Says nothing when it succeeds, except the lines of the log
# that match PATTERN, if there is one; shows the end of the log when it fails.
#
# Usage: tools/quiet.sh LOG [--show PATTERN] COMMAND...
set -uo pipefail
log=$1
shift
show=
if [[ $1 == --show ]]; then
  show=$2
  shift 2
fi
mkdir -p "$(dirname "$log")"
if "$@" >"$log" 2>&1; then
  if [[ -n $show ]]; then
    grep -E "$show" "$log"
  fi
else
  code=$?
  tail -n 60 "$log" >&2
  echo "Failed: $* (all of the output is in $log)" >&2
  exit $code
fi
