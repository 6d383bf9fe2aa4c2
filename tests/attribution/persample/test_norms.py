"""Norms in every layout of ranks and samples, against one backward pass per sample in float64 on one rank.

Of `collect/norms.py`, `batch.py`.
"""

from __future__ import annotations

import json
import math
from functools import cache

import pyarrow.parquet as pq
import pytest
import torch
from diagonals import diagonals
from test_methods import Odd

from gradwire import cli
from gradwire.attribution.collect import norms as table_of
from gradwire.attribution.persample import hooks, loop, norms
from gradwire.attribution.persample.batch import trainable
from gradwire.base.errors import BadInput, CheckFailed, NonFiniteGradient
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import wrap
from gradwire.lm.data.batches import Batch
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, lora

VOCABULARY, LENGTH, SAMPLES = 64, 9, 7
LENGTHS = (9, 6, 1, 4, 9, 7, 5)


def built(kind: str) -> torch.nn.Module:
    model = causal.build("micro", VOCABULARY, LENGTH, seed=0)
    if kind == "untied":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if kind == "lora":
        model = lora.attach(model, __import__("pathlib").Path("base"), rank=2, seed=1)
        for name, parameter in trainable(model).items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def batch_of(positions, rows=None) -> Batch:
    """Those of the seven samples, with repeated tokens, and fillers up to ``rows``."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    tokens[:, 3] = tokens[:, 0]
    labels = tokens.clone()
    for row, length in enumerate(LENGTHS):
        tokens[row, length:], labels[row, length:] = 0, -100
    labels[1, :2] = -100  # a prompt
    more = (rows or len(positions)) - len(positions)
    chosen = torch.tensor([*positions], dtype=torch.int64)
    return Batch(
        torch.cat([tokens[chosen], torch.zeros(more, LENGTH, dtype=torch.int64)]),
        torch.cat([labels[chosen], torch.full((more, LENGTH), -100)]),
        [f"s{at}" for at in positions] + [""] * more,
    )


@cache
def exact(kind="tied", reduction="mean") -> dict[str, float]:
    """Squared norms by the loop in float64."""
    found = loop.gradients(built(kind).double(), batch_of(range(SAMPLES)), reduction).gradient
    squares = sum(gradient.flatten(1).square().sum(1) for gradient in found.values())
    return {f"s{at}": float(square) for at, square in enumerate(squares)}


def dealt(rank, world, spread) -> Batch:
    if spread == "replicated":
        return batch_of(range(SAMPLES))
    return batch_of(range(rank, SAMPLES, world), -(-SAMPLES // world))


def in_layout(rank, world, group, strategy, held, spread, kind, reduction):
    model = built(kind)
    if strategy == "fsdp2":
        model = wrap(model, "fsdp2", device="cpu")
    batch = dealt(rank, world, spread)
    names = norms.share(model, rank, world) if held == "partial" else None
    found = norms.norms(model, batch, reduction, names)
    assert norms.layout_of(batch, "auto", group) == ("replicated" if world == 1 else spread)
    return norms.combined(batch.sample_id, found.square, held, spread, group)


LAYOUTS = [("complete", "replicated"), ("complete", "distributed"), ("partial", "replicated")]


@pytest.mark.parametrize(
    ("strategy", "reduction", "layout", "kind", "size"),
    diagonals(["ddp", "fsdp2"], ["mean", "sum"], LAYOUTS, ["tied", "untied", "lora"], [1, 2, 3, 4]),
)
def test_norms_are_right_in_every_layout(world, strategy, reduction, layout, kind, size):
    if kind == "lora":
        pytest.importorskip("peft")
    wanted = exact(kind, reduction)
    for found in world(size).run(in_layout, strategy, *layout, kind, reduction):
        assert found == pytest.approx(wanted, rel=1e-4)


def refused(rank, world, group, cases):
    return [refusal(rank, world, group, case) for case in cases]


def refusal(rank, world, group, case):
    try:
        if case == "partial of distributed":
            batch = dealt(rank, world, "distributed")
            norms.combined(batch.sample_id, torch.zeros(len(batch.labels)).double(), "partial", "distributed", group)
        elif case == "averaged":
            norms.combined(["a"], torch.ones(1).double(), "averaged", "distributed", group)
        elif case == "disagree":
            norms.combined(["a"], torch.tensor([1.0 + rank]).double(), "complete", "replicated", group)
        else:
            batch = batch_of([0, 1, 2 + rank]) if case == "overlap" else batch_of([0, 1])
            if case == "sizes":
                batch = batch_of(range(2 + rank))
            if case == "content" and rank:
                batch.input_ids[0, 1] += 1
            if case == "declared otherwise":
                norms.layout_of(batch, "distributed", group)
            norms.layout_of(batch, "auto", group)
    except (BadInput, CheckFailed) as error:
        return str(error)
    return "nothing"


REFUSED = {
    "partial of distributed": "the ranks' shares belong to different samples",
    "averaged": "invalid scope 'averaged'",
    "disagree": "two squared norms of sample 'a' differ, 1 and 2",
    "overlap": "the ranks share 's0', 's1' (2 in all) but not all samples",
    "sizes": "batches of 2, 3 samples",
    "content": "sample 's0' has different tokens on rank 1",
    "declared otherwise": "--distribution distributed: the ranks' samples are replicated",
}


def test_what_cannot_be_right_is_refused_on_every_rank(world):
    for refusals in world(2).run(refused, [*REFUSED]):
        for said, message in zip(refusals, REFUSED.values(), strict=True):
            assert message in said


class Mixing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)


def test_a_layer_that_mixes_samples_is_refused():
    with pytest.raises(BadInput, match="norm is a BatchNorm1d, which mixes the samples"):
        norms.check_unmixed(Mixing())


def test_an_unknown_layer_is_not_skipped(capsys):
    model = built("tied").double()
    model.transformer.ln_f = torch.nn.Sequential(model.transformer.ln_f, Odd().double())
    batch = batch_of(range(SAMPLES))
    found = norms.norms(model, batch)
    gradients = loop.gradients(model, batch).gradient
    assert gradients["transformer.ln_f.1.scale"].abs().max() > 0
    wanted = sum(gradient.flatten(1).square().sum(1) for gradient in gradients.values())
    torch.testing.assert_close(found.square, wanted, rtol=1e-9, atol=1e-15)
    assert "transformer.ln_f.1.scale by vmap" in capsys.readouterr().err


class Past(torch.nn.Module):
    """Uses the weight of a layer that it does not call, so that no hook knows the gathered weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.layer.weight, self.layer.bias)


