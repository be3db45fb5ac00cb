#!/bin/sh
# Installs packages into a virtual environment: tools/install.sh ENVIRONMENT REQUIREMENT...
# uv needs a sixth of the time that pip needs; pip installs where uv cannot be installed or fails.
set -eu
environment=$1
shift

pip_install() {
    "$environment/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check "$@"
}

if pip_install -c constraints.txt uv && "$environment/bin/uv" pip install --quiet --python "$environment/bin/python" "$@"
then exit 0
fi
echo "uv did not install the packages; pip does, which takes some minutes." >&2
pip_install "$@"
