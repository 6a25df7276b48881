#!/usr/bin/env bash
# Runs a command with its output in a log. Says nothing when it succeeds, except the lines of the log
# that match PATTERN, if there is one; shows the end of the log when it fails. With a TITLE it says
# what begins, every 20 seconds how far it is (the last line of the log), and how long it took.
#
# Usage: tools/quiet.sh LOG [--show PATTERN] [--title TITLE] COMMAND...
set -uo pipefail
log=$1
shift
show=
title=
while [[ $1 == --* ]]; do
  case $1 in
    --show) show=$2 ;;
    --title) title=$2 ;;
    *)
      echo "$0: unknown option $1" >&2
      exit 2
      ;;
  esac
  shift 2
done

say_how_far() {
  # Nobody waits for this sleep, so it must not hold the output open.
  while sleep 20 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    echo "  ${title%% (*}: $SECONDS s: $(tail -n 1 "$log" | sed 's/^ *//' | cut -c 1-90)"
  done
}

mkdir -p "$(dirname "$log")"
: >"$log"
if [[ -n $title ]]; then
  echo "$title"
  say_how_far &
  trap "kill $! 2>/dev/null" EXIT
fi
if "$@" >"$log" 2>&1; then
  if [[ -n $show ]]; then
    grep -E "$show" "$log" || {
      echo "$log has no line that matches '$show'" >&2
      exit 1
    }
  fi
  if [[ -n $title ]]; then
    echo "${title%% (*}: done in $SECONDS s"
  fi
else
  code=$?
  tail -n 60 "$log" >&2
  echo "Failed: $* (all of the output is in $log)" >&2
  exit $code
fi
