"""A checkpoint that goes to another strategy, or to other ranks: weights and moments are kept, residuals dropped.

The oracle is the model that the run itself kept after the same step, which the frameworks gathered.
"""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diagonals import chosen
from safetensors import safe_open
from small_runs import losses, parsed, run, words

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.bench.config import Run
from gradwire.bench.report.rows.runs import result
from gradwire.bench.training import results
from gradwire.bench.training import settings as run_settings
from gradwire.bench.training.build import build
from gradwire.bench.training.checkpoint import RunState
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers
from gradwire.comm.parallel.verify import first_difference
from gradwire.lm.data.shards import Shards

AT = 4  # the step of the checkpoint
FILES = ("model.safetensors", "optimizer.safetensors")


class Place(NamedTuple):
    """Where a run trains."""

    strategy: str
    ranks: int
    islands: int = 1


INT8 = {"method": "int8", "rounding": "stochastic", "error_feedback": True}
DILOCO = {"method": "onebit", "comm_optimizer": "diloco", "H": 3, "outer_lr": 0.7, "outer_momentum": 0.5}
ISLANDS = Place("hsdp", 4, 2)
ONEBIT = {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 2}
MOVES = {
    "islands to shards": (INT8, ISLANDS, Place("fsdp2", 2)),
    "anchors to replicas": (DILOCO, ISLANDS, Place("ddp", 2)),
    "fewer shards": (INT8, Place("fsdp2", 4), Place("fsdp2", 3)),
    "flattened shards": (INT8, Place("fsdp1", 3), Place("fsdp2", 2)),
    "into flattened shards": (INT8, ISLANDS, Place("fsdp1", 3)),
    "replicas to islands": (INT8, Place("ddp", 2), ISLANDS),
    "momenta": (ONEBIT, Place("ddp", 2), ISLANDS),
    "momenta of islands": (ONEBIT, ISLANDS, Place("bucket", 3)),
    "replicas of parameters": ({**INT8, "param_compress": "int4-diff"}, ISLANDS, Place("fsdp2", 3)),
    "matrices": ({"method": "none", "inner": "muon"}, Place("fsdp2", 3), Place("ddp", 2)),
    "one rank": (INT8, Place("naive", 1), Place("fsdp2", 2)),
    "one rank per island": (INT8, Place("hsdp", 2, 2), ISLANDS),
}


def given(cell: dict, place: Place, **changes) -> dict:
    cell = {"algorithm": "exchange", **cell} if cell["method"] != "none" else cell
    topology = {"strategy": place.strategy, "islands": place.islands}
    return {"comm_config_json": json.dumps(cell), "eval_every": 0, "checkpoint_every": AT, **topology, **changes}


def contents(path):
    """The tensors of a file, and Adam's settings in it."""
    with safe_open(path, framework="pt") as stream:
        return {key: stream.get_tensor(key) for key in stream.keys()}, json.loads(stream.metadata().get("adam", "{}"))  # noqa: SIM118


def arrived(rank, world_size, group, arguments):
    """The state of a rank that has loaded a checkpoint, whose model the ranks save; and its output."""
    args = parsed(arguments)
    settings = run_settings.settings_of(args)
    world = World(rank, rank, world_size, "gloo", torch.device("cpu"))
    split = Shards(Path(args.data_path), "train")
    parts, outcome = build(settings, split, world)
    identity = settings.identity(world_size, split.digest)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            step = RunState(settings, identity, split.digest, world, parts, outcome).resume()
    except BadInput as error:
        return str(error)
    reducer, optimizer = parts.reducer, parts.optimizer
    with optimizers.synchronized(optimizer):
        results.save_model(settings.output_dir / "arrived", split, parts.model, optimizer, outcome, {})
    rest = (len(outcome.rows), len(reducer.codec.state_dict()["residuals"]) if reducer else 0)
    found = (step, reducer.step if reducer else step, rest, first_difference(parts.model, optimizer, drifting=False))
    return found, printed.getvalue()


