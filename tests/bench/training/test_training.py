"""The training loop on real ranks: what must not depend on the world size, bytes, resuming, divergence, bad input.

Of `build.py`, `loop.py`, `training/results.py`, `settings.py`, `training/step.py`, `totals.py`, `train.py`,
`training/perplexity.py`, `training/environment.py`.
"""

import json
import math
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from data_samples import tokenize_words, values, write_corpus
from diagonals import chosen, swept
from safetensors import safe_open
from safetensors.torch import load_file
from small_runs import losses, parsed, run, weights, words

from gradwire import cli
from gradwire.base.errors import BadInput
from gradwire.base.files import lock
from gradwire.bench.config import Run, Training
from gradwire.bench.launch.ranks import places
from gradwire.bench.report.rows.runs import result
from gradwire.bench.training import build, totals, train
from gradwire.bench.training import settings as run_settings
from gradwire.bench.training.environment import same_machine
from gradwire.comm.parallel.buckets import FEWEST
from gradwire.comm.topology import STRATEGIES
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

VECTORS = (32 * 4 + 32 * 3 + 32 + 128 + 32) + 2 * 32  # norms and biases of the block, and the last norm


def norms(rows: list[dict]) -> list[float]:
    return [row["grad_norm"] for row in rows]


@pytest.fixture(scope="module")
def done(world, shards, tmp_path_factory) -> tuple[Path, list[dict], dict]:
    """A run of two ranks with int8: its folder, the rows of the first rank, and its record."""
    folder = tmp_path_factory.mktemp("done")
    return folder, *world(2).run(run, words(shards, folder, comm_compress="int8"))[0]


def resumed(world, shards, folder, size=2, checkpoint_every=4, verify_sync=1, **options):
    """An unbroken run and one that goes on from its checkpoint, with the same weights: rows and record by rank."""
    options |= {"checkpoint_every": checkpoint_every, "verify_sync": verify_sync}
    whole = world(size).run(run, words(shards, folder / "whole", **options))
    shutil.copytree(folder / "whole" / "checkpoints", folder / "resumed" / "checkpoints")
    again = world(size).run(run, words(shards, folder / "resumed", "--resume", **options))
    assert weights(folder / "whole") == weights(folder / "resumed")
    return whole, again


OF_TWO_RANKS = sorted(set(STRATEGIES.available()) - {"hsdp"})  # they make no islands


@pytest.mark.parametrize("strategies", [["ddp", "fsdp2"], pytest.param(OF_TWO_RANKS, marks=pytest.mark.sweep)])
def test_the_loss_curve_depends_on_the_global_batch_not_on_how_ranks_and_micro_batches_share_it(
    world, shards, tmp_path, strategies
):
    one = world(1).run(run, words(shards, tmp_path / "one", batch_size=4))[0][0]
    accumulated = world(1).run(run, words(shards, tmp_path / "acc", batch_size=2, grad_accum_steps=2))[0][0]
    for strategy in strategies:
        two = world(2).run(run, words(shards, tmp_path / strategy, strategy=strategy, verify_sync=2))
        assert losses(two[0][0]) == losses(two[1][0]), "both ranks must know the same loss"
        assert losses(two[0][0]) == pytest.approx(losses(one), rel=2e-5)
        assert norms(two[0][0]) == pytest.approx(norms(one), rel=1e-3)  # Adam's steps would hide a wrong scale
        assert two[0][0][-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=2e-5)
        assert {row["tokens"] for row in two[0][0]} != {row["tokens"] for row in two[1][0]}, "ranks have own samples"
    assert losses(accumulated) == pytest.approx(losses(one), rel=2e-5)
    assert norms(accumulated) == pytest.approx(norms(one), rel=1e-3)


