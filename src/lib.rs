//! `baggageclaim-csi`: copy-on-write volumes for CI steps on Kubernetes.
