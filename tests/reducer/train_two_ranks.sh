#!/usr/bin/env bash
# Trains two ranks of examples/cpp, and again, saving a state and going on from it. Fails unless the
# loss falls, digits are read, fewer bytes travel, and both ranks end with the same parameters.
#
# Usage: train_two_ranks.sh PROGRAM FOLDER
set -euo pipefail
program=$1
folder=$2
rm -rf "$folder"
mkdir -p "$folder"

# $1: name of the run; the rest: arguments of the program.
train() {
  local name=$1
  shift
  "$program" --rank 1 --world-size 2 --store "$folder/$name.store" "${@/RANK/1}" >"$folder/$name.1" &
  local other=$!
  "$program" --rank 0 --world-size 2 --store "$folder/$name.store" "${@/RANK/0}" >"$folder/$name.0"
  wait "$other"
  cat "$folder/$name.0" "$folder/$name.1"
}

# The word after each "parameters", once each.
parameters() { sed -n 's/.*parameters //p' "$folder/$1.0" "$folder/$1.1" | sort -u; }

fail() {
  echo "$1" >&2
  exit 1
}

train whole
[[ $(parameters whole | wc -l) == 1 ]] || fail "the ranks' parameters differ"
for rank in 0 1; do
  awk '/loss .* -> / {fell = $6 + 0 < $4 / 2; read = $8 > 75}
       /times less/ {sent = $5 > 6}
       END {exit !(fell && read && sent)}' "$folder/whole.$rank" ||
    fail "rank $rank: the loss has not fallen to half, or too few digits are read, or too many bytes were sent"
done

train first --steps 30 --save "$folder/stateRANK"
train second --steps 30 --load "$folder/stateRANK"
[[ $(parameters second | wc -l) == 1 ]] || fail "the ranks' parameters differ after a resume"

# A rank that is killed ends the other one, which says so.
"$program" --rank 1 --world-size 2 --store "$folder/killed.store" --steps 1000000 >"$folder/killed.1" &
other=$!
exec 3< <("$program" --rank 0 --world-size 2 --store "$folder/killed.store" --steps 1000000 \
  2>"$folder/killed.error" || echo "ended with an error")
while read -r -u 3 line && [[ $line != "step 25 "* ]]; do :; done
kill -9 "$other"
said=$(cat <&3)
[[ $said == *"ended with an error" ]] || fail "the other rank was killed, and rank 0 says $said"
grep -q "rank 1" "$folder/killed.error" || fail "rank 0 does not name the rank that was killed"

if "$program" --rank 2 --world-size 2 2>"$folder/error"; then fail "rank 2 of 2 was accepted"; fi
grep -q "rank must be less" "$folder/error" || fail "rank 2 of 2 was refused for another reason"

# $1: what it must say; the rest: arguments that do not fit what they are for.
refused() {
  local said=$1
  shift
  if timeout 60 "$program" "$@" 2>"$folder/error"; then fail "$* was accepted"; fi
  grep -q "$said" "$folder/error" || fail "$* was refused for another reason: $(cat "$folder/error")"
}
refused "70000 is no whole number from 0 to 65535" --world-size 2 --store 127.0.0.1:70000
"$program" --steps 1 --store "" >"$folder/alone" || fail "one rank needs a store"
refused "4294967298 is no whole number" --world-size 4294967298
refused "world_size=70000 is more than 65535" --world-size 70000 --store "$folder/large.store"
refused "there is no folder $folder/none" --save "$folder/none/state"
