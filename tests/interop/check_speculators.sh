#!/bin/sh
# Build (once) an environment with the speculators package and check that exported heads compute the same in it.
# Usage: check_speculators.sh [environment directory]; PYTHON names the interpreter that makes the environment.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:-"$root/build/venv-interop"}
stamp=$venv/ready-speculators-0.9.0

if [ ! -f "$stamp" ]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # speculators also asks for torchaudio, torchvision and the like, which the heads do not need: so it comes without its
    # dependencies, and with those that its EAGLE-3 model imports.
    "$venv/bin/pip" install -q "torch==2.13.0" "transformers==5.19.0" "datasets>=4.0,<=5.1.0" "jaxtyping>=0.3" \
        "loguru>=0.7.2,<=0.7.3" "openai>=2.0" "pydantic>=2.0" "pydantic-settings>=2.0"
    "$venv/bin/pip" install -q --no-deps "speculators==0.9.0" "hs-connectors==0.9.0"
    touch "$stamp"
fi

cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
PYTHONPATH=$root exec "$venv/bin/python" tests/interop/check_speculators.py
