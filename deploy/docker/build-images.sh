#!/usr/bin/env bash
# Builds the three images: build-images.sh [cpu|cuda|npu]. In the environment, all optional:
#   BASE_IMAGE                          to build from; default: what base-image.sh finds
#   ONBEAT_IMAGES, ONBEAT_TAG           names, default onbeat/SERVICE:0.1.0-PLATFORM
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL  package sources inside the builds
set -euo pipefail
cd "$(dirname "$0")/../.."
platform=${1:-cpu}
ascend=vllm-ascend:v0.23.0rc1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
images=${ONBEAT_IMAGES:-onbeat}
tag=${ONBEAT_TAG:-$version-$platform}
python=.venv/bin/python
[ -x "$python" ] || python=python3

# PyPI has no versions with a local part such as torch==2.13.0+cpu: pip of the host fetches them, from where it is told to.
fetch_local_versions() {
    local requirement file
    for requirement in $(grep -oE '^[A-Za-z0-9_.-]+==[^ ;]*\+[^ ;]+' "requirements/$platform.lock" 2>/dev/null || true); do
        file=${requirement%%==*}
        file=${file//-/_}-${requirement##*==}
        if compgen -G "deploy/docker/wheels/$file-*.whl" >/dev/null; then continue; fi
        echo "images: fetching $requirement" >&2
        "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --dest deploy/docker/wheels "$requirement" \
            || echo "images: pip on this host has no $requirement; PIP_INDEX_URL or PIP_EXTRA_INDEX_URL must offer it" >&2
    done
}

build() {
    local service=$1 base=$2 replaced
    replaced=$(docker image inspect --format '{{.Id}}' "$images/$service:$tag" 2>/dev/null || true)
    echo "images: $images/$service:$tag from $base" >&2
    docker build --quiet --file "deploy/docker/$service.Dockerfile" --tag "$images/$service:$tag" \
        --build-arg BASE_IMAGE="$base" --build-arg PLATFORM="$platform" \
        --build-arg PIP_INDEX_URL="${PIP_INDEX_URL:-}" --build-arg PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-}" \
        --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" \
        --build-arg SOURCE="${ONBEAT_SOURCE:-unknown}" .
    # Nobody asks for an image without a name. One that still has a name, or a container, stays.
    if [ -n "$replaced" ] && [ "$(docker image inspect --format '{{.Id}} {{.RepoTags}}' "$replaced")" = "$replaced []" ]; then
        docker image rm "$replaced" >/dev/null 2>&1 || true
    fi
}

fetch_local_versions
base=$(deploy/docker/base-image.sh)
build broker "$base"
if [ "$platform" = npu ]; then base=${NPU_BASE_IMAGE:-$ascend}; fi
build trainer "$base"
build rollout "$base"
docker image ls --filter "reference=$images/*:$tag" >&2
