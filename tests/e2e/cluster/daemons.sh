#!/bin/bash
# A node's daemons: what each is told, and how they are started and stopped. Runs inside the
# node's namespaces; sourced by boot.sh, and called by `cluster.sh daemon`.
#
#   daemons.sh start|stop|kill NAME    stop: SIGTERM; kill: SIGKILL. Both return when it is gone.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

daemon_etcd() {
  # Nothing here outlives the machine, so nothing waits for its disk.
  exec etcd --name e2e --data-dir /var/lib/etcd --unsafe-no-fsync --log-level warn \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster e2e=http://127.0.0.1:2380
}

daemon_kube-apiserver() {
  # Node and NodeRestriction as in production: kubelet may see what its own pods need and nothing
  # more. shellcheck disable=SC2086 # words
  exec kube-apiserver --etcd-servers=http://127.0.0.1:2379 \
    --bind-address="$node_address" --advertise-address="$node_address" --secure-port=6443 \
    --service-cluster-ip-range="$services_range" --allow-privileged=true \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file="$pki/tokens.pub" --service-account-signing-key-file="$pki/tokens.key" \
    --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP
}

daemon_kube-controller-manager() {
  # With several nodes, a silent one is known as such sooner than in production.
  local silence=50s
  is_alone || silence=20s
  exec kube-controller-manager --kubeconfig="$pki/controllers.kubeconfig" --leader-elect=false --bind-address=127.0.0.1 \
    --root-ca-file="$pki/ca.crt" --service-account-private-key-file="$pki/tokens.key" \
    --node-monitor-grace-period=$silence
}

daemon_kube-scheduler() {
  exec kube-scheduler --kubeconfig="$pki/scheduler.kubeconfig" --leader-elect=false --bind-address=127.0.0.1
}

daemon_kube-proxy() {
  # The table of connections is the whole machine's: its size is left as it is.
  exec kube-proxy --kubeconfig="$pki/proxy.kubeconfig" --hostname-override="$node_name" --bind-address="$node_address" \
    --proxy-mode=iptables --cluster-cidr="$pods_range" --conntrack-max-per-core=0 \
    --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s
}

daemon_containerd() { exec containerd --config "$node/etc/containerd.toml"; }

daemon_kubelet() {
  exec kubelet --config="$node/etc/kubelet.yaml" --kubeconfig="$pki/kubelet-$node_number.kubeconfig" --root-dir="$(kubelet_directory)" \
    --hostname-override="$node_name" --node-ip="$node_address"
}

# An S3 server, started by a case: a bucket is a directory.
daemon_versitygw() {
  export ROOT_ACCESS_KEY=e2e ROOT_SECRET_KEY=e2e-secret
  exec versitygw --quiet --port "$node_address:7070" posix /var/lib/s3
}

write_configuration() {
  mkdir -p "$node/etc/cni" "$node/etc/static"
  cat > "$node/etc/cni/10-pods.conflist" <<E
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{
  "type": "bridge", "bridge": "e2e-pods", "isGateway": true, "ipMasq": false, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": "$(pods_of "$node_number")"}]], "routes": [{"dst": "0.0.0.0/0"}]}
}]}
E
  # The base spec of each container. After its mounts are made it gets the node's boot id (boot.sh).
  local hook='"path": "'$(command -v busybox)'", "args": ["mount", "-o", "bind", "/run/boot_id", "proc/sys/kernel/random/boot_id"]'
  ctr oci spec | sed "1s|{|{\"hooks\": {\"createContainer\": [{$hook}]},|" > "$node/etc/container.json"
  cat > "$node/etc/containerd.toml" <<E
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# Each of these would look for its filesystem, and complain.
disabled_plugins = [$(printf '"io.containerd.snapshotter.v1.%s", ' btrfs zfs aufs devmapper)]
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "e2e.local/pause:1"
  disable_apparmor = true
  # Inside a virtual machine or container without CAP_SYS_RESOURCE no score below one's own can be
  # set, and runc would give up: "can't get final child's PID from pipe: EOF".
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$node/etc/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "$node/etc/container.json"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
E
  cat > "$node/etc/kubelet.yaml" <<E
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
nodeLeaseDurationSeconds: $(is_alone && echo 40 || echo 12) # renewed four times in that
failCgroupV1: false # since 1.35 it refuses version 1 otherwise
failSwapOn: false
oomScoreAdj: 0 # see containerd.toml
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: "$pki/ca.crt"}
authorization: {mode: AlwaysAllow}
tlsCertFile: "$pki/kubelet-$node_number.crt"
tlsPrivateKeyFile: "$pki/kubelet-$node_number.key"
staticPodPath: $node/etc/static # empty, but for a case
address: $node_address
healthzBindAddress: 127.0.0.1
readOnlyPort: 0
# There is no name to resolve and no server, but without an address every pod gets a warning.
resolvConf: ""
clusterDNS: [10.96.0.10]
maxPods: 200 # the burst of 100, and some
# The cases kill the driver again and again, and that it is started later each time says nothing
# about it.
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
# This test does not care for the machine's disk.
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
E
}

pid_of() { cat "$node/pids/$1" 2> /dev/null; }

# The process replaces the shell that starts it, so the pid is the daemon's own.
start() {
  mkdir -p "$node/pids"
  ! alive "$(pid_of "$1" || echo none)" || die "$1 runs already"
  setsid bash -c 'source "$1" && "daemon_$2"' daemon "$here/daemons.sh" "$1" >> "$node/log/$1.log" 2>&1 < /dev/null 9>&- &
  echo $! > "$node/pids/$1"
}

end() {
  local pid
  pid=$(pid_of "$1") || die "there is no daemon $1"
  kill -"$2" "$pid" || true
  wait_for "end of $1" 30 not_running "$pid"
  rm "$node/pids/$1"
}
not_running() { ! alive "$1"; }

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  [ $# = 2 ] && declare -F "daemon_$2" > /dev/null || die "usage: daemon start|stop|kill NAME"
  case $1 in
    start) start "$2" ;;
    stop)  end "$2" TERM ;;
    kill)  end "$2" KILL ;;
    *)     die "usage: daemon start|stop|kill NAME" ;;
  esac
fi
