# Source this in the repository's root, on a machine that has torch and a GPU but no network:
#   source tests/gpu/bare_machine.sh WHEELS
# WHEELS is a folder with wheels of everything else. `shardwright` is then importable, from these folders.
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$1"/*.whl
mkdir -p "$site/shardwright"
for folder in conf data parallel pretrain slurm; do ln -s "$PWD/$folder" "$site/shardwright/$folder"; done
export PYTHONPATH="$site" PYTHONSAFEPATH=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader
