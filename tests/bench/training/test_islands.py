"""Runs of strategy hsdp: bytes by class of link, resumption, optimizers between islands, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from diagonals import chosen
from small_runs import losses, run, words

from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell, Run, experiment
from gradwire.bench.launch.links import probe
from gradwire.comm.closed_forms import parameters_unhooked

INT8 = {"method": "int8", "rounding": "stochastic", "error_feedback": True}
RAW = 4  # bytes of a float32


def trained(world, shards, folder, cell, *more, size=4, islands=2, strategy="hsdp", **changes):
    arguments = {"strategy": strategy, "islands": islands, "comm_config_json": json.dumps(cell), **changes}
    results = world(size).run(run, words(shards, folder, *more, **arguments))
    return [rows for rows, _ in results], results[0][1]


def test_bytes_by_class_of_link_are_their_closed_forms(world, shards, tmp_path):
    cells = {"none": {}, "both": {**INT8, "inside": {"method": "bf16", "algorithm": "exchange"}}}
    short = {"steps": 3, "eval_every": 0}
    given = {"size": 2, "islands": 1, "strategy": "fsdp2", **short}
    _, flat = trained(world, shards, tmp_path / "flat", {}, "--no-evaluate", **given)
    for label, cell in cells.items():
        _, record = trained(world, shards, tmp_path / label, cell, "--no-evaluate", **short)
        numel = record["parameters"]
        inside = 3 * 2 * RAW * numel  # each island: (I - 1) / I 4n on each of I ranks, I = 2
        assert record["bytes_between_raw_total"] == 3 * 2 * RAW * numel  # (R - 1) / R 2 * 4n / I on each of 4 ranks
        assert record["bytes_raw_total"] == inside + record["bytes_between_raw_total"]
        assert record["bytes_inside_raw_total"] == inside + record["bytes_parameters_raw_total"]
        assert record["bytes_inside_total"] == record["bytes_inside_closed_form_total"]
        assert record["bytes_between_total"] == record["bytes_between_closed_form_total"]
        assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
        both = record["bytes_inside_total"] + record["bytes_between_total"]
        assert both == record["bytes_compressed_total"] + record["bytes_parameters_total"]
        assert record["bytes_parameters_total"] == 2 * flat["bytes_parameters_total"], "of two islands of two"
        ratio = record["compression_ratio_between"]
        assert ratio == (pytest.approx(3.9, abs=0.1) if cell else 1)
        of_inside = record["bytes_inside_total"] - record["bytes_parameters_total"]
        assert of_inside == (inside / 2 if label == "both" else inside)
        assert (record["islands"], record["strategy"]) == (2, "hsdp")
        assert record["run_name"].endswith("ws4-islands2/none/seed0")


OPTIMIZERS = {
    "gradient": INT8,
    "parameters": {**INT8, "param_compress": "int8"},
    "both": {**INT8, "inside": {"method": "topk", "density": 0.1, "error_feedback": True}},
    "onebit_adam": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 2},
    "diloco": {"method": "onebit", "comm_optimizer": "diloco", "H": 3, "outer_lr": 1.0, "outer_momentum": 0.5},
    "muon": {"method": "onebit", "comm_optimizer": "muloco", "H": 3},
}


@pytest.mark.parametrize("label", chosen(["diloco"], OPTIMIZERS))
def test_a_resumed_run_equals_an_unbroken_one(world, shards, tmp_path, label):
    """With a checkpoint inside of a round, and every check of the ranks on."""
    cell = OPTIMIZERS[label]
    changes = {"checkpoint_every": 4, "verify_sync": 1, "eval_every": 0, "steps": 6}
    whole, record = trained(world, shards, tmp_path / "whole", cell, **changes)
    assert record["bytes_between_total"] < record["bytes_between_raw_total"]
    assert all(losses(rows) == losses(whole[0]) for rows in whole)
    copies = {"diloco": 2, "muon": 2}.get(label)  # anchors and momenta; a rank has the shards of its island
    expected = copies and pytest.approx(copies * 4 * record["parameters"] / 2 / 1e9, rel=0.02)
    assert record["mem_outer_gb"] == expected
    again = tmp_path / "again"
    (again / "checkpoints").parent.mkdir()
    (tmp_path / "whole" / "checkpoints").rename(again / "checkpoints")
    resumed, other = trained(world, shards, again, cell, "--resume", **changes)
    assert losses(resumed[0]) == losses(whole[0])
    for name in ("val_ppl", "bytes_inside_total", "bytes_between_total", "residual_norm"):
        assert other[name] == record[name], name
    model = "final_model/model.safetensors"
    assert (again / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


OFFER = probe()
LARGER = {"architecture": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def on_cables(folder: Path, data: Path, **changes) -> dict:
    """The record of four ranks in two islands, with a cable to each."""
    given = {"islands": 2, "model": json.dumps(LARGER), "eval_every": 0, **changes}
    launch = f"{sys.executable} -m gradwire launch --world_size 4 --link between-400mbit -- train"
    done = subprocess.run([*launch.split(), *words(data, folder, **given)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "record.json").read_text())
    assert (record["link"], record["islands"], record["bytes_interface_total"]) == ("between-400mbit", 2, None)
    return record


@pytest.mark.full
@pytest.mark.skipif(OFFER.options is None, reason=f"no links here: {OFFER.reason}")
@pytest.mark.parametrize("cell", [{}, INT8], ids=["none", "int8"])
def test_the_cables_of_islands_carry_the_bytes_between_them(shards, tmp_path, cell):
    record = on_cables(tmp_path, shards, strategy="hsdp", comm_config_json=json.dumps(cell))
    seen = record["bytes_interface_between_total"] / record["bytes_between_total"]
    assert 1 < seen < 1.05  # headers of frames, acknowledgements and a step's scalars come on top


@pytest.mark.full
@pytest.mark.skipif(OFFER.options is None, reason=f"no links here: {OFFER.reason}")
def test_flat_shards_send_parameters_and_gradients_over_the_cables(world, shards, tmp_path):
    flat = on_cables(tmp_path / "flat", shards, strategy="fsdp2")
    changes = {"model": json.dumps(LARGER), "eval_every": 0, "strategy": "fsdp2"}
    _, counted = trained(world, shards, tmp_path / "output_dir", {}, islands=1, **changes)
    for field in ("bytes_raw_total", "bytes_compressed_total", "bytes_parameters_raw_total", "train_loss"):
        assert flat[field] == counted[field], field
    assert "bytes_between_total" not in flat
    islands = on_cables(tmp_path / "islands", shards, strategy="hsdp")
    assert flat["bytes_interface_between_total"] > 2 * islands["bytes_interface_between_total"]


GRID = {"name": "x", "compressors": {"none": {}, "int8": {}}}
ON = {"strategies": ["hsdp"], "world_sizes": [4], "islands": [2]}
BAD = {
    "islands that do not divide": ({"strategies": ["hsdp"], "world_sizes": [4], "islands": [3]}, "3 islands do not"),
    "one island": ({"strategies": ["hsdp"], "world_sizes": [4]}, "at least 2; for a single island use fsdp2"),
    "two topologies": ({"strategies": ["hsdp"], "world_sizes": [4], "islands": [2, 4]}, "form 2 and 4 islands"),
    "a cable between the ranks of no island": (
        {"strategies": ["fsdp2"], "links": ["between-1gbit"]},
        "islands is 1: strategy hsdp, or a link between islands, needs at least 2",
    ),
    "a link by class": (
        ON | {"links": [{"inside": "none", "between": "1gbit"}]},
        "or between-100mbit for islands, got",
    ),
    "a name with another class": (ON | {"links": ["inter-1gbit"]}, "or between-100mbit for islands, got"),
    "islands of no use": (
        {"strategies": ["ddp"], "world_sizes": [2], "islands": [2]},
        "ddp has islands only on a link between them",
    ),
    "two cuts of a cable": (
        {"strategies": ["ddp"], "world_sizes": [4], "links": ["between-1gbit"], "islands": [2, 4]},
        "form 2 and 4 islands under ddp",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_islands_that_a_grid_cannot_have(case):
    grid, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        experiment({**GRID, "grid": grid})


def test_other_strategies_run_on_a_link_between_islands():
    flat = {"strategies": ["ddp"], "world_sizes": [4]}
    grid = [flat, {**flat, "links": ["between-1gbit"], "islands": [2]}, {**ON, "links": ["between-1gbit"]}]
    assert {
        run.path for run in experiment({**GRID, "grid": [{**one, "compressors": ["none"]} for one in grid]}).runs()
    } == {
        "ddp/none/ws4/none/seed0",
        "ddp/none/ws4-islands2/between-1gbit/seed0",
        "hsdp/none/ws4-islands2/between-1gbit/seed0",
    }


def test_flat_shards_ignore_the_islands_of_a_link():
    sizes = [7, 11, 13]
    assert parameters_unhooked("reduce_scatter", sizes, 4) == 3 * RAW * (7 + 2 * (11 + 13))
    assert parameters_unhooked("reduce_scatter", sizes, 4, islands=2) == 2 * RAW * (7 + 2 * (11 + 13))


CELLS = {
    "inside without islands": ({"method": "int8", "inside": {"method": "int8"}}, "ddp", "ddp has none"),
    "no cell inside": ({"method": "int8", "inside": "int8"}, "hsdp", "expected a mapping of options"),
    "an unknown option inside": ({"method": "int8", "inside": {"method": "int8", "blok": 3}}, "hsdp", "block"),
    "an optimizer inside": (
        {"method": "int8", "inside": {"method": "onebit", "comm_optimizer": "diloco"}},
        "hsdp",
        "`inside` takes a method, its options and the reducer's",
    ),
    "momenta under flat shards": (
        {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 3},
        "fsdp2",
        "use hsdp, where it works between islands",
    ),
    "flattened matrices": ({"method": "none", "inner": "muon"}, "fsdp1", "muon orthogonalizes matrices"),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_that_a_strategy_cannot_run(case):
    cell, strategy, message = CELLS[case]
    with pytest.raises(BadInput, match=message):
        Cell.parse("x", cell).check_strategy(strategy)


def test_a_cell_with_islands_is_read_back_from_its_record():
    cell = Cell.parse("x", {**INT8, "inside": {"method": "topk", "density": 0.1, "error_feedback": True}})
    assert Cell.parse("x", cell.flat()) == cell
    assert set(cell.methods) == {"int8", "topk"}
    assert cell.hooked
    assert Cell.parse("none", {"inside": {"method": "int8"}}).hooked


def test_a_runs_folder_names_several_islands():
    several, one = Run("hsdp", "int8", 4, "none", 1, 2), Run("fsdp2", "int8", 4, "none", 1)
    assert several.path == "hsdp/int8/ws4-islands2/none/seed1"
    assert one.path == "fsdp2/int8/ws4/none/seed1"
    assert [Run.of(run.wildcards) for run in (several, one)] == [several, one]
    assert [Run.at(run.path) for run in (several, one)] == [several, one]
    for other in (
        "hsdp/int8/ws4-island2/none/seed1",
        "ddp/int8/ws4/none/seedling",
        "ddp/int8/ws4/none",
        "a/b/wsx/c/seed1",
    ):
        assert Run.at(other) is None
