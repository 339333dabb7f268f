#!/bin/sh
# Install iwopd into an environment: what the Dockerfile runs, and what works the same on any machine.
#   docker/install.sh cpu|cuda ENVIRONMENT SOURCE [EXTRA...]
# SOURCE is this source tree or a wheel. cpu takes torch from IWOPD_TORCH_CPU_INDEX (default: PyTorch's own index of CPU builds;
# empty: as pip is set up), cuda as pip is set up: on Linux, PyPI's builds bring CUDA. PYTHON names the interpreter.
set -eu

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

[ $# -ge 3 ] || fail "usage: docker/install.sh cpu|cuda ENVIRONMENT SOURCE [EXTRA...]"
variant=$1
environment=$2
source=$3
shift 3
case $variant in
cpu | cuda) ;;
*) fail "the variant is cpu or cuda, not '$variant'" ;;
esac
[ -e "$source" ] || fail "there is no source tree or wheel at '$source'"
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$("$python" --version) is too old: Python 3.11 or newer is needed; name one with PYTHON="

extras=$(echo "$*" | tr ' ' ',')
index=
if [ "$variant" = cpu ]; then
    index=${IWOPD_TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
fi

"$python" -m venv "$environment"
# torch first and by itself: another index must not answer for anything else. NOT_TORCH=1 leaves it to who prepared the environment.
if [ -z "${NOT_TORCH:-}" ]; then
    "$environment/bin/python" -m pip install --no-cache-dir ${index:+--index-url "$index"} "torch>=2.6"
fi
# shellcheck disable=SC2086 # options are words
"$environment/bin/python" -m pip install --no-cache-dir ${IWOPD_PIP_OPTIONS:-} "$source${extras:+[$extras]}"
"$environment/bin/iwopd" --version
