# Sourced by cluster.sh. Makes target/e2e/bin and target/e2e/images.
#
# Each product has a key beside it, a hash of all that it was made of: as long as the key is the
# same, the product is.

build() {
  # A home that shares the build of another run has nothing to build. The static driver would also
  # take the place of the one in target/debug, which that run's tests start.
  [ ! -L "$bin" ] || return 0
  packages
  mkdir -p "$bin" "$images"
  # Left over from an interrupted build.
  rm -rf "$home"/image.*
  components
  storage
  sidecars
  pause
  driver
  image_of_pause
  image_of_busybox
  image_of_debian
  image_of_driver
  image_of_older_driver
  images_of_sidecars
}

# The container runtime and the small programs that the node's daemons execute, and what commands of
# the documentation use that the cases run. Versions are Debian's: the release of the machine
# decides.
#
# The first word of each is a program. The shell finds what it has built in, `kill` for one, on a
# machine that has no such program.
packages() {
  local missing= pair
  for pair in containerd:containerd runc:runc /usr/lib/cni/bridge:containernetworking-plugins \
    iptables:iptables conntrack:conntrack ip:iproute2 busybox:busybox-static openssl:openssl cc:gcc \
    mkfs.ext4:e2fsprogs losetup:mount nsenter:util-linux flock:util-linux setsid:util-linux pgrep:procps jq:jq; do
    command -v "${pair%%:*}" > /dev/null || missing+=" ${pair##*:}"
  done
  # A busybox that is linked dynamically could not run in an empty image.
  [ "$missing" ] || ! ldd "$(command -v busybox)" > /dev/null 2>&1 || missing+=" busybox-static"
  # cc is there without the C library's headers on some machines.
  [ -e /usr/include/stdio.h ] || missing+=" libc6-dev"
  command -v go > /dev/null || die "missing: Go $(awk '$1 == "go" { print $2 }' "$here/components/go.mod") or newer (https://go.dev/dl)"
  command -v cargo > /dev/null || die "missing: cargo (https://rustup.rs)"
  [ "$missing" ] || return 0
  command -v apt-get > /dev/null || die "missing:$missing"
  say "installing$missing"
  # shellcheck disable=SC2086 # a list of words
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing; } \
    > "$home/packages.log" 2>&1 || { tail -20 "$home/packages.log" >&2; die "could not install$missing"; }
}

# fits PRODUCT KEY: whether it is there and was made of what the key says. Else the old one is
# removed, so that a build that fails leaves none.
fits() {
  [ -e "$1" ] && [ "$(cat "$1.key" 2> /dev/null)" = "$2" ] && return
  rm -f "$1" "$1.key"
  return 1
}
made() { printf '%s\n' "$2" > "$1.key"; say "made ${1#"$home/"}"; }

# hash_of FILE...: of what a product is made of. One of these is the function that makes it, so a
# change of another one does not make it again.
hash_of() { cat "$@" | sha256sum | cut -c 1-16; }

