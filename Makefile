# `make` lists the targets. `make deps` installs what tests and demo need.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help build test fuzz guests torture sanity e2e e2e-up e2e-down crds lint fmt demo bench deps audit image clean

# Tests mount in a private mount namespace: no mount reaches the host, even if a test is killed.
ROOT := $(shell [ "$$(id -u)" = 0 ] && echo yes)
ALONE := $(if $(ROOT),unshare --mount --propagation private --,)
# The variables that sudo drops.
AS_ROOT := env "PATH=$$PATH" "HOME=$$HOME"

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the binary: target/release/baggageclaim
	cargo build --release --locked

test: ## formatting, lints, unit and integration tests (as root: all of them)
	@$(MAKE) --no-print-directory deps || echo "make test: continuing without the missing programs"
	$(if $(ROOT),,@$(MAKE) --no-print-directory warn-no-root)
	cargo fmt --check
	cargo test --no-run --locked
	@$(MAKE) --no-print-directory --jobs=3 --output-sync --keep-going $(LINTS) suite-unit $(SUITES:%=suite-%)
	cargo test --no-run --locked --test torture --test guests --bench speed
	@$(MAKE) --no-print-directory --jobs=2 --output-sync torture-short guests BAGGAGECLAIM_GUESTS_SHORT=1
	$(if $(ROOT),,@$(MAKE) --no-print-directory warn-no-root)

# The bench is built with torture and guests because no test runs it: so the build lints it in CI.

# The tests in src/, and each program in tests/. Tests wait for disks and processes most of the time,
# so three of these run at once.
SUITES := $(filter-out torture guests e2e control_plane,$(basename $(notdir \
  $(wildcard tests/*.rs) $(patsubst %/main.rs,%,$(wildcard tests/*/main.rs)))))
RUN_SUITE := RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(nproc)} $(ALONE) cargo test --locked --no-fail-fast
.PHONY: lint-beside suite-unit $(SUITES:%=suite-%)
# Lints use what tests leave of the processors. In the directory of the tests, cargo's lock would
# make each wait for the other. In CI, the compiler of the tests is Clippy's: it has linted all.
LINTS := $(if $(filter %clippy-driver,$(RUSTC_WORKSPACE_WRAPPER)),,lint-beside)
lint-beside:
	@CARGO_TARGET_DIR=target/lint nice -n 19 $(MAKE) --no-print-directory lint

suite-unit:
	@$(RUN_SUITE) --lib --bins

$(SUITES:%=suite-%): suite-%:
	@$(RUN_SUITE) --test $*

# Torture for a minute or two. `make test` runs it beside the guests.
.PHONY: torture-short
torture-short:
	$(ALONE) cargo test --locked --quiet --test torture

