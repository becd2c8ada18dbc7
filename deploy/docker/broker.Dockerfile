# The broker of Onbeat: no PyTorch, no engine. The context is the top of the repository; `make images` builds all three.
ARG BASE_IMAGE=python:3.11-slim-bookworm

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

FROM tools AS packages
COPY requirements/broker.lock requirements/
RUN sh deploy/docker/install-packages.sh broker

FROM packages AS code
COPY LICENSE README.md pyproject.toml ./
COPY onbeat onbeat
COPY services services
COPY examples/quickstart.toml examples/
RUN sh deploy/docker/install-code.sh

FROM base
COPY --from=packages /opt/onbeat /opt/onbeat
COPY --from=code /code /opt/onbeat
COPY deploy/docker/make_secrets.py deploy/redis/users.acl.example /opt/onbeat/share/
USER 10001:10001
WORKDIR /data
ENV PATH=/opt/onbeat/bin:$PATH \
    HOME=/tmp \
    TMPDIR=/tmp \
    PYTHONUNBUFFERED=1 \
    ONBEAT_LOG_FORMAT=json \
    ONBEAT_DATA_DIR=/data \
    ONBEAT_CACHE_DIR=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
EXPOSE 8800
ENV ONBEAT_HOST=0.0.0.0 \
    ONBEAT_PORT=8800 \
    ONBEAT_HAS_MODEL_FOLDERS=false \
    ONBEAT_URL=http://127.0.0.1:8800
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 CMD ["python", "-I", "-c", \
    "import http.client as h, os, ssl, sys; p = int(os.environ['ONBEAT_PORT']); c = h.HTTPSConnection('127.0.0.1', p, timeout=4, context=ssl._create_unverified_context()) if os.environ.get('ONBEAT_TLS_CERT') else h.HTTPConnection('127.0.0.1', p, timeout=4); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["tini", "--", "/opt/onbeat/bin/python", "-P", "-m", "services.broker"]
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="onbeat broker" \
      org.opencontainers.image.description="REST API, conductor and ledger of jobs" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
