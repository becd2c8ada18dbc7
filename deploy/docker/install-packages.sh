#!/bin/sh
# Inside an image build: the pinned packages of requirements/$1.lock into the virtual environment /opt/onbeat.
set -eu
pip() { /tools/bin/pip --python /opt/onbeat/bin/python install --quiet --no-compile --find-links wheels "$@"; }

mkdir -p wheels
if [ "$1" = npu ] && [ ! -e requirements/npu.lock ]; then
    # The base image (vllm-ascend) has PyTorch and torch_npu, fitted to its CANN: they stay as they are.
    python3 -m venv --without-pip --system-site-packages /opt/onbeat
    pip -r requirements/runtime.in
else
    python3 -m venv --without-pip /opt/onbeat
    pip --no-deps -r "requirements/$1.lock"
fi
# On all cores, which pip does not; a few packages carry files of Python 2, which do not compile and are not needed.
/opt/onbeat/bin/python -m compileall -q -j 0 /opt/onbeat/lib >/dev/null || echo "some files do not compile"