# The duration of `make torture`, and its target for power cuts in virtual machines.
MINUTES ?= 10
GUESTS := $(shell [ "$$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null && echo guests)

torture: ## kills, full disks, hostile tenants, leaks, power cuts: MINUTES=60 (root)
	cargo test --no-run --locked $(foreach target,torture $(GUESTS),--test $(target))
	@mkdir -p target/torture; failed=0; pids=; \
	echo "torture: $(MINUTES) minutes; to watch: tail -f target/torture/*.log"; \
	for target in torture $(GUESTS); do \
	  BAGGAGECLAIM_TORTURE_MINUTES=$(MINUTES) $(ALONE) cargo test --locked --quiet --test $$target -- --nocapture \
	    >target/torture/$$target.log 2>&1 & pids="$$pids $$!"; \
	done; \
	for pid in $$pids; do wait $$pid || failed=1; done; \
	if [ $$failed = 1 ]; then grep -h -A 8 -E 'FAULT|panicked|^error' target/torture/*.log | cut -c 1-400 | head -60 || true; fi; \
	awk '/^figures:/ { for (i = 2; i <= NF; i++) { split($$i, f, "="); if (!(f[1] in sum)) order[++n] = f[1]; sum[f[1]] += f[2] } } \
	  END { printf "figures:"; for (i = 1; i <= n; i++) printf " %s=%d", order[i], sum[order[i]]; print ""; \
	    exit !n || sum["lost"] + sum["leaked"] + sum["wrong"] > 0 }' \
	  $(foreach target,torture $(GUESTS),target/torture/$(target).log) || failed=1; \
	exit $$failed

# Coverage-guided, by libFuzzer (needs a C++ compiler): tests/fuzz/. Each unpacks into a tmpfs of its own.
FUZZ ?= reader extraction table

fuzz: ## hostile archives, tables and streams: FUZZ= by coverage, then by seed, each for MINUTES=10 (root)
	cd tests/fuzz && cargo build --locked
	cargo test --no-run --locked --test archives
	@for target in $(FUZZ); do \
	  echo "fuzz: $$target: $(MINUTES) minutes; inputs: target/fuzz/$$target"; \
	  mkdir -p target/fuzz/$$target; \
	  (cd tests/fuzz && $(ALONE) sh -c 'mount -t tmpfs fuzz /mnt && TMPDIR=/mnt exec "$$@"' sh \
	    cargo run --locked --quiet --bin $$target -- ../../target/fuzz/$$target \
	    -artifact_prefix=../../target/fuzz/$$target- -max_total_time=$$(( $(MINUTES) * 60 )) \
	    -max_len=32768 -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0); \
	done
	BAGGAGECLAIM_MUTATION_SECONDS=$$(( $(MINUTES) * 60 )) $(ALONE) cargo test --locked --test archives -- --nocapture damaged_

guests: ## tests, power cuts, a broken disk on Debian's 5.10, 6.1, 6.12 in qemu (apt, x86-64; an hour)
	@if [ "$$(uname -m)" = x86_64 ] && command -v apt-get >/dev/null; then \
	  cargo test --no-run --locked --test guests && \
	  BAGGAGECLAIM_GUESTS_SHORT="$(BAGGAGECLAIM_GUESTS_SHORT)" $(ALONE) cargo test --locked --test guests; \
	elif [ -n "$${CI:-}" ]; then echo "guests: CI is set, but this is not Debian on x86-64" >&2; exit 1; \
	else echo "guests: NOT RUN: this is not Debian on x86-64" >&2; fi

sanity: ## csi-sanity on every backend, nothing skipped (root, Go)
	@command -v go >/dev/null || { echo "sanity: missing: Go 1.25 or newer (https://go.dev/dl), to build csi-sanity" >&2; exit 1; }
	cargo test --no-run --locked --test sanity
	@CI=1 $(ALONE) cargo test --locked --quiet --test sanity

# The number of nodes, or what is up: 1, or 3 for the cases that need several.
NODES ?=

e2e: ## a Kubernetes built from source with deploy/: all cases of one node, or of NODES=3, or CASE= (root, Go)
	@NODES=$(NODES) tests/e2e/cluster.sh run $(CASE)

e2e-up: ## start it, with one node or NODES=3, and keep it; prints how to use kubectl
	@NODES=$(NODES) tests/e2e/cluster.sh up $(OVERLAY)

e2e-down: ## remove it
	@tests/e2e/cluster.sh down

crds: ## generate deploy/crds from the types in src/api
	cargo run --quiet --locked -- crds > target/crds.yaml
	cp target/crds.yaml deploy/crds/crds.yaml

lint: ## formatting and lints, warnings are errors
	cargo fmt --check
	cargo clippy --all-targets --locked -- -D warnings
	cargo clippy --test torture --test guests --test e2e --test control_plane --locked -- -D warnings

fmt: ## format the sources
	cargo fmt

# The demo makes its own mount namespace. The message builds first, without sudo: rustup installs
# cargo for one user, so neither sudo's PATH nor root's home has it.
demo: ## a real pipeline over the real socket (root); PROGRAM= to use another binary
	$(if $(ROOT)$(PROGRAM),,@echo >&2 \
	  'demo: only root may mount overlays: make build && sudo $(AS_ROOT) target/release/baggageclaim demo' && exit 1)
	$(if $(PROGRAM),,cargo build --release --locked)
	$(or $(PROGRAM),target/release/baggageclaim) demo

bench: ## measure against bare system calls; writes target/bench.json (root, 14 GiB in memory or /tmp)
	cargo bench --no-run --locked --bench speed
	$(ALONE) cargo bench --locked --bench speed

deps: ## install what tests and demo need (Debian, root), or list what is missing
	@missing=; for pair in mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs mkfs.ext4:e2fsprogs strace:strace unshare:util-linux zstd:zstd ip:iproute2 faketime:faketime; do \
	  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$(ROOT)" = yes ] && command -v apt-get >/dev/null; then \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; \
	else \
	  echo "deps: missing:$$missing (as root on Debian, make deps installs them)" >&2; exit 1; \
	fi; \
	command -v cargo >/dev/null || { echo "deps: missing: cargo (Rust 1.95 or newer, https://rustup.rs)" >&2; exit 1; }

audit: ## licences and advisories of the dependencies (needs cargo-deny)
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check; \
	else echo "audit: NOT RUN: cargo-deny is missing (cargo install --locked cargo-deny)" >&2; fi

# Another image for the Dockerfile to build with, such as one pinned by its digest.
RUST_IMAGE ?=

image: ## build the container image baggageclaim-csi (needs docker or podman); RUST_IMAGE= to build with another
	@for engine in docker podman; do \
	  command -v $$engine >/dev/null || continue; \
	  if why="$$($$engine info 2>&1 >/dev/null)"; then exec $$engine build $(if $(RUST_IMAGE),--build-arg RUST_IMAGE=$(RUST_IMAGE)) -t baggageclaim-csi .; fi; \
	  echo "image: $$engine is installed but does not answer: $$(tail -n 1 <<<"$$why")" >&2; \
	done; \
	echo "image: missing: docker with a running daemon, or podman" >&2; exit 1

clean: ## remove build results, and images that killed tests left in memory
	cargo clean
	@for image in /dev/shm/bcl-*; do \
	  pid="$${image#/dev/shm/bcl-}"; pid="$${pid%%-*}"; \
	  if [ -f "$$image" ] && [ ! -d "/proc/$$pid" ]; then rm -f "$$image"; fi; \
	done

.PHONY: warn-no-root
warn-no-root:
	@printf '%s\n' \
	  '************************************************************************' \
	  '* NOT ROOT: most tests need a mount, and every one of those is SKIPPED.*' \
	  '* Run all tests as root:                                               *' \
	  '*   sudo $(AS_ROOT) make test                       *' \
	  '************************************************************************' >&2
