#!/usr/bin/env bash
# On a machine with a GPU, from anywhere, nothing installed: everything that claims CUDA, checked and timed.
#
#   benchmarks/gpu.sh --plan         parts, their seconds, what each decides
#   benchmarks/gpu.sh [PART ...]     default: bytes codecs reduction model (5 minutes), gradients strategies quality (5)
#   benchmarks/gpu.sh --merge        the tables of the last call into benchmarks/gpu.md, a section for each card
#
#   PYTHON=python3                   with torch, triton, transformers, numba, numpy, pydantic, perhaps through PYTHONPATH
#   OUT=results/gpu                  a table and a JSON of each part; summary.md
#   DEVICE=cpu                       tries the whole script where there is no GPU, at a small size (SIZE=full: at its own)
#   FRESH=1                          repeats what is finished; else a finished part is skipped and an unfinished one goes on
#   LIMIT=SECONDS                    of each part, in place of the one below
#   TOTAL=SECONDS                    of all parts: the last ones get what is left
#
# A part that fails or hangs does not stop the others. Exit code 0: all that ran is right (a missed target of speed is
# reported, and no failure); 1: something is wrong or unfinished; 2: nothing can run here.
set -uo pipefail
cd "$(dirname "$0")/.."
export DEVICE=${DEVICE:-cuda} OUT=${OUT:-results/gpu} PYTHONUNBUFFERED=1
export PYTHONPATH=src:benchmarks:tests/helpers${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # asking for GPUs must not keep processes that are forked later from using them
export TORCHINDUCTOR_COMPILE_THREADS=1 # workers may have no child processes
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} # all ranks are here
[ "$DEVICE" != cpu ] || export SIZE=${SIZE:-small}
python=${PYTHON:-python3}
# Part, seconds, what it decides; the most valuable first.
plan='bytes 60 whether the CUDA kernels write the bytes of the reference implementations
codecs 75 how far encoding and decoding are from the speed of memory
reduction 75 below which link speed a method pays, how much of a reduction hides under the backward pass
model 75 what a step of 62m costs, and how much torch.compile takes off it
gradients 60 how fast rows, projections, norms and private steps are
strategies 75 whether every strategy trains as on the CPU, with the bytes of the closed form and no wait of the host
quality 150 what methods cost in perplexity at eight ranks, simulated in one process'
[ "${1:-}" != --plan ] || { printf 'part       s    decides\n'; while read -r part seconds decides; do
    printf '%-10s %-4s %s\n' "$part" "$seconds" "$decides"; done <<< "$plan"; exit 0; }
[ "${1:-}" != --merge ] || exec "$python" -m gpu.part merge benchmarks/gpu.md
declare -A limits=()
parts=()
while read -r part seconds _; do limits[$part]=$seconds; parts+=("$part"); done <<< "$plan"
[ $# = 0 ] || parts=("$@")
for part in "${parts[@]}"; do
    [ -n "${limits[$part]:-}" ] || { echo "gpu.sh: no part $part; there are: ${!limits[*]}" >&2; exit 2; }
done

mkdir -p "$OUT"
timeout 120 "$python" -m gpu.part environment || exit 2

for part in "${parts[@]}"; do
    if [ -z "${FRESH:-}" ] && grep -q '"finished": true' "$OUT/$part.json" 2>/dev/null; then
        echo "== $part: finished before (FRESH=1 repeats it)"
        continue
    fi
    echo "== $part"
    [ -z "${FRESH:-}" ] || rm -f "$OUT/$part.json"
    seconds=${LIMIT:-${limits[$part]}}
    left=$((${TOTAL:-100000} - SECONDS - 30))
    [ "$seconds" -le "$left" ] || seconds=$left
    [ "$seconds" -gt 15 ] || { echo "== $part: no time left"; continue; }
    # The part ends by its own clock; the timeout is for what hangs.
    LIMIT=$seconds timeout --kill-after=5 $((seconds + 40)) "$python" -m "gpu.$part" 2>&1 | tee "$OUT/$part.log"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || echo "== $part: exit code $code"
done

echo "== summary"
"$python" -m gpu.part summary "${parts[@]}" | tee "$OUT/summary.md"
exit "${PIPESTATUS[0]}"
