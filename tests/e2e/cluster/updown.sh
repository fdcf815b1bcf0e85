# Sourced by cluster.sh. The life of the nodes as the host sees it: of each a process, and what it
# has in namespaces of its own.

# up OVERLAY [NODES]: starts nodes on empty disks, and installs the driver on them.
up() {
  local place number overlay=$1 count=${2:-1}
  # The node has its own /var/lib, /var/log and /run, so what is built must not lie beneath the
  # host's.
  for place in /var/lib /var/log /run /proc /sys; do
    [[ $home/ != "$place"/* ]] || die "$home is beneath $place, which the node has its own of: set E2E_HOME"
  done
  down
  has_disk
  for number in $(seq "$count"); do
    select_node "$number"
    mkdir -p "$node"
    [ "$overlay" = loop ] || make_pool
  done
  # For who installs the driver again.
  echo "$overlay" > "$first/overlay"
  each_node boot
  install_driver "$overlay"
}

# Kubelet evicts all pods when 1 % of the disk is left (daemons.sh).
has_disk() {
  local free size
  read -r free size < <(df --output=avail,size --block-size=1M "$home" | tail -n 1)
  [ "$free" -ge $((size / 100 + 4096)) ] \
    || die "$free MiB of $size are free at $home: nodes need 4 GiB and a hundredth of the disk"
}

# An empty pool. It has its own filesystem, as docs/install.md advises: the machine's may be so full
# already that the driver would evict all unused content, as it should.
make_pool() {
  rm -f "$node/pool.img"
  truncate --size 10G "$node/pool.img"
  mkfs.ext4 -q -m 0 "$node/pool.img"
}

# Starts a node on the disks that are there.
boot() {
  local unshare child deadline=$((SECONDS + 30))
  mkdir -p "$node/log"
  echo "$cgroup" > "$node/cgroup"
  make_cgroup
  # The daemons are killed with their pid namespace, which ends with its first process, which ends
  # with `unshare`. Not of the caller's session: a case that is ended while the node is booted again
  # must not take it along. It writes down who it is itself, before there is anything to clear up:
  # this may be killed at any moment.
  setsid bash -c 'echo $$ > "$0/unshare.pid" && exec "$@"' "$node" \
    unshare --mount --net --pid --ipc --fork --mount-proc --kill-child --propagation private \
    "$bin/pause" < /dev/null > "$node/log/init.log" 2>&1 9>&- &
  unshare=$!
  disown "$unshare"
  until child=$(pgrep -P "$unshare") && [ "$(readlink "/proc/$child/exe")" = "$(realpath "$bin/pause")" ]; do
    alive "$unshare" || die "no namespaces: $(cat "$node/log/init.log")"
    [ $SECONDS -lt $deadline ] || die "the node's first process does not start: $(cat "$node/log/init.log")"
    sleep 0.02
  done
  echo "$child" > "$node/init.pid"
  [ -z "${tied:-}" ] || watch_over "$child"
  [ "$node_number" = 1 ] || connect
  patient=patiently enter "$here/boot.sh"
  say "$node_name is ready"
  [ "$node_number" = 1 ] || return 0
  # Node 1 was off: the cables ended with its switch.
  each_node reconnect
  # The door stands on the host, so that kubectl works there.
  local address door
  read -r address door < <(setsid "$bin/door" "$child" "$node_address:6443" 2> "$node/log/door.log" 9>&-) || die "$(cat "$node/log/door.log")"
  echo "$door" > "$node/door.pid"
  sed "s#https://$node_address:6443#https://$address#" "$pki/admin.kubeconfig" > "$KUBECONFIG"
  say "the node is ready"
}

# in_network NUMBER COMMAND...: runs a command in a node's network, with the host's pids.
in_network() {
  local number=$1 init; shift
  init=$(cat "$home/node$([ "$number" = 1 ] || echo "-$number")/init.pid")
  nsenter --target "$init" --net -- "$@" 9>&-
}

# Lays the cable of a node to the switch, which is in node 1. It ends with either of them.
connect() {
  local number port=sw$node_number
  in_network 1 ip link delete "$port" 2> /dev/null || true
  in_network 1 ip link add "$port" type veth peer name uplink netns "$(pid_from init)"
  in_network 1 ip link set "$port" master e2e-node up
  in_network 1 ip route replace "$(pods_of "$node_number")" via "$node_address"
  in_network "$node_number" ip address add "$node_address/24" dev uplink
  in_network "$node_number" ip link set uplink up
  # As on node 1 (boot.sh).
  in_network "$node_number" ip route add "$services_range" dev uplink
  for number in $(numbers); do
    [ "$number" = "$node_number" ] || in_network "$node_number" ip route add "$(pods_of "$number")" via "$(address_of "$number")"
  done
}
reconnect() { [ "$node_number" = 1 ] || ! is_up || connect; }

# partition, heal: pulls the cable of a node, and puts it back.
partition() { switch_port down; }
heal() { switch_port up; }
switch_port() {
  [ "$node_number" != 1 ] || die "node 1 is the switch: cut the others off"
  in_network 1 ip link set "sw$node_number" "$1"
}

# A node that is gone for good: no power, and no Node object.
remove() {
  [ "$node_number" != 1 ] || die "node 1 has the control plane: remove the others"
  ! is_up || halt
  kubectl delete node "$node_name"
}

# on NUMBER VERB: the verbs of cluster.sh that are about one node.
on() {
  [ -d "$home/node-$1" ] || [ "$1" = 1 ] || die "there is no node $1"
  select_node "$1"
  case ${2:-} in
    start)  ! is_up || die "$node_name is up"; boot ;;
    disk)   ! is_up || die "$node_name is up: its disk is in use"; make_pool ;;
    remove) remove ;;
    *)
      must_be_up
      case ${2:-} in
        enter)          enter "${@:3}" ;;
        daemon)         enter "$here/daemons.sh" "${@:3}" ;;
        off)            halt ;;
        reboot)         halt; boot ;;
        partition|heal) "$2" ;;
        *)              die "unknown: on $*" ;;
      esac ;;
  esac
}

# A run that brings its own node ($tied) holds the lock as long as it lives, and does not leave the
# node behind however it ends: who waits for the lock gets it then, also when the run was ended with
# `kill -9`.
watch_over() {
  setsid flock "$home/lock" kill -KILL "$1" < /dev/null > /dev/null 2>&1 9>&- &
  echo $! > "$node/watch.pid"
  disown
}

# Takes away whatever there is of a node, and looks whether it is gone. Can be repeated, and knows
# nothing but where things are: it also clears up after a run that was killed.
down() {
  local found other deadline=$((SECONDS + 30))
  # Those of interrupted.sh and of the overlays (run.sh), should they have been ended themselves.
  for other in interrupted overlays; do
    [ ! -d "$home/$other" ] || E2E_HOME=$home/$other "$here/../cluster.sh" down
  done
  each_node halt
  each_node remove_cgroup
  # Things that end a little later than the node: a loop device, a kubectl whose server is gone.
  until found=$(each_node left) && [ -z "$found" ]; do
    [ $SECONDS -lt $deadline ] || die "this is left of the node: $found"
    sleep 0.05
  done
  # No mount of the node's is seen here, since its namespace was private. Should there be one all
  # the same, it is not walked into.
  each_node remove_directory
}
remove_directory() { rm -rf --one-file-system "$node"; }

# Everything of a node beside its directory and its cgroups, one per line.
left() {
  local inside pid file programs
  for file in init unshare door watch; do
    ! pid=$(pid_from "$file") || echo "$file is process $pid"
  done
  # The processes in its mount namespace: there /var/lib is a directory of the node's, whose name
  # stands as it is on its filesystem.
  inside=${node#"$(stat -c %m "$home")"} inside=/${inside#/}
  # In its cgroups; and on the host what was built for it and speaks to it.
  programs=$(realpath "$bin" 2> /dev/null) || true
  {
    grep -ls -- " $inside/var/lib" /proc/[0-9]*/mountinfo || true
    grep -ls -- "/$cgroup" /proc/[0-9]*/cgroup || true
    for file in $(grep -ls -- "KUBECONFIG=$node/" /proc/[0-9]*/environ); do
      [[ $(readlink "${file%/*}/exe") != "$programs"/* ]] || echo "$file"
    done
  } | cut -d / -f 3 | sort -un | while read -r pid; do
    ! alive "$pid" || echo "process $pid: $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c 1-100)"
  done
  # Its own pool's, and that of overlays/loop.
  for file in "$node/pool.img" "$node/var/lib/baggageclaim.img"; do
    [ ! -e "$file" ] || losetup --associated "$file"
  done
  grep -F -- " $node" /proc/self/mountinfo || true
}

# A simulated power cut.
halt() {
  local name pid init=
  # The first process takes the others with it. Its parent, and the door's, wait for a child on the
  # host's side. They stop themselves when another process stops that child, and then would never
  # see it end. So this does not rely on them.
  for name in watch init unshare door; do
    pid=$(pid_from "$name") || continue
    [ "$name" != init ] || init=$pid
    kill -KILL "$pid" 2> /dev/null || true
  done
  [ -z "$init" ] || wait_for "end of the node's processes" 60 not_alive "$init"
  rm -f "$node"/*.pid "$node/kubeconfig"
}
not_alive() { ! alive "$1"; }

# The node's cgroups: in each hierarchy of version 1, or in the one of version 2.
hierarchies() {
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else ls -d /sys/fs/cgroup/*/; fi
}

make_cgroup() {
  local hierarchy controller
  for hierarchy in $(hierarchies); do
    hierarchy=${hierarchy%/}
    [ ! -L "$hierarchy" ] || continue # `cpu` is a link to `cpu,cpuacct` on some machines
    mkdir -p "$hierarchy/$cgroup"
    if [ -e "$hierarchy/$cgroup/cpuset.mems" ] && [ -e "$hierarchy/cpuset.cpus" ]; then
      # Version 1 makes them empty, and nothing can be started in an empty one.
      cat "$hierarchy/cpuset.cpus" > "$hierarchy/$cgroup/cpuset.cpus"
      cat "$hierarchy/cpuset.mems" > "$hierarchy/$cgroup/cpuset.mems"
    fi
    if [ -e "$hierarchy/cgroup.controllers" ]; then
      for controller in $(cat "$hierarchy/$cgroup/cgroup.controllers"); do
        echo "+$controller" > "$hierarchy/$cgroup/cgroup.subtree_control" || true
      done
    fi
  done
}

remove_cgroup() {
  local hierarchy
  for hierarchy in $(hierarchies); do
    hierarchy=${hierarchy%/}
    [ -d "$hierarchy/$cgroup" ] || continue
    # A cgroup can be removed when its last process is gone, zombies included, and its parent may be
    # slow to reap them.
    wait_for "end of the cgroup $hierarchy/$cgroup" 30 remove_directories "$hierarchy/$cgroup"
  done
}
remove_directories() { find "$1" -depth -type d -exec rmdir {} +; }

# As an operator would: docs/install.md.
install_driver() {
  local overlay=$repository/deploy/overlays/$1 workload workloads=(daemonset/baggageclaim-node)
  # The overlay of the node plugin alone has no controller.
  [ "$1" = node ] || workloads+=(deployment/baggageclaim-controller)
  [ -e "$overlay/kustomization.yaml" ] || die "there is no overlay $1 in deploy/overlays"
  if ! is_alone; then
    overlay=$first/overlay-of-several
    write_overlay "$1"
  fi
  kubectl apply -k "$overlay" > "$first/log/install.log" 2>&1 || { cat "$first/log/install.log" >&2; die "deploy/ does not apply"; }
  for workload in "${workloads[@]}"; do
    patiently kubectl --namespace baggageclaim rollout status "$workload" --timeout 90s >> "$first/log/install.log" 2>&1 && continue
    kubectl --namespace baggageclaim describe pods >&2 || true
    kubectl --namespace baggageclaim logs "$workload" --all-containers --tail 50 >&2 || true
    die "$workload does not become ready"
  done
  say "the driver is installed"
}

# The controller is on node 1, which no case turns off.
write_overlay() {
  local deploy
  mkdir -p "$first/overlay-of-several"
  deploy=$(realpath --relative-to "$first/overlay-of-several" "$repository/deploy")
  cat > "$first/overlay-of-several/kustomization.yaml" <<E
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [$deploy/overlays/$1]
patches:
- target: {kind: Deployment, name: baggageclaim-controller}
  patch: |
    - {op: add, path: /spec/template/spec/nodeSelector/kubernetes.io~1hostname, value: node-1}
    # Short, so that a case can wait for it.
    - {op: add, path: /spec/template/spec/containers/0/args/-, value: --node-grace=15s}
E
}

invitation() {
  cat <<E
Kubernetes is up, with the driver on it. To look around:

  export KUBECONFIG=$KUBECONFIG KUBECACHEDIR=$KUBECACHEDIR PATH=$bin:\$PATH
  kubectl get nodes,pods -A

make e2e-down takes all of it away.
E
}
