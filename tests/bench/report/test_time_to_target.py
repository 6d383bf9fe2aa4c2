"""Quality against time: the target, censoring, the fixed time, and efficiency against one rank.

Of `tables/across_runs.py`.
"""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_results import as_read

from gradwire.base.errors import BadInput
from gradwire.base.files import write_json
from gradwire.bench.config import Run, experiment
from gradwire.bench.report.tables.across_runs import collect, joined, read_curve, with_quality
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.summary import summary
from gradwire.bench.report.tables.time_to_loss import by_target, cells

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


def compiling(folder, run, ms):
    """Let the run's first step take longer on rank 1."""
    path = folder / "runs" / run.path / "steps.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        row["step_ms"] += ms * (row["step"] == 0 and row["rank"] == 1)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def ask(folder, runs, **targets):
    """The list of runs that the experiment asks for, with its targets."""
    asked = [
        {**run._asdict(), "excluded": None, "targets": {"ppl": [], "relative_to": None, **targets}} for run in runs
    ]
    write_json(folder / "expected.json", asked)


def times_to_quality(folder):
    fields = ("target_reached", "time_to_target_ppl_s", "steps_to_target_ppl", "ppl_at_fixed_time")
    return {row.compressor: tuple(getattr(row, field) for field in fields) for row in collect(folder)}


def test_a_curve_is_by_the_slowest_rank_in_the_order_of_steps_and_without_what_the_first_compiles(tmp_path):
    add(tmp_path, RUN, 10, [80.0, 60.0, 50.0])
    compiling(tmp_path, RUN, 9_000)
    curve = read_curve(tmp_path / "runs" / RUN.path / "steps.parquet")
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


def test_broken_steps_are_reported_and_leave_the_row(tmp_path, capsys):
    add(tmp_path, RUN, 10, [80.0, 60.0])
    path = tmp_path / "runs" / RUN.path / "steps.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    (row,) = collect(tmp_path)
    assert (row.status, row.target_reached) == ("ok", None)
    assert f"{path} is unusable" in capsys.readouterr().err


def test_scaling_efficiency_is_per_rank_against_one_rank_of_the_same_label_machine_and_seed(tmp_path):
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
        "ddp/none/ws2/1gbit/seed0": pytest.approx(4 / 9),
        "ddp/none/ws2/none/seed0": pytest.approx(7.5 / 9),
        "ddp/topk/ws2/none/seed0": pytest.approx(8 / 9),
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


TO_TARGET = ("steps_to_target", "time_to_target_s", "bytes_to_target")


def to_target(row):
    return tuple(getattr(row, field) for field in TO_TARGET)


def with_bytes(folder, run, sent):
    """Let each rank's reducer have sent ``sent`` bytes in every third step, and a byte in the others."""
    path = folder / "runs" / run.path / "steps.parquet"
    table = pq.read_table(path)
    each = [sent if step % 3 == 2 else 1 for step in table["step"].to_pylist()]
    pq.write_table(table.append_column("bytes_sent", pa.array(each, pa.int64())), path)


def test_time_steps_and_bytes_to_each_target(tmp_path):
    """Two of three seeds reach 60; the framework's own bytes are in equal parts; nobody reaches 40."""
    cell = RUN._replace(compressor="diloco")
    runs = [*(RUN._replace(seed=seed) for seed in range(2)), *(cell._replace(seed=seed) for seed in range(3))]
    ask(tmp_path, runs, ppl=[60, 40], relative_to="none")
    curves = [[80, 60, 50], [80, 70, 55], [70, 59, 51], [90, 55, 54], [99, 98, 97]]
    for run, ms, ppls in zip(runs, (10, 12, 4, 5, 6), curves, strict=True):
        loss = math.log(ppls[-1]) - 2e-7  # the command perplexity rounds differently
        add(tmp_path, run, ms, ppls, bytes_compressed_total=600, val_loss=loss)
        if run.compressor == "diloco":
            with_bytes(tmp_path, run, 100)
        else:
            with_bytes(tmp_path, run, None)
    add(tmp_path, cell._replace(seed=2), 6, [99], status="diverged", reason="the loss is nan")
    with_bytes(tmp_path, cell._replace(seed=2), 100)
    rows = {(row.compressor, row.seed): row for row in collect(tmp_path)}
    ms = pytest.approx
    assert to_target(rows["none", 0]) == (
        {"60": 4, "40": None, "none": 6},
        {"60": ms(0.044), "40": None, "none": ms(0.066)},
        {"60": 400, "40": None, "none": 600},
    )
    assert to_target(rows["none", 1])[0] == {"60": 6, "40": None, "none": 6}
    assert to_target(rows["diloco", 0]) == (
        {"60": 4, "40": None, "none": None},
        {"60": ms(0.020), "40": None, "none": None},
        {"60": 2 * (100 + 3), "40": None, "none": None},
    )
    assert to_target(rows["diloco", 1])[0] == {"60": 4, "40": None, "none": 4}, "its own seed's baseline is worse"
    assert to_target(rows["diloco", 2])[0] == {"60": None, "40": None}, "there is no such seed to compare with"
    reached = by_target(cells(rows.values(), PerplexityReference.of("here", rows.values())))
    table = {(line[0].text, line[3].text): [entry.text for entry in line[4:]] for line in reached.rows}
    assert table["60", "diloco"] == ["3", "2 of 3", "4", "0.000", "0.0"]
    assert table["40", "none"] == ["2", "0 of 2", "∞", "∞", "∞"]
    assert table["none", "diloco"][:3] == ["2", "1 of 2", "∞"]
    text = summary(as_read(list(rows.values())))
    assert "## Time to target" in text and "∞" in text.split("## Time to target")[1]


