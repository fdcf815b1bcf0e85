#!/bin/bash
# `make e2e` removes everything, even when it is interrupted. This tries it on runs with their own
# home, below that of the real run, which comes next. They share its build. Called by run.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

other=$home/interrupted
cluster=$here/../cluster.sh

# Ended itself, it does not leave that run to itself.
trap 'exit 143' INT TERM HUP
there() { E2E_HOME=$other "$cluster" "$@"; }

# cut_short HOW MOMENT SEEN [NAME=VALUE...]: runs `make e2e` until its output says MOMENT and then
# SEEN succeeds, and ends it: INT to all of it, as a terminal does; TERM to make alone; KILL to make
# alone, or to make and its shell.
cut_short() {
  local how=$1 moment=$2 seen=$3 group ended=0 line=; shift 3
  rm -f "$other/output" && mkfifo "$other/output"
  # A session of its own, so a group of its own; and it hears what a run in a terminal hears: a
  # shell has ignore SIGINT whatever it starts in the background.
  env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS -u start_time -u tied setsid env --default-signal=INT \
    make --no-print-directory --directory="$repository" e2e E2E_HOME="$other" "$@" < /dev/null > "$other/output" 2>&1 &
  group=$!
  trap 'kill -KILL -- "-$group" 2> /dev/null || true; there down' EXIT
  exec 8< "$other/output"
  : > "$other/log"
  until [[ $line = *"$moment"* ]]; do
    read -r -t 300 -u 8 line || failed "the run does not come to \"$moment\""
    printf '%s\n' "$line" >> "$other/log"
  done
  wait_for "moment to end the run at" 120 "$seen"
  # A check for leftovers would see it.
  [ "$(rest | wc -l)" -gt 5 ] || failed "there should be more to see: $(rest)"
  case $how in
    INT | KILL-ALL) kill "-${how%-*}" -- "-$group" ;;
    *)              kill "-$how" "$group" ;;
  esac
  # Something of the run exists as long as a process has it open.
  cat <&8 >> "$other/log" &
  local reader=$!
  exec 8<&-
  # Without what the shell has to say of a death.
  wait "$group" 2> /dev/null || ended=$?
  [ $ended != 0 ] || failed "make e2e succeeds though SIG$how came"
  # A killed run cannot clean up. But its processes end, and the next run can.
  case $how in
    KILL-ALL) wait_for "end of a node whose run was killed" 60 ended ;;&
    KILL*)    there down ;;
  esac
  local found; found=$(rest)
  [ -z "$found" ] || failed "SIG$how has left: $found"
  wait_for "end of the run's output: something of it is left" 10 not_alive "$reader"
  trap - EXIT
  say "ended by SIG$how at \"$moment\": nothing is left"
}
ended() { [ -z "$(there left)" ]; }
not_alive() { ! alive "$1"; }

failed() {
  cat "$other/log" >&2
  die "$*"
}

# The remains of that run.
rest() {
  local place
  there left
  for place in "$other/node" "$other"/image.* /sys/fs/cgroup/{,*/}"$(cgroup_of "$other")"; do
    [ ! -e "$place" ] || echo "$place"
  done
}

# Pods are being started, and have volumes.
crowded() {
  [ "$(grep -c kubernetes.io~csi "/proc/$(cat "$other/node/init.pid")/mountinfo")" -ge 20 ]
}

share_build "$other"
cut_short INT "the API server is ready" true CASE=100
cut_short KILL "the API server is ready" true CASE=100
cut_short KILL-ALL "the node is ready" true CASE=100
cut_short TERM "1 cases" crowded CASE=100
rm -rf "$other"
