"""Our analysis of CUDA traces against Holistic Trace Analysis's; needs ``pip install HolisticTraceAnalysis``."""

from __future__ import annotations

import random

import pytest
from traces import event, profile_of, steps, write_trace

hta = pytest.importorskip("hta.trace_analysis", reason="needs HolisticTraceAnalysis")

COMPUTE = {7: "sm90_xmma_gemm_f32f32", 22: "elementwise_kernel"}  # by stream
COMMUNICATION = {20: "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(Args)", 21: "ncclDevKernel_SendRecv(Args)"}
WHOLE = 0.75  # makes whole microseconds of the clock's: HTA rounds down to them


def kernels(draw):
    """Kernels one after another on every stream, each with its launch, from which HTA knows the kernel."""
    for stream, name in (COMPUTE | COMMUNICATION).items():
        end = 100
        for i in range(40):
            start = end + draw.randint(0, 60)
            end = start + draw.randint(1, 90)
            number = 100 * stream + i
            ids = {"External id": number, "correlation": number}
            yield event("cuda_runtime", "cudaLaunchKernel", 10 + i, 11 + i, 1, cbid=211, **ids)
            yield event("kernel", name, start + WHOLE, end + WHOLE, stream, device=0, stream=stream, context=1, **ids)


@pytest.mark.parametrize("seed", range(3))
def test_overlap_and_compute_are_those_of_holistic_trace_analysis(tmp_path, seed):
    files = {}
    for rank in (0, 1):
        draw = random.Random(10 * seed + rank)
        files[rank] = str(write_trace(tmp_path, rank, [*steps(0, 9000), *kernels(draw)]))
    found = hta.TraceAnalysis(trace_files=files, trace_dir=str(tmp_path / "profiler"))
    overlap = found.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    times = found.get_temporal_breakdown(visualize=False).set_index("rank")
    for rank, ours in profile_of(tmp_path)["ranks"].items():
        theirs = times.loc[int(rank)]
        assert 0.1 < ours["overlap_ratio"] < 0.9
        assert 100 * ours["overlap_ratio"] == pytest.approx(overlap[int(rank)], abs=0.006)
        assert 1000 * ours["compute_ms_per_step"] == pytest.approx(theirs["compute_time(us)"])
        assert 1000 * ours["exposed_comm_ms"] == pytest.approx(theirs["non_compute_time(us)"])
