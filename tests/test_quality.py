"""Quality against time: the target, censoring, the fixed time, and efficiency against one rank."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gradwire.config import Run
from gradwire.files import write_json
from gradwire.measurement.quality import read
from gradwire.report.summarize import collect

RUN = Run("ddp", "none", 2, "none", 0)


def add(folder, run, ms, ppls, every=2, status="ok", **fields):
    """A run of two ranks: each step takes ``ms`` on rank 0 and 1 more on rank 1; one evaluation every few steps."""
    steps = every * len(ppls)
    rows = [
        {
            "step": step,
            "rank": rank,
            "step_ms": float(ms + rank),
            "val_loss": math.log(ppls[step // every]) if (step + 1) % every == 0 else None,
        }
        for step in range(steps)
        for rank in range(2)
    ]
    place = folder / "runs" / run.path
    record = {
        "schema_version": 1,
        "run_name": run.path,
        **run._asdict(),
        "status": status,
        "steps": steps,
        "measured_steps": steps,
        "val_ppl": ppls[-1] if status == "ok" else None,
        "quality_from": "train" if status == "ok" else None,
        "environment": {"processor": "x", "cores": 2, "device": "cpu"},
    }
    write_json(place / "record.json", record | fields)
    schema = pa.schema(
        [("step", pa.int64()), ("rank", pa.int32()), ("step_ms", pa.float64()), ("val_loss", pa.float64())]
    )
    pq.write_table(pa.Table.from_pylist(rows[::-1], schema=schema), place / "steps.parquet")


def times_to_quality(folder):
    fields = ("target_reached", "time_to_target_ppl_s", "steps_to_target_ppl", "ppl_at_fixed_time")
    return {row.compressor: tuple(getattr(row, field) for field in fields) for row in collect(folder)}


def test_a_curve_is_by_the_slowest_rank_and_in_the_order_of_steps(tmp_path):
    add(tmp_path, RUN, 10, [80.0, 60.0, 50.0])
    curve = read(tmp_path / "runs" / RUN.path / "steps.parquet")
    assert curve.steps.tolist() == [2, 4, 6]
    assert curve.seconds.tolist() == pytest.approx([0.022, 0.044, 0.066])
    assert [math.exp(loss) for loss in curve.losses] == pytest.approx([80, 60, 50])
    assert curve.total_s == pytest.approx(0.066)


def test_targets_are_reached_censored_or_unknown(tmp_path):
    add(tmp_path, RUN, 10, [80.0, 60.0, 50.0])  # the target is 52.5; 66 ms
    add(tmp_path, RUN._replace(compressor="fast"), 4, [90.0, 52.4, 52.0])  # 30 ms: the fixed time
    add(tmp_path, RUN._replace(compressor="poor"), 7, [95.0, 70.0, 52.6])
    add(tmp_path, RUN._replace(compressor="lost"), 1, [99.0], status="diverged", reason="the loss is nan")
    add(tmp_path, RUN._replace(compressor="alone", seed=1), 3, [70.0])
    assert times_to_quality(tmp_path) == {
        "none": (True, pytest.approx(0.066), 6, pytest.approx(80)),
        "fast": (True, pytest.approx(0.020), 4, pytest.approx(52)),
        "poor": (False, None, None, pytest.approx(95)),
        "lost": (False, None, None, None),
        "alone": (None, None, None, pytest.approx(70)),
    }


def test_a_quality_that_comes_from_another_run_says_nothing_about_this_one_s_time(tmp_path):
    add(tmp_path, RUN, 10, [80.0, 60.0], quality_from="benchmarks/quality.jsonl: ddp/none/ws2/none/seed0")
    assert times_to_quality(tmp_path) == {"none": (None, None, None, None)}


def test_broken_steps_are_reported_and_spare_the_row(tmp_path, capsys):
    add(tmp_path, RUN, 10, [80.0, 60.0])
    path = tmp_path / "runs" / RUN.path / "steps.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    (row,) = collect(tmp_path)
    assert (row.status, row.target_reached) == ("ok", None)
    assert f"{path} is unusable" in capsys.readouterr().err


def test_scaling_efficiency_is_per_rank_against_one_rank_of_the_same_label_and_machine(tmp_path):
    other = {"processor": "y", "cores": 2, "device": "cpu"}
    alone = RUN._replace(world_size=1)
    for seed, rate in ((0, 900.0), (1, 1100.0)):
        add(tmp_path, alone._replace(seed=seed), 10, [50.0], tokens_per_s=rate)
    add(tmp_path, alone._replace(compressor="int8"), 10, [50.0], tokens_per_s=500.0)
    add(tmp_path, RUN, 10, [50.0], tokens_per_s=1500.0)
    add(tmp_path, RUN._replace(link="1gbit"), 10, [50.0], tokens_per_s=800.0)
    add(tmp_path, RUN._replace(compressor="int8"), 10, [50.0], tokens_per_s=800.0)
    add(tmp_path, RUN._replace(compressor="topk"), 10, [50.0], tokens_per_s=1600.0)
    add(tmp_path, RUN._replace(compressor="else"), 10, [50.0], tokens_per_s=1600.0, environment=other)
    add(tmp_path, RUN._replace(strategy="fsdp2"), 10, [50.0], tokens_per_s=1600.0)
    found = {row.run_name: row.scaling_efficiency for row in collect(tmp_path)}
    assert found == {
        "ddp/else/ws2/none/seed0": None,
        "ddp/int8/ws1/none/seed0": None,
        "ddp/int8/ws2/none/seed0": pytest.approx(0.8),
        "ddp/none/ws1/none/seed0": None,
        "ddp/none/ws1/none/seed1": None,
        "ddp/none/ws2/1gbit/seed0": pytest.approx(0.4),
        "ddp/none/ws2/none/seed0": pytest.approx(0.75),
        "ddp/topk/ws2/none/seed0": pytest.approx(0.8),
        "fsdp2/none/ws2/none/seed0": None,
    }


def test_effective_bandwidth_is_a_rank_s_bytes_of_a_step_over_its_communication_time(tmp_path):
    sent = {"bytes_raw_total": 3_200_000, "bytes_compressed_total": 800_000}
    add(tmp_path, RUN, 10, [50.0, 40.0], **sent)
    gathered = {"bytes_parameters_raw_total": 1_600_000, "bytes_parameters_total": 400_000}
    add(tmp_path, RUN._replace(strategy="fsdp2"), 10, [50.0, 40.0], **sent, **gathered)
    profile = {
        "comm_time_ms_per_step": 5.0,
        "comm_time_ms_by_op_per_step": {},
        **dict.fromkeys(("comm_ratio", "compute_ms_per_step", "encode_ms_per_step", "decode_ms_per_step"), 0.5),
        **dict.fromkeys(("exposed_comm_ms", "overlap_ratio"), 0.5),
        "meter_agrees": False,
        "meter_over_trace": {"encode": 1.5},
    }
    for row in collect(tmp_path):
        assert row.effective_bw_raw_gbps is None
        write_json(tmp_path / "runs" / row.run_name / "profile.json", profile)
    ddp, fsdp2 = collect(tmp_path)
    assert ddp.effective_bw_raw_gbps == pytest.approx(8 * 400_000 / 0.005 / 1e9)  # two ranks, four steps
    assert ddp.effective_bw_compressed_gbps == pytest.approx(8 * 100_000 / 0.005 / 1e9)
    assert fsdp2.effective_bw_raw_gbps == pytest.approx(8 * 600_000 / 0.005 / 1e9)
    assert fsdp2.effective_bw_compressed_gbps == pytest.approx(8 * 150_000 / 0.005 / 1e9)
    assert (ddp.meter_agrees, ddp.meter_over_trace) == (False, {"encode": 1.5})
