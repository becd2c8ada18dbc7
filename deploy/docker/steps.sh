# Sourced by scripts that install or build something. Each of them defines `say`, which writes a sentence to stderr.

# Run a command without its output. If it fails, its last lines go to stderr.
quietly() {
    local output status=0
    output=$("$@" 2>&1) || status=$?
    if [ "$status" != 0 ]; then printf '%s\n' "$output" | tail -n 30 >&2; fi
    return "$status"
}

# Both wait for another apt-get that is at work.
apt_update() {
    quietly apt-get -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any update \
        || say "apt-get update failed; going on with the package lists that are here"
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt_update
    quietly apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}
