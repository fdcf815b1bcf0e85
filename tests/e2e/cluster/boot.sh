#!/bin/bash
# Runs inside a node's namespaces: gives it disks and a network, and starts its daemons. Returns when
# the node is ready for pods.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$here/pki.sh"

# ---- disks ----
# As systemd does, and as Kubernetes expects: what is mounted in one place shows up in the
# containers that share it. All of this is in a namespace that nothing of the host's shares.
#
# The disks are bound before that: a bind of what is shared shares with its origin, and each mount
# beneath it would be there twice.
mkdir -p "$node"/var/{lib,log}
mount --bind "$node/var/lib" /var/lib
mount --bind "$node/var/log" /var/log
if [ -e "$node/pool.img" ]; then
  mkdir -p /var/lib/baggageclaim
  # The device goes with the mount, and that with this namespace.
  mount -o loop,noatime "$node/pool.img" /var/lib/baggageclaim
fi
mount --make-rshared /
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/netns /run/lock

# kubelet sets these, and they are the whole machine's: they have no namespace. Where it finds what
# it wants it writes nothing, so it finds that.
while read -r name value; do
  echo "$value" > "/run/${name##*/}"
  mount --bind "/run/${name##*/}" "/proc/sys/$name"
done <<E
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
E

# A node that is switched off and on has a new boot id, which this kernel does not change by itself.
# The file bound here is visible to the daemons, and to containers through daemons.sh.
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id

# ---- network ----
# The cable of the other nodes is connected already (updown.sh).
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
if [ "$node_number" = 1 ]; then
  # A bridge, because there is no `dummy` device in small kernels: it carries the node's address, and
  # is the switch that the other nodes' cables lead to.
  ip link add e2e-node type bridge
  ip address add "$node_address/24" dev e2e-node
  ip link set e2e-node up
  # Services are addresses that kube-proxy rewrites; before it can, there must be a way for them to
  # leave by.
  ip route add "$services_range" dev e2e-node
fi

# ---- the control plane ----
# Left over from the earlier boot; other processes may have these pids now.
rm -rf "$node/pids"
[ -e "$pki/admin.kubeconfig" ] || make_pki
source "$here/daemons.sh"
write_configuration
[ "$node_number" != 1 ] || start etcd
start containerd
[ "$node_number" != 1 ] || start kube-apiserver

ctr() { command ctr --address /run/containerd.sock --namespace k8s.io "$@"; }
wait_for containerd 20 ctr version
for image in "$images"/*.tar; do
  # After a reboot they are on the disk already.
  ctr images import "$image" > "$node/log/import.log" 2>&1 || { cat "$node/log/import.log" >&2; die "containerd refuses $image"; }
done

export KUBECONFIG=$pki/admin.kubeconfig
wait_for "API server" 60 kubectl get --raw /readyz
[ "$node_number" != 1 ] || say "the API server is ready"

# ---- the node ----
start kubelet
if [ "$node_number" = 1 ]; then
  start kube-controller-manager
  start kube-scheduler
fi
start kube-proxy
kubectl wait --for=create "node/$node_name" --timeout 60s > /dev/null
kubectl wait --for=condition=Ready "node/$node_name" --timeout 60s > /dev/null
# Without it no pod is admitted.
kubectl wait --for=create serviceaccount/default --timeout 60s > /dev/null
