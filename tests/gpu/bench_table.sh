#!/usr/bin/env bash
# The tables of docs/log.md: ours against the bare loop, every recipe, what each way to compute a step gains or costs.
# Some 25 minutes on an H200.
# usage, in the repository's root: tests/gpu/bench_table.sh WHEELS RESULTS [PART...]
# Parts: against whole recipes levers. WHEELS is a folder of wheels, or "-" where everything is installed.
set -uo pipefail
results=$2
mkdir -p "$results"
[ "$1" = - ] || source tests/gpu/bare_machine.sh "$1"
shift 2

bench() {  # NAME ARGUMENTS: a table on the terminal, JSON in RESULTS
  echo "=== $1"
  python3 -P -m shardwright.pretrain bench step --warmup "${WARMUP:-3}" --steps "${STEPS:-8}" --json "${@:2}" > "$results/$1.json"
  [ -s "$results/$1.json" ] || return  # refused, and said so
  python3 - "$results/$1.json" <<'ROWS'
import json, sys

found = json.load(open(sys.argv[1]))
points = found if isinstance(found, list) else [found]
first = None
for point in points:
    what = " ".join(point["overrides"][1:])
    for each in point.get("measurements", []):
        first = first or each["tokens_per_second"]
        peak = next(iter(each["memory"].values())) / 2**30
        speed = f"{each['tokens_per_second']:,.0f} | {each['tflops_per_gpu']:.0f} | {each['mfu'] or 0:.1%}"
        print(f"| {what} {each['loop']} | {speed} | {peak:.1f} | {each['tokens_per_second'] / first:.4f} |")
    if "exit_code" in point:
        print(f"| {what} | exit {point['exit_code']} |")
    if point.get("ratio"):
        print("ours / bare", point["ratio"]["overall"], "±", point["ratio"]["spread"])
ROWS
}

[ $# -gt 0 ] || set -- against whole recipes levers
for part in "$@"; do
  case $part in
    against)
      bench against_8b -m experiment=bench_8b_16l precision=bf16,fp8_delayed --against bare
      bench against_1b -m experiment=bench_llama32_1b precision=bf16,fp8_delayed --against bare
      ;;
    whole) bench whole -m experiment=bench_llama3_8b precision=fp8_delayed,bf16 ;;
    recipes) bench recipes -m experiment=bench_8b_16l precision=bf16,fp8_delayed,fp8_guide,fp8_current,fp8_blockwise ;;
    levers)
      fp8="experiment=bench_8b_16l precision=fp8_delayed"
      bench fusion -m $fp8 execution.gradient_accumulation_fusion=true,false
      bench activation $fp8 execution.bias_activation_fusion=false
      bench rope $fp8 execution.apply_rope_fusion=false
      bench loss -m $fp8 execution.cross_entropy=native,unfused
      bench chunks $fp8 execution.cross_entropy_chunks=8
      bench graphs -m $fp8 execution.cuda_graph_impl=local,full_iteration
      bench offload $fp8 execution.cpu_offloading_num_layers=4
      bench full $fp8 model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1
      bench selective -m $fp8 model.recompute_granularity=selective "model.recompute_modules=[core_attn],[mlp]"
      ;;
  esac
done
