"""Runs of strategy hsdp: bytes by class of link, resumption, optimizers between islands, and bad input."""

from __future__ import annotations

import json

import pytest
from test_training import SMALL, losses, run, shards, words  # noqa: F401  a fixture

INT8 = {"method": "int8", "rounding": "stochastic", "error_feedback": True}
RAW = 4  # bytes of a float32


def trained(world, shards, folder, cell, *more, size=4, islands=2, strategy="hsdp", **changes):  # noqa: F811
    arguments = {"strategy": strategy, "islands": islands, "comm_config_json": json.dumps(cell), **changes}
    results = world(size).run(run, words(shards, folder, *more, **arguments))
    return [rows for rows, _ in results], results[0][1]


def test_bytes_by_class_of_link_are_their_closed_forms(world, shards, tmp_path):  # noqa: F811
    cells = {"none": {}, "between": INT8, "both": {**INT8, "inside": {"method": "bf16", "algorithm": "exchange"}}}
    for label, cell in cells.items():
        _, record = trained(world, shards, tmp_path / label, cell, steps=3, eval_every=0)
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
        assert record["bytes_parameters_total"] == 2 * _gathers(world, shards, tmp_path / f"{label} flat", numel)
        ratio = record["compression_ratio_between"]
        assert ratio == (pytest.approx(3.9, abs=0.1) if cell else 1)
        of_inside = record["bytes_inside_total"] - record["bytes_parameters_total"]
        assert of_inside == (inside / 2 if label == "both" else inside)
        assert (record["islands"], record["strategy"]) == (2, "hsdp")
        assert record["run_name"].endswith("ws4-islands2/none/seed0")


def _gathers(world, shards, folder, numel):  # noqa: F811
    """Bytes that an island of two ranks gathers: those of a flat run of two."""
    if not hasattr(_gathers, "found"):
        changes = {"steps": 3, "eval_every": 0, "size": 2, "islands": 1, "strategy": "fsdp2"}
        _, record = trained(world, shards, folder, {}, **changes)
        _gathers.found = record["bytes_parameters_total"]
    return _gathers.found


OPTIMIZERS = {
    "gradient": INT8,
    "both": {**INT8, "inside": {"method": "topk", "density": 0.1, "error_feedback": True}},
    "onebit_adam": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 2},
    "zero_one_adam": {"method": "onebit", "comm_optimizer": "zero_one_adam", "dense_steps": 1, "local_doubling": 2},
    "diloco": {"method": "onebit", "comm_optimizer": "diloco", "H": 3, "outer_lr": 1.0, "outer_momentum": 0.5},
}


@pytest.mark.parametrize("label", OPTIMIZERS)
def test_a_resumed_run_equals_an_unbroken_one(world, shards, tmp_path, label):  # noqa: F811
    """With a checkpoint inside of a round, and every check of the ranks on."""
    cell = OPTIMIZERS[label]
    changes = {"checkpoint_every": 4, "verify_sync": 1, "eval_every": 3, "steps": 6}
    whole, record = trained(world, shards, tmp_path / "whole", cell, **changes)
    assert record["bytes_between_total"] < record["bytes_between_raw_total"]
    assert all(losses(rows) == losses(whole[0]) for rows in whole)
    again = tmp_path / "again"
    (again / "checkpoints").parent.mkdir()
    (tmp_path / "whole" / "checkpoints").rename(again / "checkpoints")
    resumed, other = trained(world, shards, again, cell, "--resume", **changes)
    assert losses(resumed[0]) == losses(whole[0])
    for name in ("val_ppl", "bytes_inside_total", "bytes_between_total", "residual_norm"):
        assert other[name] == record[name], name
    model = "final_model/model.safetensors"
    assert (again / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()