@pytest.mark.sweep
def test_parameters_travel_compressed_and_are_counted(world, shards, tmp_path):
    def trained(name: str, *more: str, strategy: str = "fsdp2", grad_accum_steps: int = 2) -> dict:
        given = {"model": "tiny", "strategy": strategy, "grad_accum_steps": grad_accum_steps}
        return world(2).run(run, words(shards, tmp_path / name, *more, **given))[0][1]

    model = causal.build("tiny", 300, 24, seed=0)
    blocks = sum(p.numel() for p in model.transformer.h.parameters())
    root = sum(p.numel() for p in model.parameters()) - blocks
    raw = 4 * 6 * 2 * (root + 2 * blocks)  # six steps of two micro-batches; W = 2: each rank sends a half to the other

    plain = trained("plain")
    assert plain["bytes_parameters_raw_total"] == raw - 4 * root, "the step after the evaluation finds it gathered"
    assert plain["bytes_parameters_total"] == plain["bytes_parameters_raw_total"]
    fsdp1 = trained("fsdp1", strategy="fsdp1")
    assert fsdp1["bytes_parameters_raw_total"] == fsdp1["bytes_parameters_total"] == raw - 4 * root
    replicas = trained("ddp", strategy="ddp")
    assert not {"bytes_parameters_raw_total", "bytes_parameters_total"} & set(replicas), "replicas gather no parameters"

    bf16 = trained("bf16", "--param_compress", "bf16")
    assert (bf16["bytes_parameters_raw_total"], bf16["bytes_parameters_total"]) == (raw, raw // 2)
    assert bf16["bytes_source"] == "closed_form", "of the gradients, which the framework reduced itself"
    cell = json.dumps({"param_compress": "int8", "error_feedback": True})
    int8 = trained("int8", "--comm_compress", "int8", "--comm_config_json", cell)
    assert int8["bytes_parameters_raw_total"] == raw
    assert raw / 4 < int8["bytes_parameters_total"] < raw / 3.8
    assert int8["compress_config"]["param_compress"] == "int8"
    assert (bf16["mem_replica_gb"], int8["mem_replica_gb"]) == (None, None)
    once = 6 * (root + blocks)  # six optimizer steps; the micro-batches of each compute with one replica
    differences = trained("int4-diff", "--param_compress", "int4-diff", "--verify_sync", "2")
    assert differences["bytes_parameters_raw_total"] == raw
    assert once / 2 < differences["bytes_parameters_total"] < once / 1.9
    assert differences["mem_replica_gb"] == 4 * (root + blocks) / 1e9
    for record in (bf16, int8, differences):
        assert record["val_loss"] != plain["val_loss"] == pytest.approx(record["val_loss"], rel=0.01)


def test_a_strategy_that_cannot_compress_parameters_is_refused(shards, tmp_path, capsys):
    alone = {"world_size": 1, "rank": 0, "master_port": 1}
    assert cli.main(["train", *words(shards, tmp_path, "--param_compress", "int8", strategy="ddp", **alone)]) == 2
    assert "only strategies fsdp2 and hsdp support it, not ddp" in capsys.readouterr().err
    both = ("--param_compress", "int8", "--comm_config_json", '{"param_compress": "bf16"}')
    assert cli.main(["train", *words(shards, tmp_path, *both, strategy="fsdp2", **alone)]) == 2
    assert "--param_compress is int8, and --comm_config_json has 'bf16'" in capsys.readouterr().err


def test_a_global_batch_is_shared_out_evenly_or_not_at_all(shards, tmp_path, capsys):
    given = {"global_batch_size": 12, "grad_accum_steps": 2}
    settings = run_settings.settings_of(parsed(words(shards, tmp_path, **given)))
    assert [settings.shared_out(world, None).training.batch_size for world in (1, 2, 3)] == [6, 3, 2]
    arguments = words(shards, tmp_path, **given, world_size=4, rank=0, master_port=1)
    assert cli.main(["train", *arguments]) == 2
    message = "global_batch_size 12 cannot be divided evenly among 4 ranks x 2 micro-batches: give a multiple of 8."
    assert message in capsys.readouterr().err
    assert cli.main(["train", *words(shards, tmp_path, verify_sync=-1)]) == 2
    assert "--verify_sync is -1; it must be at least 0." in capsys.readouterr().err


def test_a_cells_beta2_decays_the_second_moments(world, shards, tmp_path):
    own = world(1).run(run, words(shards, tmp_path / "own", "--comm_config_json", '{"beta2": 0.75}'))[0]
    same = world(1).run(run, words(shards, tmp_path / "same", beta2=0.75))[0]
    other = world(1).run(run, words(shards, tmp_path / "other", beta2=0.9375))[0]
    assert losses(own[0]) == losses(same[0])
    # Adam's first step depends on no decay rate; bit for bit, as 1 - beta2 and its root are powers of two in both.
    assert losses(own[0])[:2] == losses(other[0])[:2]
    assert losses(own[0])[2:] != losses(other[0])[2:]
    for folder, beta2 in (("own", 0.75), ("other", 0.9375)):
        with safe_open(tmp_path / folder / "final_model" / "optimizer.safetensors", "pt") as saved:
            assert json.loads(saved.metadata()["adam"])["betas"] == [0.9, beta2]


@pytest.mark.parametrize(
    ("precision", "native", "notes"), [("bf16", False, 1), *swept(("bf16", True, 0), ("fp32", False, 0))]
)
def test_slow_bf16_is_noted(precision, native, notes, shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "multiplies_bf16", lambda device: native)
    arguments = words(shards, tmp_path, "--no-evaluate", precision=precision, steps=2, eval_every=0)
    assert cli.main(["train", *arguments]) == 0
    assert capsys.readouterr().err.count("NOTE: PyTorch multiplies bf16 matrices slowly") == notes


@pytest.mark.parametrize(("name", "value"), [("precision", "bf16"), pytest.param("lr", 0.02, marks=pytest.mark.sweep)])
def test_a_cells_setting_replaces_that_of_the_training(world, shards, tmp_path, name, value):
    of_cell, short = json.dumps({name: value}), {"steps": 2, "eval_every": 0, "lr_warmup_steps": 0}
    own = world(1).run(run, words(shards, tmp_path / "own", comm_config_json=of_cell, **short))[0]
    other = world(1).run(run, words(shards, tmp_path / "other", **{**short, name: value}))[0]
    assert own[1][name] == other[1][name] == value
    assert losses(own[0]) == losses(other[0])


def test_muon_steps_with_averaged_gradients(world, shards, tmp_path):
    muon = {"inner": "muon"}
    local = {"comm_optimizer": "diloco", "inner": "muon", "H": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

    def trained(size: int, name: str, cell: dict, **changes) -> tuple[list[float], str]:
        more = {"strategy": "ddp", "comm_config_json": json.dumps(cell), **changes}
        rows, record = world(size).run(run, words(shards, tmp_path / name, **more))[0]
        return losses(rows), record["optimizer"]

    one, name = trained(1, "one", muon, batch_size=4)
    adamw, other = trained(1, "adamw", {}, batch_size=4)
    assert (name, other) == ("muon", "adamw")
    # Muon rounds its matrices to bf16, which enlarges the rounding of anchor - (anchor - parameter), and of a mean.
    alone = trained(1, "local", local, batch_size=4)[0]
    assert one[:4] == pytest.approx(alone[:4], rel=1e-6)
    assert one == pytest.approx(alone, rel=1e-5)
    assert one == pytest.approx(trained(2, "two", muon)[0], rel=1e-4)
    assert one[2:] != pytest.approx(adamw[2:], rel=1e-3)


def test_muon_of_shards_takes_the_steps_of_replicas_and_counts_its_gathers(world, shards, tmp_path):
    records = {}
    for name, cell in {"muon": {"inner": "muon"}, "adamw": {}}.items():
        arguments = {"strategy": "fsdp2", "comm_config_json": json.dumps(cell), "eval_every": 0}
        rows, records[name] = world(2).run(run, words(shards, tmp_path / name, **arguments))[0]
        if name == "muon":
            replicas = world(2).run(run, words(shards, tmp_path / "ddp", **arguments | {"strategy": "ddp"}))[0][0]
            assert losses(rows) == pytest.approx(losses(replicas), rel=1e-5)
    weights = load_file(tmp_path / "muon/final_model/model.safetensors")
    hidden = sum(x.numel() for name, x in weights.items() if ".h." in name and x.ndim == 2)
    for field in ("bytes_parameters_raw_total", "bytes_parameters_total"):
        more = records["muon"][field] - records["adamw"][field]
        assert more == records["muon"]["steps"] * 2 * hidden > 0, field  # each rank sends half of every matrix, in bf16


def test_seeds_give_different_curves_and_one_seed_gives_the_same_curve_twice(world, shards, tmp_path):
    curves = [
        losses(world(1).run(run, words(shards, tmp_path / str(i), seed=s))[0][0]) for i, s in enumerate((0, 0, 1))
    ]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]
    assert abs(curves[0][0] - curves[2][0]) > 1e-4, "the first loss already shows another model and other samples"


@pytest.mark.parametrize(
    ("strategy", "method", "options", "ratio", "source"),
    [
        ("fsdp2", "none", {}, 1.0, "closed_form"),
        ("fsdp1", "none", {"algorithm": "exchange"}, 1.0, "metered"),
        ("fsdp2", "fp16", {}, 2.0, "metered"),
        ("ddp", "int8", {"block": 32, "rounding": "stochastic"}, 4 / (1 + 4 / 32), "metered"),
    ],
)
def test_counted_bytes_are_the_closed_form(world, shards, tmp_path, strategy, method, options, ratio, source):
    arguments = words(
        shards,
        tmp_path,
        strategy=strategy,
        comm_compress=method,
        comm_config_json=json.dumps(options),
        steps=3,
        eval_every=0,
    )
    (rows, record), (other, _) = world(2).run(run, arguments)
    numel, phases = record["parameters"], 2 if strategy == "ddp" else 1
    assert record["bytes_raw_total"] == 3 * phases * 4 * numel  # W = 2: (W - 1) / W * 4n on each of two ranks
    assert record["compression_ratio"] == pytest.approx(ratio, rel=1e-12 if method != "int8" else 2e-3)
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    assert record["bytes_source"] == source
    if source == "metered":
        assert sum(record["bytes_by_op"].values()) == record["bytes_compressed_total"]
        steps = [row["bytes_sent"] for row in rows + other]
        assert sum(steps) == record["bytes_compressed_total"]
    assert record["steps"] == 3
    assert record["measured_steps"] == 2


@pytest.mark.parametrize(
    ("strategy", "size", "padded"),
    [("ddp", 2, False), pytest.param("fsdp1", 3, True, marks=pytest.mark.sweep), ("fsdp2", 3, True)],
)
def test_what_a_framework_reduces_by_itself_is_seen_in_its_traces(world, shards, tmp_path, strategy, size, padded):
    given = {"strategy": strategy, "steps": 4, "profile": True, "profile_steps": 1, "eval_every": 0, "batch_size": 1}
    world(size).run(run, words(shards, tmp_path, **given))
    untraced = result(tmp_path, Run(strategy, "none", size, "none", 0))
    assert cli.main(["trace", "--run_dir", str(tmp_path)]) == 0
    row = result(tmp_path, Run(strategy, "none", size, "none", 0))
    assert (row.bytes_source, untraced.as_computed, row.as_computed) == ("closed_form", None, True)
    numel = row.parameters
    if strategy == "fsdp2":  # rows of every parameter, until three ranks divide them
        model = causal.build("micro", 300, 24, seed=0)
        numel = sum(3 * math.ceil(len(p) / 3) * p[0].numel() for p in model.parameters())
    if strategy != "fsdp1":
        assert row.bytes_traced_total == 4 * (2 if strategy == "ddp" else 1) * 4 * (size - 1) * numel
    assert (row.bytes_traced_total > row.bytes_raw_total) is padded
    assert (row.compression_ratio < 1) is (row.compression_ratio_steady < 1) is padded


def test_exempt_tensors_and_dense_steps_show_in_the_record(world, shards, tmp_path):
    cell = json.dumps({"exempt": {"max_ndim": 1}, "dense_steps": 2})
    _, record = world(2).run(run, words(shards, tmp_path, comm_compress="fp16", comm_config_json=cell))[0]
    share = VECTORS / record["parameters"]
    assert record["exempt_fraction"] == pytest.approx(share)
    assert record["compression_ratio_steady"] == pytest.approx(1 / (share + (1 - share) / 2))
    assert record["compression_ratio"] == pytest.approx(6 / (2 + 4 / record["compression_ratio_steady"]))
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    assert sum(record["bytes_by_op"].values()) == record["bytes_compressed_total"]
    assert (record["fallbacks"], record["fallback_fraction"]) == (0, 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_looking_at_gradients_changes_neither_losses_nor_bytes(world, shards, tmp_path, strategy):
    """Every step is sampled, or the last one only; the compressor draws random numbers and keeps residuals."""
    cell = {"topk.density": 0.125, "int8.rounding": "stochastic", "error_feedback": True, "algorithm": "exchange"}
    cell |= {"dense_steps": 1}
    options = {"strategy": strategy, "comm_compress": "topk+int8", "comm_config_json": json.dumps(cell), "steps": 4}
    (seen, seen_record), (other, _) = world(2).run(run, words(shards, tmp_path / "seen", eval_every=1, **options))
    (rows, record), _ = world(2).run(run, words(shards, tmp_path / "unseen", eval_every=0, **options))
    assert losses(seen) == losses(rows)
    assert norms(seen) == norms(rows)
    assert [row["bytes_sent"] for row in seen] == [row["bytes_sent"] for row in rows]
    errors = [row["grad_rel_error"] for row in seen]
    assert errors == [row["grad_rel_error"] for row in other], "one number for all ranks"
    assert errors[0] < 1e-6, "dense"
    assert all(0.3 < error < 3 for error in errors[1:])
    assert [row.get("grad_rel_error") for row in rows] == [None] * 3 + errors[3:]
    assert seen_record["grad_rel_error"] == pytest.approx(sum(errors[1:]) / 3)
    assert record["grad_rel_error"] == errors[3]
    assert 0 < record["grad_cos_sim"] < 1
    assert record["grad_rel_error_linf"] > 0
    table = pq.read_table(tmp_path / "seen/steps.parquet").to_pydict()
    assert table["grad_rel_error"] == [*errors, *errors]

    phases = 2 if strategy == "ddp" else 1  # the owners' means to all
    reductions = FEWEST if strategy == "ddp" else 2  # its buckets; the block, and the rest of the model
    assert record["extra_collectives"] == 4 * reductions * (phases - 1)
    assert (record["extra_collective_time_ms"] > 0) == (strategy == "ddp")
    assert record["density"] == pytest.approx(0.125, rel=1e-3)
    assert record["density"] + record["sparsity"] == 1
    assert record["padding_bytes"] == 0
    assert record["index_bytes"] > 0
    assert record["residual_norm"] > 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", pytest.param("hsdp", marks=pytest.mark.sweep)])
def test_an_exact_exchange_has_no_error_in_any_strategy(world, shards, tmp_path, strategy):
    """A buffer that the framework wrote into again before it was looked at would show."""
    cell = json.dumps({"algorithm": "exchange"})
    options = {"strategy": strategy, "comm_config_json": cell, "eval_every": 1, "steps": 2}
    size, options["islands"] = (4, 2) if strategy == "hsdp" else (2, 1)
    _, record = world(size).run(run, words(shards, tmp_path, **options))[0]
    assert 0 < record["grad_rel_error"] < 1e-7
    assert record["grad_cos_sim"] == pytest.approx(1, abs=1e-12)
    assert record["density"] is None


def test_what_does_not_apply_is_left_out_of_the_record(world, shards, tmp_path):
    fields = ("grad_rel_error", "grad_cos_sim", "extra_collectives", "extra_collective_time_ms", "padding_bytes")
    fields += ("density", "sparsity", "residual_norm")
    _, unhooked = world(2).run(run, words(shards, tmp_path / "none", strategy="ddp", steps=2, eval_every=1))[0]
    assert {unhooked.get(field) for field in (*fields, "index_bytes", "index_share")} == {None}
    _, alone = world(1).run(run, words(shards, tmp_path / "alone", comm_compress="topk", steps=2))[0]
    assert {alone.get(field) for field in fields} == {None}
    assert alone["bytes_raw_total"] == alone["bytes_compressed_total"] == 0, "a single rank sends nothing"
    assert alone["compression_ratio"] is None
    cell = json.dumps({"comm_optimizer": "onebit_adam", "dense_steps": 1})
    adam = {"strategy": "ddp", "comm_compress": "onebit", "comm_config_json": cell, "steps": 3, "eval_every": 1}
    _, momenta = world(2).run(run, words(shards, tmp_path / "adam", **adam))[0]
    assert (momenta.get("grad_rel_error"), momenta.get("grad_cos_sim")) == (None, None)
    assert momenta["extra_collectives"] is not None


def test_the_manifest_distinguishes_machines(done):
    folder, _, record = done
    here, other = (json.loads((folder / f"environment/rank{rank}.json").read_text()) for rank in (0, 1))
    assert record["environment"] == here | {"same_machine": True}
    assert other["rank"] == 1
    assert here["processor"]
    assert here["threads"] == torch.get_num_threads() or here["threads"] == 1
    assert set(here["clocks"]) == {"mhz", "largest_khz", "governor"}
    assert here["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert here["gpu"] is None
    assert here["float32_matmul_precision"] == "highest"
    assert isinstance(here["communication_variables"], dict)
    assert not same_machine([here, other | {"processor": "another"}])


def test_a_resumed_run_of_an_optimizer_that_communicates_equals_an_unbroken_one(world, shards, tmp_path):
    cell = json.dumps({"dense_steps": 2})
    adam = {"strategy": "ddp", "comm_compress": "onebit", "comm_optimizer": "onebit_adam", "comm_config_json": cell}
    whole, again = resumed(world, shards, tmp_path, **adam)
    for (before, _), (after, _) in zip(whole, again, strict=True):
        assert losses(after) == losses(before)
        assert norms(after) == norms(before)
        assert [row["bytes_sent"] for row in after] == [row["bytes_sent"] for row in before]
        assert all(row["bytes_sent"] > 0 for row in before)
    for field in ("bytes_raw_total", "bytes_compressed_total", "bytes_closed_form_total", "val_loss", "loss_digest"):
        assert again[0][1][field] == whole[0][1][field]


def test_the_record_of_an_optimizer_that_communicates(world, shards, tmp_path):
    """Momenta in one bit and two means per 256 elements."""
    cell = {"comm_optimizer": "onebit_adam", "dense_steps": 2}
    adam = {"strategy": "ddp", "comm_compress": "onebit", "comm_config_json": json.dumps(cell)}
    short = {"model": "tiny", "eval_every": 0, "steps": 5, "verify_sync": 1}
    _, record = world(2).run(run, words(shards, tmp_path, "--no-evaluate", **adam, **short))[0]
    assert record["optimizer"] == "onebit_adam"
    assert record["compress_config"] == {"method": "onebit", "error_feedback": True, **cell}
    assert record["bytes_raw_total"] == 5 * 2 * 4 * record["parameters"]
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    assert record["compression_ratio_steady"] == pytest.approx(25.6, rel=0.02)
    assert record["compression_ratio"] == pytest.approx(5 / (2 + 3 / record["compression_ratio_steady"]))
    assert (record["exempt_fraction"], record["fallbacks"]) == (0, 0)
    assert record["mem_residual_gb"] > 0


ROUNDS = {"H": 3, "outer_lr": 0.7, "outer_momentum": 0.5}  # of 7 steps: 0 to 2, 3 to 5, and 6
LOCAL = [
    ("naive", 2, {"inner": "sgd"}),
    ("bucket", 3, {"H": {0: 1, 2: 4}, "inner": "muon"}),
    ("ddp", 2, {"comm_optimizer": "sparseloco", "method": "chunktopk+bins"}),
    ("ddp", 2, {"comm_optimizer": "demo", "method": "dcttopk"}),
]


@pytest.mark.parametrize(("strategy", "size", "more"), chosen([LOCAL[0], LOCAL[2]], LOCAL))
def test_a_run_of_local_updates_resumes_inside_of_a_round(world, shards, tmp_path, strategy, size, more):
    """Its bytes are the closed form's; only steps that end a round send; evaluations see the same anchors."""
    demo = more.get("comm_optimizer") == "demo"
    cell = {"method": "onebit", "comm_optimizer": "diloco", **({} if demo else ROUNDS), **more}
    options = {"strategy": strategy, "comm_config_json": json.dumps(cell), "steps": 7, "eval_every": 2}
    whole, again = resumed(world, shards, tmp_path, size, **options)
    ends = {0, 1, 5, 6} if "H" in more else {2, 5, 6}
    ends = set(range(7)) if demo else ends
    compared = ("loss", "grad_norm", "val_loss", "bytes_sent", "bytes_raw", "bytes_closed_form", "residual_norm")
    for (before, _), (after, _) in zip(whole, again, strict=True):
        for name in compared:
            assert [row[name] for row in after] == [row[name] for row in before]
        assert {row["step"] for row in before if row["bytes_sent"]} == ends, "the checkpoint is inside of a round"
        assert len({row["bytes_raw"] for row in before}) == 1
    record = whole[0][1]
    assert record["optimizer"] == cell["comm_optimizer"] and record["compress_config"]["error_feedback"] is True
    anchors_and_momenta = 2 * 4 * record["parameters"] / 1e9
    assert record["mem_outer_gb"] == (None if demo else anchors_and_momenta)
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    sent = [sum(rank[0][step]["bytes_sent"] for rank in whole) for step in range(7)]
    raw = sum(rank[0][0]["bytes_raw"] for rank in whole)
    assert all(sent[step] < raw for step in ends)
    assert record["compression_ratio_steady"] == record["compression_ratio"] == pytest.approx(7 * raw / sum(sent))


def test_a_run_resumes_with_a_fragment_in_flight(world, shards, tmp_path):
    """Of H = 6 steps the third sends the first fragment, the fifth receives it, and the checkpoint is in between."""
    streaming = {"fragments": 2, "delay": 2, "alpha": 0.5}
    cell = {"comm_optimizer": "diloco", "H": 6, "outer_lr": 0.7, "outer_momentum": 0.5, "streaming": streaming}
    options = {"strategy": "ddp", "comm_compress": "onebit", "comm_config_json": json.dumps(cell), "steps": 7}
    whole, continued = resumed(world, shards, tmp_path, eval_every=2, **options)
    for (before, _), (after, _) in zip(whole, continued, strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            assert [row[name] for row in after] == [row[name] for row in before]
    record, again = whole[0][1], continued[0][1]
    for name in ("bytes_raw_total", "bytes_compressed_total", "bytes_closed_form_total", "residual_norm"):
        assert record[name] == again[name]
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    assert record["bytes_raw_total"] == 7 * 2 * 4 * record["parameters"]
    ratio = 25.6 * 7 / 2.0  # a fragment each, about a half, and then both
    assert record["compression_ratio"] == pytest.approx(ratio, rel=0.2)


def test_evaluations_of_local_updates_are_of_the_anchors(world, shards, tmp_path):
    """Until the first round ends nothing is agreed: the loss is that of the initial weights, and then it is another."""
    cell = {"comm_optimizer": "diloco", "H": 5, "outer_lr": 1.0, "outer_momentum": 0.0}
    options = {"strategy": "ddp", "comm_compress": "onebit", "comm_config_json": json.dumps(cell), "eval_every": 1}
    rows = world(2).run(run, words(shards, tmp_path, **options))[0][0]
    evaluated = [row["val_loss"] for row in rows]
    assert len(set(evaluated[:4])) == 1 and len(set(evaluated)) == 3
    assert evaluated[0] == pytest.approx(math.log(300), rel=0.02)
    assert len(set(losses(rows))) == len(rows), "while the ranks train"


def test_a_run_that_was_killed_after_its_last_checkpoint_only_validates(world, shards, tmp_path):
    flags = {"checkpoint_every": 6, "comm_compress": "powersgd", "strategy": "ddp"}
    whole, record = world(2).run(run, words(shards, tmp_path, **flags))[0]
    (tmp_path / "record.json").unlink()
    resumed, again = world(2).run(run, words(shards, tmp_path, "--resume", **flags))[0]
    assert losses(resumed) == losses(whole)
    for field in ("val_loss", "algorithm", "exempt_fraction", "fallbacks", "fallback_fraction", "bytes_by_op"):
        assert again[field] == record[field], field
    assert (record["algorithm"], record["exempt_fraction"]) == ("native", 0)
    assert record["fallbacks"] == 2 * 6 * (8 + 2), "on two ranks, six steps: norms and biases, as in VECTORS"
    assert record["fallback_fraction"] == pytest.approx(VECTORS / record["parameters"])


def test_tensorboard_holds_the_loss_of_every_step(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, rows, record = done
    events = EventAccumulator(str(folder / "logs" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses(rows))
    assert [event.step for event in events.Scalars("train/val_loss")] == [2, 5]
    assert {"time/step_ms", "bytes/bytes_sent", "train/lr"} < {*events.Tags()["scalars"]}
    assert events.Scalars("train/val_loss")[-1].value == pytest.approx(record["val_loss"])


@pytest.mark.parametrize(("method", "strategy"), [("int8", "fsdp2"), *swept(("none", "ddp"))])
def test_a_diverged_run_is_a_result(world, shards, tmp_path, method, strategy):
    arguments = words(
        shards, tmp_path, comm_compress=method, strategy=strategy, lr=1e30, clip_grad_norm=1e30, lr_warmup_steps=1
    )
    _, record = world(2).run(run, arguments)[0]
    assert record["status"] == "diverged"
    assert record["reason"]
    assert record["val_ppl"] is None
    assert record["val_loss"] is None
    assert 0 < record["bytes_raw_total"] < 6 * 4 * record["parameters"], "only steps that were made are counted"


def test_a_run_whose_last_step_ruins_the_model_diverged(world, shards, tmp_path):
    arguments = words(shards, tmp_path, steps=1, warmup_steps=0, lr=1e30, lr_warmup_steps=0)
    _, record = world(2).run(run, arguments)[0]
    assert math.isfinite(pq.read_table(tmp_path / "steps.parquet").to_pydict()["loss"][0])
    assert record["status"] == "diverged"
    assert "validation perplexity" in record["reason"]
    assert record["val_ppl"] is None


def test_perplexity_of_the_final_model_is_the_last_evaluation_of_the_run(done, shards, tmp_path, capsys):
    folder, _, record = done
    perplexity = ["perplexity", "--model_dir", str(folder / "final_model"), "--data_path", str(shards)]
    assert cli.main(perplexity) == 0
    written = json.loads((folder / "perplexity.json").read_text())
    assert written["avg_loss"] == pytest.approx(record["val_loss"], rel=1e-6)
    assert written["ppl"] == pytest.approx(math.exp(written["avg_loss"]))
    assert f"ppl {written['ppl']:.4f}" in capsys.readouterr().out
    assert cli.main([*perplexity, "--batch_size", str(2**31 - 1)]) == 0  # no more rows than samples
    assert json.loads((folder / "perplexity.json").read_text())["avg_loss"] == pytest.approx(written["avg_loss"])


def test_perplexity_refuses_shards_that_the_model_cannot_read(shards, tmp_path, capsys):
    meta = Shards(shards, "val").meta
    model = causal.build("micro", meta["vocab_size"], 24, seed=0)
    causal.save(model.state_dict(), model.config, shards.parent / "tokenizer", tmp_path / "model", {})
    arguments = ["perplexity", "--model_dir", str(tmp_path / "model"), "--data_path", str(shards)]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    assert cli.main([*arguments, "--max_length", "16"]) == 2
    assert "samples of up to 24 tokens, not 16" in capsys.readouterr().err
    other = tmp_path / "other"
    corpus = write_corpus(tmp_path / "other.json", [{**value, "text": value["text"].upper()} for value in values(60)])
    assert cli.main(tokenize_words(corpus, other, max_length=24)) == 0
    capsys.readouterr()
    assert cli.main([*arguments[:-1], str(other / "shards")]) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_step_times_leave_out_warm_up_and_profiled_steps_and_take_the_slowest_rank():
    rows = [
        {"step": step, "rank": rank, "warmup": step < 1, "profiled": step == 1, "step_ms": ms, "tokens": 10}
        | {"kind": "alike"}
        for step, times in enumerate([(900, 901), (700, 702), (10, 30), (50, 20)])
        for rank, ms in enumerate(times)
    ]
    found = totals.times(rows)
    assert found["measured_steps"] == 2
    assert found["step_time_ms_mean"] == 40
    assert found["step_time_ms_p50"] == 40
    assert found["tokens_per_s"] == 40 / 0.080


def test_a_mean_step_has_as_many_ends_of_rounds_as_the_run_whatever_was_profiled():
    kinds = ["local", "local", "local", "end"] * 3
    rows = [
        {"step": step, "rank": 0, "warmup": step < 4, "profiled": 3 < step < 7, "kind": kind, "tokens": 10}
        | {"step_ms": 100.0 if kind == "end" else 20.0}
        for step, kind in enumerate(kinds)
    ]
    found = totals.times(rows)
    assert found["measured_steps"] == 5, "of them two ends"
    assert found["step_time_ms_mean"] == pytest.approx(0.75 * 20 + 0.25 * 100)
    assert found["tokens_per_s"] == pytest.approx(10 / 0.040)


def test_a_round_that_ends_in_the_profiled_steps_does_not_count_twice():
    """60 steps of two rounds, of which the last 30 are timed, as in `configs/time-to-loss.yaml`."""
    rows = [
        {"step": step, "rank": 0, "warmup": step < 26, "profiled": 26 <= step < 30, "tokens": 10}
        | ({"kind": "end", "step_ms": 320.0} if step % 30 == 29 else {"kind": "local", "step_ms": 20.0})
        for step in range(60)
    ]
    assert totals.times(rows)["step_time_ms_mean"] == pytest.approx(30)


BAD = {
    "unknown compressor": (["--comm_compress", "int7"], ["unknown compressor 'int7'", "'int8'"]),
    "no object": (["--comm_config_json", "[1]"], ["JSON object", "[1]"]),
    "no JSON": (["--comm_config_json", "{block}"], ["not valid JSON", "{block}"]),
    "out of range": (["--batch_size", "0"], ["batch_size", "must be at least 1"]),
    "too few samples": (["--batch_size", "100000"], ["train has", "too few for one batch of 100000"]),
    "no data": (["--data_path", "nowhere"], ["nowhere"]),
    "steps and epochs": (["--epochs", "2", "--steps", "50"], ["--epochs 2 decides", "omit it, or --steps 50"]),
    "shorter samples": (["--max_length", "16"], ["samples of up to 24 tokens, not 16"]),
    "no GPU": (["--device", "cuda"], ["no CUDA device"]),
    "two optimizers": (
        ["--comm_optimizer", "onebit_adam", "--comm_config_json", '{"comm_optimizer": "diloco"}'],
        ["--comm_optimizer is onebit_adam", "'diloco'"],
    ),
    "a key twice": (
        ["--comm_compress=int8", '--comm_config_json={"block": 64, "exempt": {"max_ndim": 1}, "block": 128}'],
        ["--comm_config_json is not valid JSON", "key 'block' is given twice"],
    ),
    "nested too deeply": (["--comm_config_json", '{"a":' * 100_000], ["--comm_config_json", "nests too deeply"]),
    "two methods": (
        ["--comm_compress", "int8", "--comm_config_json", '{"method": "topk", "density": 0.1}'],
        ["--comm_compress is int8", "--comm_config_json has 'topk'"],
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_one_message_and_leaves_nothing(case, shards, tmp_path, capsys):
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    change, expected = BAD[case]
    folder = tmp_path / "run"
    assert cli.main(["train", *words(shards, folder), *change]) == 2
    printed = capsys.readouterr().err.strip()
    assert "\n" not in printed
    for word in expected:
        assert word in printed
    assert [path.name for path in folder.iterdir()] == ["train.failed.json"]
    assert json.loads((folder / "train.failed.json").read_text())["exit_code"] == 2


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_folder_of_another_configuration_is_refused_and_kept(done, shards, by_torchrun, monkeypatch, capsys):
    folder = done[0]
    for name, value in places(1, "127.0.0.1", 0)[0].items() if by_torchrun else ():
        monkeypatch.setenv(name, value)
    before = (folder / "record.json").read_bytes()
    assert cli.main(["train", *words(shards, folder, lr=0.5)]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert (folder / "record.json").read_bytes() == before


def test_torchruns_ranks_refuse_a_batch_of_more_samples_than_there_are(done, shards, tmp_path, monkeypatch, capsys):
    for name, value in places(1, "127.0.0.1", 0)[0].items():
        monkeypatch.setenv(name, value)
    private = {"dp_noise_multiplier": 1.0, "dp_max_grad_norm": 1.0, "dp_sampling": "poisson"}
    assert cli.main(["train", *words(shards, tmp_path, batch_size=100_000, **private)]) == 2
    assert "too few for one batch of 100000 on each of 1 ranks" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "GRACE", 0.0)
    with lock(tmp_path / ".lock"):
        assert cli.main(["train", *words(shards, tmp_path)]) == 2
    assert f"{tmp_path} is in use by another process ({os.getpid()})" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "train.failed.json"}


def test_a_shard_with_a_wrong_checksum_is_refused(shards, tmp_path, capsys):
    copy = tmp_path / "data" / "shards"
    shutil.copytree(shards.parent, copy.parent)
    victim = copy / "train" / "shard-00000.pt"
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    assert cli.main(["train", *words(copy, tmp_path / "run")]) == 2
    assert "SHA-256" in capsys.readouterr().err
    victim.unlink()
    assert cli.main(["train", *words(copy, tmp_path / "run")]) == 2
    assert "missing" in capsys.readouterr().err


def test_a_corpus_file_is_tokenized_into_the_cache(shards, tmp_path):
    arguments = words(shards.parent / "corpus.json", tmp_path / "run", cache_dir=tmp_path / "cache", vocab_size=300)
    args = parsed([*arguments, "--max_length", "24"])
    folder = train.shards_folder(args, rank=0)
    assert Shards(folder, "train").meta["finalized"]
    assert train.shards_folder(args, rank=1) == folder
    for length in (0, 2):  # neither is taken for "none given", and of 2 tokens a sample may be left with one
        with pytest.raises(BadInput, match=rf"--max_length {length} is too small; at least 3"):
            train.shards_folder(args.model_copy(update={"max_length": length}), rank=0)


def test_every_field_of_training_is_a_flag_with_a_description():
    for name, field in Training.model_fields.items():
        assert field.description, name
