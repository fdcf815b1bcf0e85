# Sourced by boot.sh. The certificates: an authority for this cluster's life, and the identities that
# it signs.

make_pki() {
  mkdir -p "$pki"
  local log=$node/log/pki.log number
  (
    cd "$pki"
    key ca
    openssl req -x509 -new -key ca.key -subj /CN=e2e -days 7 -out ca.crt
    certificate apiserver /CN=kube-apiserver serverAuth \
      "IP:127.0.0.1,IP:$node_address,IP:$api_service,DNS:kubernetes.default.svc"
    for number in $(numbers); do
      certificate "kubelet-$number" "/O=system:nodes/CN=system:node:node-$number" serverAuth,clientAuth \
        "IP:$(address_of "$number"),DNS:node-$number"
    done
    certificate scheduler /CN=system:kube-scheduler clientAuth
    certificate proxy /CN=system:kube-proxy clientAuth
    # One of the masters: with a role of its own it would wait some seconds for the first service
    # account to be there, and every start of the node with it.
    certificate controllers /O=system:masters/CN=system:kube-controller-manager clientAuth
    certificate admin /O=system:masters/CN=admin clientAuth
    # Service accounts' tokens are signed with it and checked against it.
    key tokens
    openssl ec -in tokens.key -pubout -out tokens.pub
  ) > "$log" 2>&1 || { cat "$log" >&2; die "no certificates"; }
}

key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }

# certificate NAME SUBJECT USAGE [NAMES]: NAME.key, NAME.crt, and NAME.kubeconfig for who calls with
# it.
certificate() {
  key "$1"
  openssl req -new -key "$1.key" -subj "$2" | openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 7 -out "$1.crt" \
    -extfile <(printf 'basicConstraints=CA:FALSE\nextendedKeyUsage=%s\n' "$3"; [ $# -lt 4 ] || printf 'subjectAltName=%s\n' "$4")
  cat > "$1.kubeconfig" <<E
apiVersion: v1
kind: Config
current-context: e2e
contexts: [{name: e2e, context: {cluster: e2e, user: $1}}]
clusters: [{name: e2e, cluster: {server: "https://$node_address:6443", certificate-authority: "$PWD/ca.crt"}}]
users: [{name: $1, user: {client-certificate: "$PWD/$1.crt", client-key: "$PWD/$1.key"}}]
E
}
