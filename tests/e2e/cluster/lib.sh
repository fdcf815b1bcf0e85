# Sourced by the others: what things are called and where they are.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../../.." && pwd)

# The build is kept here between runs; a node's disks go with the node.
home=${E2E_HOME:-$repository/target/e2e}
bin=$home/bin
images=$home/images

# What belongs to the cluster is in the directory of node 1, which has the control plane.
first=$home/node
pki=$first/pki

# In the nodes' own network namespaces, so they cannot collide with anything.
address_of() { echo "10.99.0.$1"; }
pods_of() { echo "10.244.$1.0/24"; }
pods_range=10.244.0.0/16
services_range=10.96.0.0/16
api_service=10.96.0.1

# Cgroups are the one thing that has no namespace here. All of a node's are below one of these.
cgroup_of() { echo "baggageclaim-e2e-$(printf %s "$1" | sha256sum | cut -c 1-8)"; }

# select_node NUMBER: the node that the names below, and most functions, are about.
select_node() {
  export node_number=$1
  node=$home/node
  cgroup=$(cgroup_of "$home")
  if [ "$1" != 1 ]; then
    node=$home/node-$1
    cgroup=$(cgroup_of "$node")
  fi
  node_name=node-$1
  node_address=$(address_of "$1")
}
# Scripts inside a node inherit its number.
select_node "${node_number:-1}"

# The numbers of the nodes that have a directory, and so may have more. Node 1 is one of them also
# when it has none.
numbers() {
  local directory
  echo 1
  for directory in "$home"/node-*/; do
    [ ! -d "$directory" ] || basename "${directory#"$home/node-"}"
  done
}

is_alone() { [ "$(numbers)" = 1 ]; }

# each_node COMMAND...: the command for each of them, on the host.
each_node() {
  local number
  for number in $(numbers); do
    select_node "$number"
    "$@"
  done
  select_node 1
}

# Kubelet's directory: where the overlay that is to be installed expects it. Not MicroK8s': the node
# has no /var/snap of its own.
kubelet_directory() {
  case $(cat "$first/overlay") in
    k0s) echo /var/lib/k0s/kubelet ;;
    *)   echo /var/lib/kubelet ;;
  esac
}

export PATH=$bin:/usr/sbin:/sbin:$PATH
export KUBECONFIG=$first/kubeconfig
# Kubectl's cache of a server, in a directory for each server. This one is new each time.
export KUBECACHEDIR=$first/kubectl

say() { printf '%7.1fs  %s\n' "$(since)" "$*" >&2; }
die() { printf 'e2e: %s\n' "$*" >&2; exit 1; }

# Seconds since the script was started, with a fraction.
export start_time=${start_time:-${EPOCHREALTIME/,/.}}
since() { awk -v from="$start_time" -v to="${EPOCHREALTIME/,/.}" 'BEGIN { print to - from }'; }

# wait_for WHAT SECONDS COMMAND...: repeats the command until it succeeds. Only for states without
# an event.
wait_for() {
  local what=$1 deadline=$((SECONDS + $2)); shift 2
  until "$@" > /dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || die "no $what"
    sleep 0.05
  done
}

# share_build HOME: another run's home that has this build.
share_build() {
  mkdir -p "$1"
  ln -sfn "$bin" "$1/bin"
  ln -sfn "$images" "$1/images"
}

# One run at a time in one checkout; two checkouts do not meet. The lock goes with this process; its
# children do not inherit it: `9>&-`. The file holds the pid of the owner.
lock() {
  exec 9>> "$home/lock"
  flock --nonblock 9 || die "another run is at work in $home; wait for it, or set E2E_HOME to a directory of your own"
  echo $$ > "$home/lock"
}

# The same for who comes to take all away: a run that is at work is told to end, and does that
# itself.
take_lock() {
  exec 9>> "$home/lock"
  if ! flock --nonblock 9; then
    local owner; owner=$(cat "$home/lock")
    say "a run is at work (process $owner): it is told to end"
    # Only our own process: the number may be in use again if it has just ended.
    ! grep -qs cluster.sh "/proc/$owner/cmdline" || kill -TERM "$owner" 2> /dev/null || true
    flock --timeout 120 9 || die "the run does not end: process $owner"
  fi
  echo $$ > "$home/lock"
}

# Runs a program that may take long. A shell hears signals only when it waits, so this waits; and
# since the program with all that it starts is a group of its own, it is ended as one when this is
# (cluster.sh).
patiently() {
  local code=0
  setsid "$@" 9>&- &
  slow=$!
  wait "$slow" || code=$?
  slow=
  return $code
}

# Ends what runs patiently, and what runs beside (run.sh), and returns when all of it is gone.
hurry() {
  local group
  for group in ${slow:-} ${beside[@]:-}; do
    end_group "$group"
  done
}
end_group() {
  kill -TERM -- "-$1" 2> /dev/null || return 0
  for _ in {1..200}; do
    kill -0 -- "-$1" 2> /dev/null || return 0
    sleep 0.05
  done
  kill -KILL -- "-$1" 2> /dev/null || true
}

# Whether a process of ours exists. A zombie that is not reaped yet does not count.
alive() {
  local stat
  stat=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  stat=${stat##*) }
  [ "${stat%% *}" != Z ]
}

# pid_from NAME: the pid of one of a node's processes as the host sees it: `init`, which its
# namespaces live and die with, `unshare`, which made them, `door`, and `watch` (updown.sh). Another
# process may have the pid by now, so it counts only if it runs the right program.
pid_from() {
  local pid program
  pid=$(cat "$node/$1.pid" 2> /dev/null) || return 1
  case $1 in
    init)    program=$bin/pause ;;
    unshare) program=$(command -v unshare) ;;
    door)    program=$(command -v nsenter) ;;
    watch)   program=$(command -v flock) ;;
  esac
  [ "$(readlink "/proc/$pid/exe")" = "$(realpath "$program")" ] && alive "$pid" && echo "$pid"
}

is_up() { pid_from init > /dev/null; }
must_be_up() { is_up || die "$node_name is not up: cluster.sh up"; }

# Runs a command in the node's namespaces.
enter() {
  ${patient:-} nsenter --target "$(pid_from init)" --mount --net --pid --ipc --wd="$PWD" -- "$@" 9>&-
}
