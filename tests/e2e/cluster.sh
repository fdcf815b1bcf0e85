#!/bin/bash
# A real Kubernetes of one node, or of NODES (3), made from source and Debian's packages, with this project's
# deploy/ on it. Node 1 has the control plane.
#
#   cluster.sh build                  make what is needed, in target/e2e/ (kept; what is there and fits is not made again)
#   cluster.sh up [OVERLAY]           start the node and install deploy/overlays/OVERLAY (host) on it
#   cluster.sh down                   take all of it away again; a run that is at work is ended
#   cluster.sh left                   what there is of a node, a line each: nothing unless one is up
#   cluster.sh run [CASE...]          all of that, and the cases in between; a node that is up already is used, and stays
#   cluster.sh overlays               the cases of the overlays loop and k0s, each on a node of its own
#   cluster.sh enter COMMAND...       run a command where the node is: in its mount, network, pid and ipc namespaces
#   cluster.sh daemon start|stop|kill NAME    one of the node's daemons: kubelet, containerd, kube-apiserver ...
#   cluster.sh reboot                 what a power cut leaves: no process, no mount; what is on disk stays. Then start again
#   cluster.sh on N VERB              enter, daemon or reboot on node N instead of node 1, and for the other nodes:
#     partition, heal                 pull its cable, and put it back
#     off, start                      cut its power; start it again
#     remove                          cut its power, if it has any, and delete its Node object
#     disk                            an empty disk for the pool of a node that is off
#
# Nothing of the host's is changed: see cluster/README.md for how, and for what this expects of the machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster/lib.sh"
source "$here/build.sh"
source "$here/updown.sh"
source "$here/run.sh"

[ "$(id -u)" = 0 ] || die "must be root: a node mounts, and has namespaces and cgroups of its own"
mkdir -p "$home"
# A signal to this script also ends what it started. A node of `up` stays; the node of a run does not (run.sh).
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
trap hurry EXIT
case ${1:-} in
  build)  lock; build ;;
  up)     lock; ! is_up || die "a node is up already ($(basename "$0") down takes it away)"
          build; up "${2:-host}" "${NODES:-1}"; invitation ;;
  down)   take_lock; down ;;
  left)   each_node left ;;
  run)    shift; lock; run "$@" ;;
  overlays) lock; overlays ;;
  on)     on "${@:2}" ;;
  enter|daemon|reboot) on 1 "$@" ;;
  *)      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
