#!/bin/bash
# upgrade.sh v1.X.Y: writes go.mod and go.sum for another release of Kubernetes. The version stands in go.mod and nowhere
# else; etcd's is the one that this release was built against.
#
# k8s.io/kubernetes takes its own libraries from its own tree ("staging"), by replacements, which Go ignores in a module
# that is required. So each is replaced again, by the release of that library that belongs to it: v1.X.Y is v0.X.Y there.
set -euo pipefail
cd "$(dirname "$0")"
version=${1:?usage: upgrade.sh v1.X.Y}
libraries=v0.${version#v1.}

theirs=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
wanted() { awk -v module="$1" '$1 == module && $2 ~ /^v/ { print $2; exit }' "$theirs"; }
{
  printf 'module baggageclaim/e2e/components\n\n'
  grep -E '^(go|godebug) ' "$theirs"
  printf '\nrequire (\n\tgithub.com/spf13/cobra %s\n\tgo.etcd.io/etcd/server/v3 %s\n\tk8s.io/kubernetes %s\n)\n\nreplace (\n' \
    "$(wanted github.com/spf13/cobra)" "$(wanted go.etcd.io/etcd/server/v3)" "$version"
  awk -v version="$libraries" '$2 == "=>" && $3 ~ /staging/ { print "\t" $1 " => " $1 " " version }' "$theirs"
  printf ')\n'
} > go.mod
rm -f go.sum
go mod tidy