@pytest.mark.parametrize(
    ("config", "seconds"),
    [({}, 4 * 0.25), ({"dense_steps": 3}, 3 * 2.0 + 0.25), ({"dense_steps": 5}, 4 * 2.0)],
    ids=str,
)
def test_a_shaped_run_takes_the_steps_of_the_long_one_at_its_own_step_time(tmp_path, config, seconds):
    """And of its dense steps at the baseline's on the same link; seeds keep their own steps."""
    cell = RUN._replace(compressor="diloco")
    long, short, link = tmp_path / "long", tmp_path / "short", cell._replace(link="2mbit")
    ask(long, [cell], ppl=[60, 40])
    of_short = {"method": "onebit", **{key: config[key] for key in config if key != "dense_steps"}}
    config = {"method": "onebit", **config}
    add(long, cell, 10, [80.0, 60.0, 50.0], bytes_compressed_total=600, val_loss=math.log(50), compress_config=config)
    with_bytes(long, cell, None)
    untold = {"quality_from": None, "val_ppl": None}
    add(short, link, 1, [1.0], step_time_ms_mean=250.0, compress_config=of_short, **untold)
    add(short, link._replace(compressor="none"), 1, [1.0], step_time_ms_mean=2000.0, **untold)
    add(short, RUN, 1, [1.0], step_time_ms_mean=500.0, **untold)
    found = PerplexityReference.of("long", collect(long))
    [taken, *others], complaints = with_quality(collect(short), found)
    assert len(complaints) == 2 and taken.compressor == "diloco"
    times = None if seconds is None else {"60": pytest.approx(seconds), "40": None}
    assert to_target(taken) == ({"60": 4, "40": None}, times, {"60": 400, "40": None})
    assert taken.val_ppl == 50 and taken.quality_from == "long: ddp/diloco/ws2/none/seed0"
    of_link = [one.model_copy(update={"step_time_ms_p50": one.step_time_ms_mean}) for one in (taken, *others)]
    line = next(line for line in by_target(cells(of_link, found)).rows if line[0].text == "60")
    assert line[-1].text == ("–" if seconds is None else f"{seconds:.1f}")


def test_a_run_for_times_only_takes_the_perplexity_of_its_cell_without_a_link(tmp_path):
    ask(tmp_path, [RUN, RUN._replace(seed=1), RUN._replace(link="2mbit")], ppl=[60])
    add(tmp_path, RUN, 10, [80.0, 50.0])
    add(tmp_path, RUN._replace(seed=1), 10, [80.0, 51.0])
    untold = {"quality_from": None, "val_ppl": None}
    add(tmp_path, RUN._replace(link="2mbit"), 100, [1.0], **untold)
    for run in (RUN, RUN._replace(seed=1), RUN._replace(link="2mbit")):
        with_bytes(tmp_path, run, 100)
    rows, reference, notes = joined(tmp_path)
    taken = {(row.link, row.seed): (row.val_ppl, row.steps) for row in rows}
    assert taken == {("none", 0): (50.0, 4), ("none", 1): (51.0, 4), ("2mbit", 0): (50.0, 2)}
    (short,) = [row for row in rows if row.link == "2mbit"]
    assert short.quality_from == f"{tmp_path}/results.jsonl: {RUN.path}" and notes == []
    assert {run.seed for run in reference.seeds(short).values()} == {0, 1}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"relative_to": "bf16"}, "unknown compressor in targets.relative_to 'bf16'"),
        ({}, "targets: give `ppl` or `relative_to`"),
        ({"ppl": [0.5]}, "targets.ppl.0 must be greater than 1"),
        ({"perplexity": [3]}, "unknown key in targets 'perplexity'"),
    ],
)
def test_targets_that_cannot_be_are_refused(targets, message):
    with pytest.raises(BadInput, match=message):
        experiment({"name": "x", "compressors": {"none": {}}, "grid": {}, "targets": targets})
