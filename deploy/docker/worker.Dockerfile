# SERVICE of Onbeat: trainer or rollout, which share all large layers. The context is the top of the repository;
# `make images` builds both, and broker.Dockerfile.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG PLATFORM=cpu
ARG SERVICE=rollout

FROM ${BASE_IMAGE} AS base
# A base image that has Python keeps it; a bare Debian gets its own.
RUN set -eu; \
    packages="ca-certificates tini"; \
    command -v python3 >/dev/null || packages="$packages python3"; \
    apt-get update; \
    apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/*; \
    groupadd --gid 10001 onbeat; \
    useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin onbeat; \
    install -d -o 10001 -g 10001 /data /cache

FROM base AS tools
RUN set -eu; \
    packages="gcc libc6-dev"; \
    python3 -c 'import ensurepip' 2>/dev/null || packages="$packages python3-venv python3-dev"; \
    apt-get update; \
    apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/image.lock requirements/install.py requirements/
RUN python3 -m venv /tools && /tools/bin/python requirements/install.py requirements/image.lock
COPY deploy/docker/install-packages.sh deploy/docker/install-code.sh deploy/docker/

# Only a change of this list, not each change of pyproject.toml, builds the packages anew.
FROM tools AS direct
COPY requirements/direct.py requirements/
COPY pyproject.toml ./
RUN python3 requirements/direct.py local > direct.in

FROM tools AS packages
ARG PLATFORM
COPY requirements/${PLATFORM}.* requirements/
COPY --from=direct /src/direct.in requirements/
COPY deploy/docker/wheels wheels
RUN sh deploy/docker/install-packages.sh "$PLATFORM"

FROM packages AS code
COPY LICENSE README.md pyproject.toml ./
COPY onbeat onbeat
COPY services services
COPY examples/quickstart.toml examples/
RUN sh deploy/docker/install-code.sh

# What the platforms need at run time. Triton compiles its launchers when a kernel is first used.
FROM base AS on-cpu
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ENV TORCH_COMPILE_DISABLE=1

FROM base AS on-cuda
ARG PLATFORM
RUN set -eu; \
    [ "$PLATFORM" = cuda ] || exit 0; \
    packages="libnuma1 gcc libc6-dev"; \
    [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || packages="$packages python3-dev"; \
    apt-get update; \
    apt-get install -y --no-install-recommends $packages; \
    rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base AS on-npu

FROM on-${PLATFORM} AS worker
COPY --from=packages /opt/onbeat /opt/onbeat
COPY --from=code /code /opt/onbeat
USER 10001:10001
WORKDIR /data
ENV PATH=/opt/onbeat/bin:$PATH \
    HOME=/tmp \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296 \
    TMPDIR=/tmp \
    PYTHONUNBUFFERED=1 \
    ONBEAT_LOG_FORMAT=json \
    ONBEAT_DATA_DIR=/data \
    ONBEAT_CACHE_DIR=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    ONBEAT_WEIGHTS_HOST=0.0.0.0 \
    ONBEAT_WEIGHTS_PORT=8801 \
    ONBEAT_METRICS_HOST=0.0.0.0 \
    ONBEAT_METRICS_PORT=8802
EXPOSE 8801 8802
HEALTHCHECK --interval=5s --timeout=5s --start-period=180s --retries=6 CMD ["python", "-I", "-c", \
    "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['ONBEAT_METRICS_PORT']), timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]

FROM worker AS trainer
ENTRYPOINT ["tini", "--", "/opt/onbeat/bin/python", "-P", "-m", "services.trainer"]
LABEL org.opencontainers.image.description="Takes jobs, trains the policy and serves its weights"

FROM worker AS rollout
ENV GRPC_ENABLE_FORK_SUPPORT=0
ENTRYPOINT ["tini", "--", "/opt/onbeat/bin/python", "-P", "-m", "services.rollout"]
LABEL org.opencontainers.image.description="Generates and scores responses with the newest weights"

FROM ${SERVICE}
ARG SERVICE
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="onbeat $SERVICE" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
