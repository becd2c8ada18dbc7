#!/bin/sh
# Inside an image build: the pinned packages of requirements/$1.lock into the virtual environment /opt/onbeat.
set -eu
python=/opt/onbeat/bin/python
export PIP_FIND_LINKS=wheels

mkdir -p wheels
if [ "$1" = npu ] && [ ! -e requirements/npu.lock ]; then
    # The base image (vllm-ascend) has PyTorch and torch_npu, fitted to its CANN: they stay as they are.
    python3 -m venv --without-pip --system-site-packages /opt/onbeat
    /tools/bin/pip --python "$python" install --quiet --no-compile -r requirements/direct.in
else
    python3 -m venv --without-pip /opt/onbeat
    /tools/bin/python requirements/install.py --python "$python" "requirements/$1.lock"
fi
# On all cores, which pip does not; a few packages carry files of Python 2, which do not compile and are not needed.
"$python" -m compileall -q -j 0 /opt/onbeat/lib >/dev/null || echo "some files do not compile"
