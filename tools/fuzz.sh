#!/usr/bin/env bash
# Runs every fuzz target of a build with libFuzzer, beginning with the committed corpus and what
# earlier runs have found. Says of each how many inputs it ran; of one that fails, the end of its log
# and the input that did it.
#
# Usage: tools/fuzz.sh BUILD SECONDS JOBS
set -euo pipefail
build=$1
seconds=$2
jobs=$3

run() {  # run TARGET
  local name=$1 log=$build/$1.log corpus=$build/corpus/$1
  local seeds=$build/seeds/$1
  mkdir -p "$corpus" "$build/found" "$seeds"
  tar -xf "tests/fuzz/corpus/$name.tar" -C "$seeds"
  if "$build/tests/fuzz/${name}_fuzz" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 \
    -print_final_stats=1 -artifact_prefix="$build/found/$name-" "$corpus" \
    "$seeds" >"$log" 2>&1; then
    echo "$name: $(awk '/number_of_executed_units/ {print $2}' "$log") inputs, coverage" \
      "$(grep -o 'cov: [0-9]*' "$log" | tail -n 1 | cut -d ' ' -f 2)"
  else
    tail -n 40 "$log"
    echo "$name failed; the input is in $build/found. Again: $build/tests/fuzz/${name}_fuzz FILE"
    return 1
  fi
}
export -f run
export build seconds
basename -s _fuzz.cpp tests/fuzz/*_fuzz.cpp | xargs -P "$jobs" -I{} bash -euo pipefail -c 'run {}'
