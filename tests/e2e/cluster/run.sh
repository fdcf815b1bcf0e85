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
    # The cases that need several nodes, and no others. They leave room for the overlays.
    up host "$NODES"
    if [ $# = 0 ]; then
      share_build "$home/overlays"
      run_beside overlays -u NODES E2E_HOME="$home/overlays" "$here/../cluster.sh" overlays
    fi
    play "$@"
    [ $# != 0 ] || each_beside
    return
  fi
  if [ $# = 0 ]; then
    patiently env -C "$repository" \
      cargo test --quiet --locked --no-run --test control_plane --test e2e
    # Claims in a cluster, without kubelets.
    run_beside control-plane -C "$repository" E2E_BIN="$bin" unshare --mount --propagation private \
      cargo test --quiet --locked --test control_plane
    patiently "$here/interrupted.sh"
  fi
  up host
  play "$@"
  [ $# != 0 ] || each_beside
}

# The overlays `loop` and `k0s`, as far as they differ from `host`.
overlays() {
  export tied=yes
  trap finish EXIT
  build
  # For trying out: that a pod gets a volume; that the pool, which a container mounts, is there for
  # the next driver, and after the node was off; and how it is taken away.
  up loop
  play scratch upgraded 'switched off' uninstalled
  down
  # A kubelet whose directory is elsewhere: the same of it.
  up k0s
  play scratch 'three parts' 'kubelet is restarted' uninstalled
}

# run_beside NAME [SETTING...] COMMAND...: starts a command, with settings of `env`, beside the
# cases: both wait most of the time. A program with this KUBECONFIG would count as left over of the
# nodes.
declare -A beside=()
run_beside() {
  local name=$1; shift
  setsid env -u KUBECONFIG -u KUBECACHEDIR -u node_number "$@" > "$home/$name.log" 2>&1 9>&- &
  beside[$name]=$!
  say "$name runs beside: ${home#"$repository"/}/$name.log"
}

# Waits for all of these, and shows what they said.
each_beside() {
  local name failed=
  for name in "${!beside[@]}"; do
    wait "${beside[$name]}" || failed+=" $name"
    unset "beside[$name]"
    cat "$home/$name.log"
  done
  [ -z "$failed" ] || die "failed:$failed"
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
