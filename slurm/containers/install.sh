#!/bin/bash
# Installs shardwright, with everything that constraints.txt pins, into a virtual environment of its own:
#
#   [PYTHON=python3.12] [APEX=TAG] install.sh NEW_FOLDER [CHECKOUT]
#
# Where there is a CUDA toolkit (CUDA_HOME, else /usr/local/cuda), Transformer Engine's torch part is compiled against the
# torch that was just installed, and with APEX=25.08 (a tag or branch) NVIDIA's apex too. Dockerfile and shardwright.def
# call this; so may you.
set -euo pipefail
target=${1:?install.sh NEW_FOLDER [CHECKOUT]} checkout=$(realpath "${2:-"$(dirname "$0")"/../..}")
export PIP_CONSTRAINT=$checkout/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

"${PYTHON:-python3.12}" -m venv "$target"
pip() { "$target/bin/python" -m pip "$@"; }
pip install "${checkout}[telemetry,sentencepiece,muon]"

export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
if [ -x "$CUDA_HOME/bin/nvcc" ]; then
  # CUDA's headers are the toolkit's; those of NCCL and cuDNN are in the packages that torch brought.
  packages=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
  CPATH=$(printf '%s:' "$packages"/*/include)
  export CPATH
  # Without NVTE_PYTORCH_FORCE_BUILD its setup.py looks for a wheel on GitHub that fits torch, CUDA and Python.
  pip install setuptools wheel ninja
  NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE pip install --no-build-isolation "${checkout}[te]"
  if [ -n "${APEX:-}" ]; then
    source=$(mktemp -d)
    git clone --depth 1 --branch "$APEX" https://github.com/NVIDIA/apex "$source"
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation --no-deps "$source"
    rm -rf "$source"
  fi
else
  echo "install.sh: no CUDA toolkit in $CUDA_HOME: without Transformer Engine and apex, for the CPU" >&2
fi
"$target/bin/shardwright" preflight --versions || echo "install.sh: what is unfit stands above" >&2