def test_an_unknown_layer_with_sharded_weights_is_refused(world):
    (refusals,) = world(1).run(sharded_and_odd)
    for said, name in zip(refusals, ("scale", "a parameter"), strict=True):
        assert f"{name} is sharded and used by an unsupported layer or outside its layer" in said


def sharded_and_odd(rank, world, group):
    refusals = []
    for kind in (Odd, Past):
        model = built("tied")
        model.transformer.ln_f = torch.nn.Sequential(model.transformer.ln_f, kind())
        with pytest.raises(BadInput) as refusal:
            norms.norms(wrap(model, "fsdp2", device="cpu"), batch_of(range(SAMPLES)))
        refusals.append(str(refusal.value))
    return refusals


def test_the_ranks_share_the_layers_out():
    model = built("tied")
    for size in (1, 2, 3):
        shares = [norms.share(model, rank, size) for rank in range(size)]
        assert sorted(name for own in shares for name in own) == sorted(trainable(model))
        loads = [sum(sum(dict(model.named_parameters())[name].shape) for name in own) for own in shares]
        assert max(loads) <= 1.3 * min(loads)


# --- the command


def words(small, output, *more):
    base = ["norms", "--model_dir", small.model, "--data_path", small.shards, "--output_dir", output]
    return [str(word) for word in (*base, "--max_samples", 11, "--batch_size", 3, *more)]


def rows_of_a_rank(rank, ranks, group, options):
    shards = options.samples(rank)
    return table_of.collect(shards, options, World(rank, rank, ranks, "gloo", torch.device("cpu")))


def test_the_command_writes_one_table_whatever_the_ranks(world, small, tmp_path):
    assert cli.main(words(small, tmp_path / "one")) == 0
    table = pq.read_table(tmp_path / "one" / "norms.parquet").to_pylist()
    shards = Shards(small.shards, "train")
    assert [row["id"] for row in table] == [shards[at].sample_id for at in range(11)]
    assert list(table[0]) == ["id", "norm", "loss", "n_valid"]
    assert cli.main(words(small, tmp_path / "two", "--batch_size", str(2**31 - 1))) == 0
    others = [pq.read_table(tmp_path / "two" / "norms.parquet").to_pylist()]
    given = {"model_dir": small.model, "data_path": small.shards, "output_dir": tmp_path, "max_samples": 11}
    for more in ({"strategy": "fsdp2"}, {"distribution": "replicated"}):
        others += world(2).run(rows_of_a_rank, table_of.Options(**given, batch_size=3, **more))
    for other in others:
        for one, two in zip(table, other, strict=True):
            assert (one["id"], one["n_valid"]) == (two["id"], two["n_valid"])
            assert two["norm"] == pytest.approx(one["norm"], rel=1e-4)
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_method_of_choice_and_halved_batches_give_the_same_norms(small, tmp_path, monkeypatch, capfd):
    assert cli.main(words(small, tmp_path / "hooks", "--method", "hooks", "--recompute", "0")) == 0
    plain = hooks.backward
    monkeypatch.setattr(hooks, "backward", None)
    for method in ("vmap", "loop"):
        assert cli.main(words(small, tmp_path / method, "--method", method, "--recompute", "0")) == 0

    def scarce(model, batch, *args):
        if len(batch.labels) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(model, batch, *args)

    monkeypatch.setattr(hooks, "backward", scarce)
    assert cli.main(words(small, tmp_path / "halves")) == 0
    table = pq.read_table(tmp_path / "hooks" / "norms.parquet").to_pylist()
    for name in ("vmap", "loop", "halves"):
        for one, two in zip(table, pq.read_table(tmp_path / name / "norms.parquet").to_pylist(), strict=True):
            assert one["id"] == two["id"] and two["norm"] == pytest.approx(one["norm"], rel=1e-4)
    assert "norms: out of memory; splitting a batch of 3 samples" in capfd.readouterr().err
    with pytest.raises(NonFiniteGradient, match=r"sample 'a' is not finite"):
        norms.check_agree("a", math.nan, math.nan)


def test_bad_input_of_the_command(small, tmp_path, capsys):
    assert cli.main(words(small, tmp_path, "--batch_size", "0")) == 2
    assert "--batch_size is 0" in capsys.readouterr().err
    assert json.loads((tmp_path / "norms.failed.json").read_text())["exit_code"] == 2
    assert not (tmp_path / "norms.parquet").exists()
