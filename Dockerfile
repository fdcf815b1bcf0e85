# One static binary in an empty image, and the certificates by which it knows the storage of a shared tier. The driver
# executes no other program, so there is nothing else to ship.

# The image to build with: a Rust that is new enough, glibc's static libraries, and the certificates of public authorities.
# A tag moves: a build that is to be the same again names the image by its digest, which
# `docker buildx imagetools inspect` tells:
#
#     make image RUST_IMAGE=docker.io/library/rust@sha256:…
ARG RUST_IMAGE=docker.io/library/rust:1-slim-bookworm

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY . .
# Only the program is linked statically: build scripts and procedural macros cannot be.
RUN cargo rustc --release --locked --bin baggageclaim -- -C target-feature=+crt-static \
 && cp target/release/baggageclaim /baggageclaim \
 && ! ldd /baggageclaim 2>/dev/null | grep '=>'

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /baggageclaim /baggageclaim
ENTRYPOINT ["/baggageclaim"]
