#!/usr/bin/env bash
# Prints the base image to build from. The first of these that can be had:
#   $BASE_IMAGE, if set; the public image; onbeat-base:bookworm, which is made here with debootstrap (needs root).
# The image made here believes the certificate authorities that this host believes, and has its Debian archive and its
# package index: with them RUN apt-get and RUN pip work wherever they work on the host.
set -euo pipefail
public=python:3.11-slim-bookworm
own=onbeat-base:bookworm
pull_s=120

say() { echo "base image: $*" >&2; }
has_image() { docker image inspect "$1" >/dev/null 2>&1; }

main() {
    if [ -n "${BASE_IMAGE:-}" ]; then echo "$BASE_IMAGE"; return; fi
    local image
    for image in "$public" "$own"; do
        if has_image "$image"; then echo "$image"; return; fi
    done
    say "pulling $public"
    if timeout "$pull_s" docker pull --quiet "$public" >/dev/null 2>&1; then echo "$public"; return; fi
    make_own
    echo "$own"
}

make_own() {
    if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
        say "$public cannot be pulled, and making one needs root and debootstrap: set BASE_IMAGE to a Debian or Python image"
        exit 1
    fi
    say "$public cannot be pulled; making $own with debootstrap"
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    debootstrap --variant=minbase --include=ca-certificates bookworm "$tree" "$(debian_archive)" >"$tree.log" 2>&1 \
        || { tail -n 20 "$tree.log" >&2; say "debootstrap failed, see $tree.log"; exit 1; }
    copy_authorities
    write_sources
    keep_apt_small
    write_pip_conf
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree.log"
    tar -C "$tree" -c . | docker import --change 'CMD ["bash"]' - "$own" >/dev/null
}

# What apt on this host uses for Debian itself, as "URI SUITE COMPONENT" lines.
debian_targets() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' | sort -u
}

debian_archive() {
    debian_targets | awk '$2 == "bookworm" && $3 == "main" {print $1; exit}'
}

copy_authorities() {
    awk -v dir="$tree/usr/local/share/ca-certificates" \
        '/BEGIN CERTIFICATE/ {file = sprintf("%s/host-%03d.crt", dir, ++n)} file {print > file} /END CERTIFICATE/ {close(file); file = ""}' \
        /etc/ssl/certs/ca-certificates.crt
    chroot "$tree" update-ca-certificates >/dev/null 2>&1
}

write_sources() {
    debian_targets | awk '$2 ~ /^bookworm/ {print "deb", $1, $2, $3}' >"$tree/etc/apt/sources.list"
    local proxies
    proxies=$(apt-config dump --format '%F "%v";%n' Acquire::http::Proxy Acquire::https::Proxy | grep -v @ || true)
    if [ -n "$proxies" ]; then echo "$proxies" >"$tree/etc/apt/apt.conf.d/80host-proxy"; fi
}

# Otherwise every layer that installs something keeps the downloads and caches of apt.
keep_apt_small() {
    cat >"$tree/etc/apt/apt.conf.d/90no-caches" <<'END'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
END
}

# Only what can be reached from a container, and no secret, as layers are pushed: indexes in this host's folders and URLs
# with a user are left out.
write_pip_conf() {
    local option value
    {
        echo "[global]"
        echo "cert = /etc/ssl/certs/ca-certificates.crt"
        for option in index-url extra-index-url proxy; do
            value=$(python3 -m pip config get "global.$option" 2>/dev/null | tr ' ' '\n' | grep -E '^https?://[^/@]+(/|$)' | tr '\n' ' ' || true)
            if [ -n "$value" ]; then echo "$option = $value"; fi
        done
    } >"$tree/etc/pip.conf"
}

main "$@"
