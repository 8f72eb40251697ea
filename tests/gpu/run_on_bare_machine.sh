#!/usr/bin/env bash
# Run tests/gpu on a machine that has torch and a GPU but no network: wheels of everything else lie in a folder.
# usage, in the repository's root: tests/gpu/run_on_bare_machine.sh WHEELS [PYTEST ARGUMENTS]
set -euo pipefail
wheels=$1
shift
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
mkdir -p "$site/shardwright"
for folder in conf data parallel pretrain slurm; do ln -s "$PWD/$folder" "$site/shardwright/$folder"; done
export PYTHONPATH="$site" PYTHONSAFEPATH=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader
python3 -m pytest tests/gpu -m gpu -p no:cacheprovider -q "$@"