@pytest.mark.parametrize("move", chosen(["islands to shards"], MOVES))
def test_weights_and_moments_go_to_another_topology(world, shards, tmp_path, move):
    cell, before, after = MOVES[move]
    old, new = tmp_path / "old", tmp_path / "new"
    rows = world(before.ranks).run(run, words(shards, old, **given(cell, before, keep_model_every=AT)))[0][0]
    assert len(losses(rows)) == 6
    shutil.copytree(old / "checkpoints", new / "checkpoints")
    answers = world(after.ranks).run(arrived, words(shards, new, "--resume", **given(cell, after)))
    assert [found for found, _ in answers] == [(AT, AT, (0, 0), None)] * after.ranks
    printed = [printed for _, printed in answers]
    ranks, islands = (
        f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((before.ranks, "rank"), (before.islands, "island"))
    )
    at = f"was written by strategy {before.strategy} on {ranks} in {islands}"
    assert f"{at}: its weights and optimizer state are kept; residuals, other states of compressors" in printed[0]
    assert set(printed[1:]) == {""}
    for name in FILES:
        (found, its_steps), (kept, steps) = (
            contents(new / "arrived" / name),
            contents(old / "models/step-000004" / name),
        )
        assert its_steps == steps
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[key], kept[key]) for key in kept)

    answers = world(after.ranks).run(run, words(shards, new, "--resume", "--verify_sync", "1", **given(cell, after)))
    for found, _ in answers:
        assert [row["step"] for row in found] == [AT, AT + 1]
        assert losses(found) == losses(answers[0][0])
    record = answers[0][1]
    topology = {"strategy": before.strategy, "world_size": before.ranks, "islands": before.islands}
    assert record["moved_from"] == [{"step": AT, **topology}]
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"], "of the steps on these ranks"


def test_losses_go_on_where_only_the_strategy_changes(world, shards, tmp_path):
    """Two ranks have the same samples under both, and nothing is compressed."""
    cell, old, new = {"method": "none"}, tmp_path / "old", tmp_path / "new"
    expected = world(2).run(run, words(shards, old, **given(cell, Place("fsdp2", 2))))[0][0]
    shutil.copytree(old / "checkpoints", new / "checkpoints")
    answers = world(2).run(run, words(shards, new, "--resume", **given(cell, Place("ddp", 2))))
    assert losses(answers[0][0]) == pytest.approx(losses(expected)[AT:], rel=1e-5)


def refused(world, shards, old, new, ranks=2, **changes):
    """The message of ranks that do not resume."""
    shutil.copytree(old / "checkpoints", new / "checkpoints")
    answers = world(ranks).run(arrived, words(shards, new, "--resume", **changes))
    assert len(set(answers)) == 1
    return answers[0]


def test_what_is_not_moved_is_refused(world, shards, tmp_path):
    """Another training, another source, private training, and a run without steps left."""
    cell, two = {"method": "int8"}, Place("ddp", 2)
    old = tmp_path / "old"
    world(1).run(run, words(shards, old, **given(cell, Place("ddp", 1))))
    message = refused(world, shards, old, tmp_path / "lr", **given(cell, two, lr=0.5))
    assert "was written by strategy ddp on 1 rank in 1 island; repeat that run" in message
    manifest = old / f"checkpoints/step{AT:08d}/checkpoint.json"
    written = read_json(manifest)
    manifest.write_text(json.dumps(written | {"task": "of another source"}))
    assert "repeat that run" in refused(world, shards, old, tmp_path / "source", **given(cell, two))
    manifest.write_text(json.dumps(written))
    message = refused(world, shards, old, tmp_path / "last", **given(cell, two, steps=AT, warmup_steps=1))
    assert "repeat that run" in message, "another number of steps is another training"

    done, private = tmp_path / "done", {"dp_max_grad_norm": 1.0, "dp_noise_multiplier": 1.0}
    world(1).run(run, words(shards, done, **given(cell, Place("ddp", 1), checkpoint_every=6)))
    message = refused(world, shards, done, tmp_path / "nothing left", **given(cell, two))
    assert "is of the last step, 6, on another topology: nothing is left to train" in message
    noisy = tmp_path / "noisy"
    world(1).run(run, words(shards, noisy, **given(cell, Place("ddp", 1), **private)))
    assert "repeat that run" in refused(world, shards, noisy, tmp_path / "private", **given(cell, two, **private))


def test_a_moved_run_is_no_result_of_an_experiment(world, shards, tmp_path):
    """Its bytes and times are of a part of its steps."""
    cell, run_at = {"method": "int8"}, Run("ddp", "int8", 2, "none", 0)
    folder = tmp_path / run_at.path
    world(1).run(run, words(shards, folder, **given(cell, Place("ddp", 1))))
    (folder / "record.json").unlink()
    world(2).run(run, words(shards, folder, "--resume", **given(cell, Place("ddp", 2))))
    row = result(folder, run_at)
    assert row.status == "failed"
    assert "of a run that began on other ranks: its bytes and times are of its steps from 4 on only" in row.reason