# etcd, Kubernetes and kubectl, from their Go modules: one program under several names.
components() {
  local name key version modules=$here/components
  key=$(hash_of "$modules"/*.go "$modules"/go.mod "$modules"/go.sum <(declare -f components))-$(go env GOVERSION)
  if ! fits "$bin/components" "$key"; then
    version=$(awk '$1 == "k8s.io/kubernetes" { print $2 }' "$modules/go.mod")
    say "building Kubernetes $version from source; cold, this takes all processors for some minutes"
    # The version that it reports. Without this, kubelet's would be v0.0.0 and be refused as too
    # old.
    local minor=${version#v1.} flags='-s -w' package
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
      flags+=" -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
    done
    patiently env -C "$modules" CGO_ENABLED=0 nice -n 10 \
      go build -trimpath -buildvcs=false -ldflags "$flags" -o "$bin/components" .
    made "$bin/components" "$key"
  fi
  for name in etcd kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl door; do
    ln -sf components "$bin/$name"
  done
}

# versitygw, an S3 server for the cases about the shared tier: the program of `make test`.
storage() {
  local key modules=$repository/tests/s3-server
  key=$(hash_of "$modules/go.mod" "$modules/go.sum" <(declare -f storage))-$(go env GOVERSION)
  fits "$bin/versitygw" "$key" && return
  patiently env -C "$modules" CGO_ENABLED=0 nice -n 10 \
    go build -trimpath -buildvcs=false -mod=readonly -o "$bin/versitygw" github.com/versity/versitygw/cmd/versitygw
  made "$bin/versitygw" "$key"
}

# The sidecars of the controller, and the snapshot controller, which belongs to the cluster: each
# program and its Go module. Their versions are those of deploy/.
sidecar_programs="csi-provisioner:provisioner csi-resizer:resizer csi-snapshotter:snapshotter snapshot-controller:snapshotter"

sidecars() {
  local pair program key package modules
  for pair in $sidecar_programs; do
    program=${pair%:*} modules=$here/sidecars/${pair#*:}
    key=$(hash_of "$modules/go.mod" "$modules/go.sum" <(declare -f sidecars))-$(go env GOVERSION)
    fits "$bin/$program" "$key" && continue
    package=$(awk '$1 == "require" { print $2 }' "$modules/go.mod")
    say "building $program $(sidecar_version "${pair#*:}") from source"
    patiently env -C "$modules" CGO_ENABLED=0 nice -n 10 \
      go build -trimpath -buildvcs=false -mod=readonly -ldflags '-s -w' -o "$bin/$program" "$package/cmd/$program"
    made "$bin/$program" "$key"
  done
  # The definitions of snapshots and of groups of them, which belong to the cluster, too.
  modules=$here/sidecars/snapshotter
  key=$(hash_of "$modules/go.mod" "$modules/go.sum" <(declare -f sidecars))
  fits "$bin/snapshot-crds.yaml" "$key" && return
  package=$(env -C "$modules" go list -mod=readonly -m -f '{{.Dir}}' github.com/kubernetes-csi/external-snapshotter/client/v8)
  cat "$package"/config/crd/*_*.yaml > "$bin/snapshot-crds.yaml"
  made "$bin/snapshot-crds.yaml" "$key"
}
sidecar_version() { awk '$1 == "require" { print $3 }' "$here/sidecars/$1/go.mod"; }

images_of_sidecars() {
  local pair key
  for pair in $sidecar_programs; do
    sidecar=${pair%:*}
    key=$(hash_of "$bin/$sidecar.key" "$here/image.sh")
    fits "$images/$sidecar.tar" "$key" && continue
    image "$sidecar" "registry.k8s.io/sig-storage/$sidecar:$(sidecar_version "${pair#*:}")" "{\"Entrypoint\": [\"/$sidecar\"]}" add_sidecar
    made "$images/$sidecar.tar" "$key"
  done
}
add_sidecar() { mkdir -p "$1" && install "$bin/$sidecar" "$1/$sidecar"; }

pause() {
  local key; key=$(hash_of "$here/pause.c")
  fits "$bin/pause" "$key" && return
  cc -static -Os -s -Wall -Wextra -o "$bin/pause" "$here/pause.c"
  made "$bin/pause" "$key"
}

# The driver as the Dockerfile builds it: one static binary. cargo knows best whether it has to be
# built again. In CI it is that of the profile of the tests, whose libraries are there already.
driver() {
  local profile=${E2E_PROFILE:-release}
  local made=$repository/target/${profile/#dev/debug}/baggageclaim
  patiently env -C "$repository" \
    nice -n 10 cargo rustc --quiet --profile "$profile" --locked --bin baggageclaim -- \
    -C target-feature=+crt-static -C strip=debuginfo \
    || die "the driver does not build"
  cmp -s "$made" "$bin/baggageclaim" && return
  install "$made" "$bin/baggageclaim"
  ! ldd "$bin/baggageclaim" 2> /dev/null | grep '=>' || die "the driver is not static"
  say "made bin/baggageclaim"
}

# The images, each one layer, in the layout that `ctr images import` reads. No registry is asked:
# what stands under a public name here is made of what this machine has, so that deploy/ and
# examples/ run as they are.

image_of_pause() {
  local key; key=$(hash_of "$bin/pause" "$here/image.sh")
  fits "$images/pause.tar" "$key" && return
  image pause e2e.local/pause:1 '{"Entrypoint": ["/pause"], "User": "65535:65535"}' add_pause
  made "$images/pause.tar" "$key"
}
add_pause() { install "$bin/pause" "$1/pause"; }

image_of_busybox() {
  local key; key=$(hash_of "$(command -v busybox)" "$here/image.sh" <(declare -f image_of_busybox add_busybox))
  fits "$images/busybox.tar" "$key" && return
  image busybox docker.io/library/busybox:1 '{"Cmd": ["sh"], "Env": ["PATH=/bin"]}' add_busybox
  made "$images/busybox.tar" "$key"
}
add_busybox() {
  local name
  mkdir -p "$1"/{bin,etc,root,var} && mkdir -m 1777 "$1/tmp"
  install "$(command -v busybox)" "$1/bin/busybox"
  for name in $(busybox --list); do [ "$name" = busybox ] || ln -s busybox "$1/bin/$name"; done
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' > "$1/etc/passwd"
  printf 'root:x:0:\nnogroup:x:65534:\n' > "$1/etc/group"
}

# The programs that deploy/overlays/loop takes from Debian's image: a shell, mkfs.ext4 and mount.
image_of_debian() {
  local key; key=$(hash_of "$(command -v mkfs.ext4)" "$(command -v mount)" "$(command -v busybox)" "$here/image.sh" <(declare -f image_of_debian add_debian add_busybox))
  fits "$images/debian.tar" "$key" && return
  image debian docker.io/library/debian:12-slim '{"Cmd": ["sh"], "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}' add_debian
  made "$images/debian.tar" "$key"
}
add_debian() {
  local program file
  add_busybox "$1"
  mkdir -p "$1/usr/sbin" "$1/usr/bin"
  cp /etc/mke2fs.conf "$1/etc/"
  for program in mkfs.ext4 losetup mount umount mountpoint blkid; do
    program=$(command -v "$program")
    rm -f "$1/bin/${program##*/}"
    install "$program" "$1/usr/sbin/"
    # Its libraries, and the loader that it names itself.
    for file in $(ldd "$program" | grep -o '/[^ ]*'); do install -D "$file" "$1$file"; done
  done
}

