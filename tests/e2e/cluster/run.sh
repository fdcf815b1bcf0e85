# Sourced by cluster.sh. The whole of it: a node, the cases, and nothing left.

run() {
  trap 'exit 130' INT TERM HUP
  if is_up; then
    build
    reinstall
    play "$@"
    return
  fi
  # Also for a case that boots the node again.
  export tied=yes
  trap finish EXIT
  build
  if [ $# = 0 ]; then
    # The overlay for trying out, as far as it differs: that a pod gets a volume.
    up loop
    play scratch
    down
  fi
  up host
  play "$@"
}

# Plays the cases. In the background, because a shell hears signals only when it waits for what is there.
play() {
  # No backtraces: a case that fails says what it waited for, and what Kubernetes and the driver said.
  # With all that they start they are a group of their own, which can be ended as one.
  (cd "$repository" && RUST_BACKTRACE=0 exec setsid cargo test --quiet --locked --test e2e -- "$@") 9>&- &
  cases=$!
  wait "$cases"
  cases=
}

# Whatever ended it.
finish() {
  local code=$?
  trap '' INT TERM HUP
  [ -z "${cases:-}" ] || kill -TERM -- "-$cases" 2> /dev/null || true
  if [ $code != 0 ] && [ -d "$node/log" ]; then
    rm -rf "$home/failed"
    cp -r "$node/log" "$home/failed"
    say "the daemons' logs are in $home/failed"
  fi
  down
  say "nothing is left"
  exit $code
}

# A node that was up stays up: only the driver is made anew, for trying out a change.
reinstall() {
  enter ctr --address /run/containerd.sock --namespace k8s.io images import "$images/driver.tar" > /dev/null
  kubectl --namespace baggageclaim delete pods --selector app.kubernetes.io/name=baggageclaim > /dev/null 2>&1 || true
  install_driver host
}
