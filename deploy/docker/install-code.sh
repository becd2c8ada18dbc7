#!/bin/sh
# Inside an image build: Onbeat itself into /code, which is laid over /opt/onbeat, and the list of all packages (SBOM).
set -eu
/tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
/tools/bin/pip --python /opt/onbeat/bin/python install --quiet --no-deps --prefix /code dist/onbeat-*.whl
cp -a /code/. /opt/onbeat/
/tools/bin/cyclonedx-py environment --of JSON --output-reproducible --output-file /code/sbom.json /opt/onbeat/bin/python
