#!/usr/bin/env bash
# A browser for the tests where there is none: prints the path of Chromium or Chrome, and nothing else, on stdout.
#   install-chromium.sh    exit 0: it is there, or was installed from Debian; exit 1: not, and why is on stderr
# ONBEAT_CHROMIUM names another one. Only root on Debian or Ubuntu gets one installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/deploy/docker/steps.sh"

say() { echo "browser: $*" >&2; }
give_up() { say "$*"; exit 1; }

# Ubuntu's package is a stub that asks for a snap.
works() {
    local reason
    reason=$(timeout 30 "$1" --version 2>&1 >/dev/null) || { say "$1 does not run: $(tail -n 1 <<<"$reason")"; return 1; }
}

main() {
    if [ -n "${ONBEAT_CHROMIUM:-}" ]; then
        works "$ONBEAT_CHROMIUM" || give_up "ONBEAT_CHROMIUM=$ONBEAT_CHROMIUM does not run"
        echo "$ONBEAT_CHROMIUM"
    elif ! find_browser; then
        install_from_debian
        find_browser || give_up "the chromium package is installed, but no browser in it runs: install Chromium or Chrome"
    fi
}

find_browser() {
    local name path
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if path=$(command -v "$name") && works "$path"; then echo "$path"; return; fi
    done
    path=$(playwrights_own) && [ -x "$path" ] && works "$path" && echo "$path"
}

playwrights_own() {
    timeout 60 "$root/.venv/bin/python" 2>/dev/null <<'PYTHON'
from playwright.sync_api import sync_playwright

with sync_playwright() as playwright:
    print(playwright.chromium.executable_path)
PYTHON
}

install_from_debian() {
    local how="install Chromium or Chrome, or set ONBEAT_CHROMIUM to the path of one"
    command -v apt-get >/dev/null || give_up "there is no browser, and no apt-get to install one: $how"
    [ "$(id -u)" = 0 ] || give_up "there is no browser, and only root may install one: $how"
    say "installing chromium and a font"
    apt_install chromium fonts-dejavu-core || give_up "apt-get could not install chromium: $how"
}

main "$@"
