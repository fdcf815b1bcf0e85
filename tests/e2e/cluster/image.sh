# Sourced by build.sh. An OCI image of one layer, without a registry, a daemon or a builder.
# The format: https://github.com/opencontainers/image-spec/blob/main/image-layout.md

# image FILE REFERENCE CONFIG COMMAND: $images/FILE.tar, whose files are what COMMAND puts into the
# directory it is given.
image() {
  local name=$1 reference=$2 config=$3 fill=$4 scratch layer manifest
  scratch=$(mktemp -d "$home/image.XXXXXX")
  mkdir -p "$scratch/root" "$scratch/layout/blobs/sha256"
  "$fill" "$scratch/root"
  # The same files make the same image: sorted, without owners and times.
  tar --create --file "$scratch/layer" --directory "$scratch/root" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 .
  layer=$(blob "$scratch" application/vnd.oci.image.layer.v1.tar < "$scratch/layer")
  # The layer is not compressed, so what it is called compressed and uncompressed (its "diff id") is
  # the same.
  config=$(printf '{"architecture": "%s", "os": "linux", "config": %s, "rootfs": {"type": "layers", "diff_ids": ["%s"]}}' \
    "$(go env GOARCH)" "$config" "$(grep -o 'sha256:[0-9a-f]*' <<< "$layer")" | blob "$scratch" application/vnd.oci.image.config.v1+json)
  manifest=$(printf '{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": %s, "layers": [%s]}' \
    "$config" "$layer" | blob "$scratch" application/vnd.oci.image.manifest.v1+json \
    ", \"annotations\": {\"io.containerd.image.name\": \"$reference\"}")
  printf '{"schemaVersion": 2, "manifests": [%s]}' "$manifest" > "$scratch/layout/index.json"
  printf '{"imageLayoutVersion": "1.0.0"}' > "$scratch/layout/oci-layout"
  tar --create --file "$images/$name.tar" --directory "$scratch/layout" oci-layout index.json blobs
  rm -rf "$scratch"
}

# blob SCRATCH TYPE [MORE]: stores what comes in, and prints the descriptor by which others refer to
# it.
blob() {
  local scratch=$1 type=$2 more=${3:-} digest
  cat > "$scratch/blob"
  digest=$(sha256sum < "$scratch/blob" | cut -d ' ' -f 1)
  printf '{"mediaType": "%s", "digest": "sha256:%s", "size": %s%s}' "$type" "$digest" "$(stat -c %s "$scratch/blob")" "$more"
  mv "$scratch/blob" "$scratch/layout/blobs/sha256/$digest"
}