# The version stands in Cargo.toml, and deploy/ asks for the image of that version.
image_of_driver() {
  local key; key=$(hash_of "$bin/baggageclaim" "$here/image.sh" "$here/build.sh")
  fits "$images/driver.tar" "$key" && return
  image driver "docker.io/library/baggageclaim-csi:$(driver_version)" '{"Entrypoint": ["/baggageclaim"]}' add_driver
  made "$images/driver.tar" "$key"
}
add_driver() {
  local certificates=/etc/ssl/certs/ca-certificates.crt
  mkdir -p "$1" && install "$bin/baggageclaim" "$1/baggageclaim"
  # As in the Dockerfile: without any, no client of a shared tier can be made.
  if [ -e $certificates ]; then install -D -m 644 $certificates "$1$certificates"; fi
}
# An older program, built elsewhere, for the case about the upgrade.
image_of_older_driver() {
  rm -f "$images/older.tar"
  [ -z "${BAGGAGECLAIM_TEST_OLDER:-}" ] \
    || image older docker.io/library/baggageclaim-csi:older '{"Entrypoint": ["/baggageclaim"]}' add_older_driver
}
add_older_driver() { mkdir -p "$1" && install "$BAGGAGECLAIM_TEST_OLDER" "$1/baggageclaim"; }
driver_version() { sed -n 's/^version = "\(.*\)"/\1/p' "$repository/Cargo.toml" | head -1; }

source "$here/image.sh"
