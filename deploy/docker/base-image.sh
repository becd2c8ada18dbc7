#!/usr/bin/env bash
# Prints the base image to build from. The first of these that can be had:
#   $BASE_IMAGE, if set; the public image; onbeat-base:bookworm, which is made here with debootstrap (needs root).
# The image made here believes the certificate authorities that this host believes, and has its Debian archive and its
# package index: with them RUN apt-get and RUN pip work wherever they work on the host.
set -euo pipefail
. "$(dirname "$0")/steps.sh"
public=python:3.11-slim-bookworm
own=onbeat-base:bookworm
pull_s=120

say() { echo "base image: $*" >&2; }
give_up() { say "$*"; exit 1; }
has_image() { docker image inspect "$1" >/dev/null 2>&1; }

main() {
    if [ -n "${BASE_IMAGE:-}" ]; then echo "$BASE_IMAGE"; return; fi
    local image
    for image in "$public" "$own"; do
        if has_image "$image"; then echo "$image"; return; fi
    done
    say "pulling $public"
    local reason
    if reason=$(timeout "$pull_s" docker pull --quiet "$public" 2>&1 >/dev/null); then echo "$public"; return; fi
    say "$public cannot be pulled: ${reason:-no answer within $pull_s s}"
    make_own
    echo "$own"
}

make_own() {
    if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
        give_up "making a base image needs root and debootstrap: set BASE_IMAGE to a Debian or Python image"
    fi
    local archive
    archive=$(debian_archive)
    if [ -z "$archive" ]; then
        apt_update
        archive=$(debian_archive)
    fi
    [ -n "$archive" ] || give_up "apt on this host knows no archive of Debian bookworm: set BASE_IMAGE to a Debian or Python image"
    say "making $own with debootstrap"
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    quietly debootstrap --variant=minbase --include=ca-certificates bookworm "$tree" "$archive" || give_up "debootstrap failed"
    copy_authorities
    write_sources
    keep_apt_small
    write_pip_conf
    rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/*
    tar -C "$tree" -c . | docker import --change 'CMD ["bash"]' - "$own" >/dev/null
}

# What apt on this host uses for Debian itself, as "URI SUITE COMPONENT" lines. Nothing before the first `apt-get update`.
debian_targets() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' | sort -u
}

debian_archive() {
    debian_targets | awk '$2 == "bookworm" && $3 == "main" {print $1; exit}'
}

# The tree has no folder of the host, so no TMPDIR of the host either.
copy_authorities() {
    awk -v dir="$tree/usr/local/share/ca-certificates" \
        '/BEGIN CERTIFICATE/ {file = sprintf("%s/host-%03d.crt", dir, ++n)} file {print > file} /END CERTIFICATE/ {close(file); file = ""}' \
        /etc/ssl/certs/ca-certificates.crt
    quietly env -u TMPDIR chroot "$tree" update-ca-certificates || give_up "update-ca-certificates failed in the new base image"
}

write_sources() {
    debian_targets | awk '$2 ~ /^bookworm/ {print "deb", $1, $2, $3}' >"$tree/etc/apt/sources.list"
    local proxies
    proxies=$(apt-config dump --format '%F "%v";%n' Acquire::http::Proxy Acquire::https::Proxy | sed '/@/d')
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
    python3 -m pip --version >/dev/null || say "python3 on this host has no pip: the image gets no package index of its configuration"
    {
        echo "[global]"
        echo "cert = /etc/ssl/certs/ca-certificates.crt"
        for option in index-url extra-index-url proxy; do
            value=$(python3 -m pip config get "global.$option" 2>/dev/null || true) # it fails where the option is not set
            value=$(tr ' ' '\n' <<<"$value" | sed -nE '\#^https?://[^/@]+(/|$)#p' | tr '\n' ' ')
            if [ -n "$value" ]; then echo "$option = $value"; fi
        done
    } >"$tree/etc/pip.conf"
}

main "$@"
