#!/usr/bin/env bash
# Run tests/gpu on a machine that has torch and a GPU but no network: wheels of everything else lie in a folder.
# usage, in the repository's root: tests/gpu/run_on_bare_machine.sh WHEELS [PYTEST ARGUMENTS]
set -euo pipefail
source tests/gpu/bare_machine.sh "$1"
shift
python3 -m pytest tests/gpu -m gpu -p no:cacheprovider -q "$@"
