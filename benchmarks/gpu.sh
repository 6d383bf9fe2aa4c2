#!/usr/bin/env bash
# On a machine with a GPU, from anywhere, nothing installed: the CUDA forms against the plain ones, then the benchmark.
#
#   benchmarks/gpu.sh [FILE.json]      PYTHON=python3 by default; further packages may be on PYTHONPATH
#
# Needs torch, triton, numba, numpy and pydantic. With pytest, scipy and hypothesis the check is that of the tests, with
# tabulate there is a table. Under 10 minutes. DEVICE=cpu tries the script itself where there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
json=${1:-compressors-$device.json}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

has() { "$python" -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))' "$@"; }

for package in torch triton numba numpy pydantic; do
    has "$package" || { echo "gpu.sh: $python has no $package; put it on PYTHONPATH" >&2; exit 2; }
done
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'

echo "== the fused forms have the plain forms' bytes"
if has pytest scipy hypothesis; then
    timeout 270 "$python" -m pytest tests/compressors/test_kernels.py tests/collectives/test_meter.py -q -p no:cacheprovider
else
    timeout 270 "$python" - "$device" <<'CHECK'
"""Without pytest and what the tests stand on: the same comparison for every line of the benchmark."""

import sys

import torch

from gradwire.compressors.bench_cases import cases

device = sys.argv[1]
failed = 0


def generator():
    return torch.Generator(device).manual_seed(3)


for case in [case for case in cases() if case.own]:
    problems = []
    for shape in (0, 1, 257, 5003, (64, 129)):
        try:
            form = (shape,) if isinstance(shape, int) else shape
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
            wire = case.codec.encode(x, generator=generator())
            if not torch.equal(wire, case.codec.to_wire(x, generator())):
                problems.append(f"encode differs at {shape}")
            if not torch.equal(case.codec.decode(wire, shape).view(-1), case.codec.from_wire(wire, form).view(-1)):
                problems.append(f"decode differs at {shape}")
            if x.numel() > 1:
                x.view(-1)[x.numel() // 2] = float("nan")
                flag = torch.zeros(1, dtype=torch.uint8, device=device)
                case.codec.encode(x, generator=generator(), flag=flag)
                if not flag.item():
                    problems.append(f"NaN is not flagged at {shape}")
        except Exception as error:
            problems.append(f"{shape}: {type(error).__name__}: {str(error)[:300]}")
    failed += bool(problems)
    print(case.name, case.options or "", case.form(torch.device(device)), "; ".join(problems) or "ok", flush=True)
sys.exit(bool(failed))
CHECK
fi
checked=$?

echo "== the benchmark"
timeout 300 "$python" -m gradwire bench compressors --device "$device" --json "$json" ${NUMEL:+--numel "$NUMEL"}
timed=$?
echo "gpu.sh: check $checked, benchmark $timed (0 is good); results in $json"
exit $((checked || timed))
