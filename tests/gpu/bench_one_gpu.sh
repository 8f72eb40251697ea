#!/usr/bin/env bash
# Every benchmark that fits one GPU, ours against the bare loop: a file of JSON each, and a table at the end.
# usage, in the repository's root: tests/gpu/bench_one_gpu.sh WHEELS RESULTS
# A table takes about 12 minutes on an H200. SETTINGS="bench_8b_16l" PRECISIONS="bf16" WARMUP=5 STEPS=10 makes a part of
# it; the table has all that lies in RESULTS. WHEELS "-": everything is installed already.
set -euo pipefail
results=$2
mkdir -p "$results"
[ "$1" = - ] || source tests/gpu/bare_machine.sh "$1"
failed=0
for setting in ${SETTINGS-bench_8b_16l bench_llama32_1b}; do
  for precision in ${PRECISIONS-bf16 fp8_delayed}; do
    echo "=== $setting $precision" >&2
    python3 -P -m shardwright.pretrain bench step "experiment=$setting" "precision=$precision" ${AGAINST---against bare} \
      --warmup "${WARMUP:-5}" --steps "${STEPS:-10}" --json ${OVERRIDES:-} > "$results/part" || { failed=1; continue; }
    mv "$results/part" "$results/$setting.$precision.json"
  done
done
rm -f "$results/part"
python3 - "$results" <<'TABLE'
import json, sys
from pathlib import Path

print("| setting | precision | loop | tok/s/GPU | TFLOP/s/GPU | MFU | ms/step (p10-p90) | peak GiB | MHz, °C, W | ours/bare |")
print("|---|---|---|---|---|---|---|---|---|---|")
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    found, (setting, precision) = json.loads(path.read_text()), path.stem.split(".")
    ratio = found["ratio"]
    beside = f"{ratio['overall']:.4f} ± {ratio['spread']:.4f}, losses {ratio['loss_difference']:.0e}" if ratio else "-"
    for each in found["measurements"]:
        gpu = (each["gpus"] or [{}])[0]
        state = [gpu.get(name) for name in ("sm_clock_mhz", "temperature_celsius", "power_watts")]
        milliseconds = [f"{1000 * each[f'{name}_seconds']:.0f}" for name in ("median", "p10", "p90")]
        cells = [
            setting,
            precision,
            each["loop"],
            f"{each['tokens_per_second_per_gpu']:,.0f}",
            f"{each['tflops_per_gpu']:.4g}",
            "-" if each["mfu"] is None else f"{each['mfu']:.1%}",
            f"{milliseconds[0]} ({milliseconds[1]}-{milliseconds[2]})",
            f"{next(iter(each['memory'].values())) / 2**30:.1f}",
            ", ".join("-" if value is None else f"{value:.0f}" for value in state),
            beside,
        ]
        print("|", " | ".join(cells), "|")
TABLE
exit $failed
