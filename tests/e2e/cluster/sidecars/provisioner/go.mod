module baggageclaim/e2e/provisioner

go 1.26.0

require github.com/kubernetes-csi/external-provisioner/v6 v6.3.0
