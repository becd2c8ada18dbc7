#!/usr/bin/env bash
# Builds the three images: build-images.sh [cpu|cuda|npu]. In the environment, all optional:
#   BASE_IMAGE                          to build from; default: what base-image.sh finds
#   ONBEAT_IMAGES, ONBEAT_TAG           names, default onbeat/SERVICE:VERSION-PLATFORM
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL  package sources inside the builds
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/docker/steps.sh
platform=${1:-cpu}
ascend=vllm-ascend:v0.23.0rc1
pytorch_index=$(sed -n 's/^PYTORCH_INDEX = "\(.*\)"/\1/p' requirements/install.py)
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' onbeat/__init__.py)
images=${ONBEAT_IMAGES:-onbeat}
tag=${ONBEAT_TAG:-$version-$platform}
python=.venv/bin/python
[ -x "$python" ] || python=python3

say() { echo "images: $*" >&2; }

# PyPI has no versions with a local part such as torch==2.13.0+cpu: pip of the host fetches them, from where it is told to or
# from PyTorch's own index.
fetch_local_versions() {
    local requirement file lock=requirements/$platform.lock
    [ -e "$lock" ] || return 0 # the base image has PyTorch
    for requirement in $(sed -nE 's/^([A-Za-z0-9_.-]+==[^ ;]*\+[^ ;]+).*/\1/p' "$lock"); do
        file=${requirement%%==*}
        file=${file//-/_}-${requirement##*==}
        if compgen -G "deploy/docker/wheels/$file-*.whl" >/dev/null; then continue; fi
        say "fetching $requirement"
        if fetch "$requirement"; then continue; fi
        say "pip's package sources on this host have no $requirement: fetching it from $pytorch_index"
        fetch --index-url "$pytorch_index" "$requirement" || say "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL must offer it to the builds"
    done
}

fetch() {
    quietly "$python" -m pip download --no-deps --only-binary=:all: --python-version 3.11 --dest deploy/docker/wheels "$@"
}

build() {
    local service=$1 base=$2 file=worker replaced
    if [ "$service" = broker ]; then file=broker; fi
    replaced=$(docker image inspect --format '{{.Id}}' "$images/$service:$tag" 2>/dev/null || true)
    say "$images/$service:$tag from $base"
    quietly docker build --file "deploy/docker/$file.Dockerfile" --tag "$images/$service:$tag" \
        --build-arg BASE_IMAGE="$base" --build-arg PLATFORM="$platform" --build-arg SERVICE="$service" \
        --build-arg PIP_INDEX_URL="${PIP_INDEX_URL:-}" --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" \
        --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
        --build-arg SOURCE="${ONBEAT_SOURCE:-unknown}" . \
        || { say "docker build of $images/$service:$tag failed"; exit 1; }
    # Nobody asks for an image without a name. One that still has a name, or a container, stays.
    if [ -n "$replaced" ] && [ "$(docker image inspect --format '{{.Id}} {{.RepoTags}}' "$replaced")" = "$replaced []" ]; then
        docker image rm "$replaced" >/dev/null 2>&1 || true
    fi
}

# Of two builds at a time the second one waits, and finds the layers of the first.
exec 9<deploy/docker/build-images.sh
if command -v flock >/dev/null; then flock 9; fi
fetch_local_versions
base=$(deploy/docker/base-image.sh)
build broker "$base"
if [ "$platform" = npu ]; then base=${NPU_BASE_IMAGE:-$ascend}; fi
build trainer "$base"
build rollout "$base"
docker image ls --filter "reference=$images/*:$tag" >&2
