# Sourced by cluster.sh. The whole of it: nodes, the cases, and nothing left.

run() {
  if is_up; then
    [ "${NODES:=$(numbers | wc -l)}" = "$(numbers | wc -l)" ] || die "another number of nodes is up: cluster.sh down"
    build
    reinstall
    play "$@"
    return
  fi
  # Also for a case that boots the node again.
  export tied=yes
  trap finish EXIT
  build
  if [ "${NODES:-1}" != 1 ]; then
    # The cases that need several nodes, and no others.
    up host "$NODES"
    play "$@"
    return
  fi
  if [ $# = 0 ]; then
    control_plane
    patiently "$here/interrupted.sh"
    # The overlay for trying out, as far as it differs: that a pod gets a volume; that the pool,
    # which a container mounts, is there for the next driver, and after the node was off; and how it
    # is taken away.
    up loop
    play scratch upgraded 'switched off' uninstalled
    down
    # A kubelet whose directory is elsewhere, and the overlay for that: the same of it.
    up k0s
    play scratch 'three parts' 'kubelet is restarted' uninstalled
    down
  fi
  up host
  play "$@"
  [ $# != 0 ] || control_plane_ended
}

# Claims in a cluster, without kubelets. Its tests wait most of the time, as the cases do, so they
# run beside them. A program with this KUBECONFIG would count as left over of the nodes.
control_plane() {
  patiently env -C "$repository" cargo test --quiet --locked --no-run --test control_plane --test e2e
  setsid env -u KUBECONFIG -u KUBECACHEDIR -C "$repository" E2E_BIN="$bin" unshare --mount --propagation private \
    cargo test --quiet --locked --test control_plane > "$home/control-plane.log" 2>&1 9>&- &
  beside=$!
  say "the control plane without kubelets runs beside: ${home#"$repository"/}/control-plane.log"
}

control_plane_ended() {
  local code=0
  wait "$beside" || code=$?
  beside=
  cat "$home/control-plane.log"
  return $code
}

# Plays the cases. No backtraces: a case that fails says what it waited for, and what Kubernetes and
# the driver said.
play() {
  patiently env -C "$repository" RUST_BACKTRACE=0 cargo test --quiet --locked --test e2e -- "$@"
}

# Whatever ended it.
finish() {
  local code=$?
  trap '' INT TERM HUP
  hurry
  if [ $code != 0 ] && [ -d "$node/log" ]; then
    rm -rf "$home/failed"
    each_node keep_logs
    say "the daemons' logs are in $home/failed"
  fi
  down
  say "nothing is left"
  exit $code
}

keep_logs() {
  mkdir -p "$home/failed"
  cp -r "$node/log" "$home/failed/$node_name" || true
}

# Nodes that were up stay up: only the driver is rebuilt, to try a change.
reinstall() {
  each_node import_driver
  kubectl --namespace baggageclaim delete pods --selector app.kubernetes.io/name=baggageclaim > /dev/null 2>&1 || true
  # As it was made: after the node was off, no one else would mount the file of overlays/loop.
  install_driver "$(cat "$first/overlay")"
}
import_driver() { enter ctr --address /run/containerd.sock --namespace k8s.io images import "$images/driver.tar" > /dev/null; }
