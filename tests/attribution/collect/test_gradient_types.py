"""Gradient types against `torch.optim.Adam`, and collections of every kind against the loop.

Of `methods.py`.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import blocks
import numpy as np
import pytest
import torch
from changed_store import collected_by
from small_model import make, origin
from transformers import AutoConfig

from gradwire import cli
from gradwire.attribution.collect import gradient_types, methods, rows
from gradwire.attribution.persample import layer_factors, loop
from gradwire.attribution.persample.batch import shapes, trainable
from gradwire.attribution.projections import OF_PARTS, PROJECTORS, build
from gradwire.attribution.query.gradient_store import GradientStore
from gradwire.attribution.store import provenance, store
from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.parallel import wrap
from gradwire.lm.data.batches import Batch
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, lora, optimizer, saved

SAMPLES = 7


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small model after three steps of Adam, whose moments are next to it; one parameter was never trained."""
    small = make(tmp_path_factory.mktemp("types"))
    model = causal.load(small.model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.95), eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(0, 290, (2, 24), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        adam.step()
        adam.zero_grad()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        "state": {names[id(parameter)]: of for parameter, of in adam.state.items()},
        "param_groups": [{"betas": (0.8, 0.95), "eps": 1e-6}],
    }
    causal.save(model.state_dict(), model.config, small.shards.parent / "tokenizer", small.model, {}, state)
    return small


def gradients(model, count=3):
    tokens = torch.randint(0, 290, (count, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, tokens.clone(), [f"s{row}" for row in range(count)])
    return loop.gradients(model, batch).gradient


def test_adam_is_the_step_that_torch_would_take(small):
    model = causal.load(small.model).double()
    moments = optimizer.load(small.model, causal.load(small.model))
    found = gradients(model)
    flat = torch.cat([gradient.flatten(1) for gradient in found.values()], 1)
    adam = gradient_types.Adam.of(moments, shapes(model), "torch", torch.device("cpu"))
    wide = {name: getattr(adam, name).double() for name in ("exp_avg", "exp_avg_sq", "step")}
    directions = replace(adam, **wide)(flat.clone())
    for row in range(3):
        fresh = causal.load(small.model).double()
        before = torch.cat([p.detach().flatten() for p in fresh.parameters()])
        adam = torch.optim.Adam(fresh.parameters(), lr=1.0, betas=moments.betas, eps=moments.eps)
        for name, parameter in fresh.named_parameters():
            adam.state[parameter] = {
                "step": torch.tensor(float(moments.step[name])),
                "exp_avg": moments.exp_avg[name].double(),
                "exp_avg_sq": moments.exp_avg_sq[name].double(),
            }
            parameter.grad = found[name][row]
        adam.step()
        after = torch.cat([p.detach().flatten() for p in fresh.parameters()])
        torch.testing.assert_close(directions[row], before - after, rtol=1e-6, atol=1e-9)


def test_the_variant_of_less_is_its_formula_whatever_betas_the_training_took(small):
    """0.9, 0.999 and 1e-8 stand in LESS's code; the training here took 0.8 and 0.95."""
    model = causal.load(small.model)
    moments = optimizer.load(small.model, causal.load(small.model))
    found = gradients(model)
    flat = torch.cat([gradient.flatten(1) for gradient in found.values()], 1)
    less = gradient_types.Adam.of(moments, shapes(model), "less", torch.device("cpu"))(flat.clone())
    m, v = (torch.cat([of[name].flatten() for name in found]) for of in (moments.exp_avg, moments.exp_avg_sq))
    wanted = (0.9 * m + 0.1 * flat) / torch.sqrt(0.999 * v + 0.001 * flat**2 + 1e-8)
    torch.testing.assert_close(less, wanted, rtol=1e-4, atol=1e-5)


def test_moments_go_by_name_and_must_fit(small, tmp_path):
    moments = optimizer.load(small.model, causal.load(small.model))
    of_model = shapes(causal.load(small.model))
    backwards = dict(reversed(of_model.items()))
    one, other = (gradient_types.Adam.of(moments, of, "torch", torch.device("cpu")) for of in (of_model, backwards))
    first = next(iter(of_model))
    numel = math.prod(of_model[first])
    assert torch.equal(one.exp_avg[:numel], other.exp_avg[-numel:]) and one.exp_avg[:numel].any()
    with pytest.raises(BadInput, match=r"has no moments of more\.weight"):
        gradient_types.Adam.of(moments, {**of_model, "more.weight": (2,)}, "torch", torch.device("cpu"))
    with pytest.raises(BadInput, match=r"of shape .* the model's is \(3,\)"):
        gradient_types.Adam.of(moments, {**of_model, first: (3,)}, "torch", torch.device("cpu"))
    (tmp_path / optimizer.FILE).write_bytes(b"no such thing")
    with pytest.raises(BadInput, match=r"optimizer\.safetensors is unusable"):
        optimizer.load(tmp_path, torch.nn.Module())


def collect(small, run, *more, expect=0):
    words = ["--model_dir", small.model, "--data_path", small.shards, "--output_path", run, "--dim", 36]
    words += ["--max_samples", SAMPLES, "--save_interval", 3, *more]
    assert cli.main(["grads", "collect", *map(str, words)]) == expect
    return run


def rows_of(run, rank=0, dim=36):
    return blocks.read(store.all_names(run / f"rank_{rank}" / f"dim{dim}"))


def exact(small, grad_type="sgd", loss="mean", projection="sjlt", model=None):
    """The rows by the loop, the type by hand, and the projector."""
    model = model or causal.load(small.model)
    shards = Shards(small.shards, "train")
    found = []
    for position in range(SAMPLES):
        tokens = shards[position].input_ids[None]
        made = loop.gradients(model, Batch(tokens, tokens.clone(), ["x"]), loss).gradient
        found.append(torch.cat([gradient.flatten(1) for gradient in made.values()], 1))
    flat = torch.cat(found)
    if grad_type == "adam":
        flat = gradient_types.Adam.of(
            optimizer.load(small.model, causal.load(small.model)), shapes(model), "torch", torch.device("cpu")
        )(flat)
    if grad_type == "sign":
        flat = gradient_types.Sign([*shapes(model).values()])(flat)
    return flat, build(projection, shapes(model), 0).project(flat, [36])[36]


@pytest.mark.parametrize(
    ("grad_type", "loss", "projection", "method"),
    [
        ("sgd", "mean", "factored", "auto"),
        ("sgd", "sum", "factored", "hooks"),
        ("adam", "mean", "factored", "auto"),
        ("adam", "mean", "sjlt", "vmap"),
        ("sign", "sum", "sjlt", "loop"),
        ("sgd", "mean", "rademacher", "hooks"),
    ],
)
def test_a_collection_of_any_kind_is_what_the_loop_gives(small, tmp_path, grad_type, loss, projection, method):
    options = ["--grad_type", grad_type, "--loss", loss, "--projection", projection, "--method", method]
    run = collect(small, tmp_path / "run", *options, "--batch_size", 2)
    flat, wanted = exact(small, grad_type, loss, projection)
    found = rows_of(run)
    tolerance = 1e-4 * float(wanted.norm(dim=1).max())
    torch.testing.assert_close(found.rows, wanted, rtol=1e-3, atol=tolerance)
    assert found.meta["norm"].to_pylist() == pytest.approx(flat.double().norm(dim=1).tolist(), rel=1e-4)
    made = json.loads((run / "collect.json").read_text())
    assert made["computed_by"] == ("hooks" if method == "auto" else method)
    for dim in (36,):
        assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(dim)]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--recompute", "2"]) == 0


def under_fsdp2(rank, world, group, small, projections, unit):
    """Every other sample's rows by each projection, from sharded weights, and their norms."""
    model = wrap(causal.load(small.model), "fsdp2", device="cpu")
    shards, found = Shards(small.shards, "train"), {}
    for name, dim in projections.items():
        made_from = origin(SAMPLES, dims=[dim], method="auto", projection=name, strategy="fsdp2", row_of=unit)
        made = rows.RowMaker(model, made_from, torch.device("cpu"), batch_size=2, sharded=True)
        made.check(shards, [1, 4])
        block = made.blocks(shards, range(rank, 6, 2))[dim]
        found[name] = block.rows, torch.tensor(block.meta["norm"].to_pylist())
    return found


def test_every_projection_of_sharded_weights_is_that_of_whole_gradients(world, small):
    """Against the loop's whole gradients; the micro GPT-2 has a tied weight, which is used twice."""
    flat, _ = exact(small)
    projections = {name: flat.shape[1] if name == "none" else 36 for name in PROJECTORS}
    for rank, found in enumerate(world(2).run(under_fsdp2, small, projections, "sample")):
        for name, (rows_, norms) in found.items():
            wanted = build(name, shapes(causal.load(small.model)), 0).project(flat, [projections[name]])
            wanted, lengths = wanted[projections[name]][rank:6:2], flat[rank:6:2].norm(dim=1)
            assert ((rows_ - wanted).norm(dim=1) <= provenance.TOLERANCE["sgd"] * wanted.norm(dim=1)).all(), name
            torch.testing.assert_close(norms, lengths, rtol=1e-4, atol=0)


def test_modules_of_sharded_weights_add_up_to_samples(world, small):
    projections = dict.fromkeys(OF_PARTS, 36)
    samples, modules = (world(2).run(under_fsdp2, small, projections, unit) for unit in ("sample", "module"))
    for one, parts in zip(samples, modules, strict=True):
        for name, (rows_, _) in one.items():
            added = parts[name][0].view(len(rows_), -1, 36).sum(1)
            torch.testing.assert_close(added, rows_, rtol=1e-4, atol=1e-5)


def test_a_type_of_a_parameter_without_a_use_is_projected_too(small):
    """Adam moves such a parameter by its moments."""
    model = causal.load(small.model)
    model.unused = torch.nn.Linear(3, 2)
    tokens = torch.randint(0, 290, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens, tokens.clone(), ["a", "b"])
    part = build("rademacher", shapes(model), 0)
    fused = methods.fused_rows(model, batch, [part], [36], kind_of=lambda name: lambda given: given + 0.01 * len(name))
    whole = loop.gradients(model, batch).gradient
    stepped = torch.cat([of.flatten(1) + 0.01 * len(name) for name, of in whole.items()], 1)
    wanted = part.project(stepped, [36])[36]
    torch.testing.assert_close(fused.rows[36][:, 0], wanted, rtol=1e-4, atol=1e-5 * float(wanted.norm()))
    torch.testing.assert_close(fused.square_norm[:, 0], stepped.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "variant", "unit"), [("adam", "torch", "module"), ("adam", "less", "sample"), ("sign", "torch", "sample")]
)
def test_steps_of_sharded_weights_are_those_of_whole_gradients(world, small, tmp_path, kind, variant, unit):
    """Of one, two and three ranks, against the rows that whole gradients give, which are checked above."""
    given = {"model_dir": small.model, "data_path": small.shards, "grad_type": kind, "adam_variant": variant}
    given |= {"max_samples": 7, "dim": (36,), "rows": unit, "projection": "rademacher", "method": "hooks"}
    stores = {}
    for strategy, ranks in (("ddp", 1), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3)):
        run = collected_by(world(ranks), tmp_path / f"{strategy}{ranks}", strategy=strategy, **given)
        assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", "36"]) == 0
        stores[strategy, ranks] = GradientStore(run / "dim36")
    whole = stores.pop(("ddp", 1))
    for store_ in stores.values():
        assert store_.ids == whole.ids
        deviations = np.linalg.norm(store_[:] - whole[:], axis=1)
        assert (deviations <= provenance.TOLERANCE[kind] * np.linalg.norm(whole[:], axis=1)).all()
        np.testing.assert_allclose(store_.meta["norm"], whole.meta["norm"], rtol=1e-3)
    assert cli.main(["grads", "validate", "--output_dir", str(tmp_path / "fsdp22"), "--recompute", "3"]) == 0


@pytest.mark.parametrize("options", [["--grad_type", "ekfac"], ["--method", "loop"]])
def test_what_needs_whole_gradients_is_refused_where_weights_are_sharded(small, tmp_path, capsys, options):
    if "ekfac" in options:
        words = ["--model_dir", small.model, "--data_path", small.shards, "--max_samples", 7, "--output_dir", tmp_path]
        assert cli.main(["grads", "factors", *map(str, words)]) == 0
        options = [*options, "--optimizer_dir", tmp_path]
    collect(small, tmp_path / "run", "--strategy", "fsdp2", *options, expect=2)
    assert "it requires --method hooks (or auto), and has no --grad_type ekfac" in capsys.readouterr().err
    assert not any((tmp_path / "run").glob("rank_*"))


def test_a_fresh_and_a_saved_adapter_give_the_gradients_of_its_parameters(small, tmp_path, capsys):
    pytest.importorskip("peft")
    run = collect(small, tmp_path / "fresh", "--lora_rank", 2)
    model = lora.attach(causal.load(small.model), small.model, rank=2, seed=0)
    flat, wanted = exact(small, model=model)
    assert flat.shape[1] == sum(p.numel() for p in trainable(model).values()) < 20_000
    torch.testing.assert_close(rows_of(run).rows, wanted, rtol=1e-3, atol=1e-5)
    model.save_pretrained(tmp_path / "adapter")
    again = collect(small, tmp_path / "saved", "--lora_dir", tmp_path / "adapter")
    torch.testing.assert_close(rows_of(again).rows, wanted, rtol=1e-3, atol=1e-5)
    assert cli.main(["grads", "validate", "--output_dir", str(again), "--check_ranks", "--recompute", "1"]) == 0

    other = tmp_path / "elsewhere"
    shutil.copytree(small.model, other)
    changed = causal.build("micro", 290, 24, seed=8)
    causal.save(changed.state_dict(), changed.config, small.shards.parent / "tokenizer", other, {})
    capsys.readouterr()
    words = ["--model_dir", other, "--data_path", small.shards, "--output_path", tmp_path / "no", "--dim", 36]
    assert cli.main(["grads", "collect", *map(str, words), "--lora_dir", str(tmp_path / "adapter")]) == 2
    assert "was made for" in capsys.readouterr().err
    collect(small, tmp_path / "none", "--lora_dir", tmp_path, expect=2)
    assert "holds no LoRA adapter: adapter_config.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "count"), [("qwen2_moe", 60), ("mixtral", 8), ("deepseek_v3", 256), ("dbrx", 4)])
def test_a_mixture_of_experts_is_refused_by_name(small, tmp_path, capsys, kind, count):
    mixture, run = tmp_path / "mixture", tmp_path / "run"
    shutil.copytree(small.model, mixture, ignore=shutil.ignore_patterns("SHA256SUMS"))
    AutoConfig.for_model(kind, num_hidden_layers=1, hidden_size=16, num_attention_heads=2).save_pretrained(mixture)
    words = ["--model_dir", str(mixture), "--data_path", str(small.shards)]
    for command, more in (
        ("collect", ["--output_path", str(run), "--dim", "36"]),
        ("factors", ["--output_dir", str(run)]),
    ):
        capsys.readouterr()
        assert cli.main(["grads", command, *words, *more]) == 2
        assert f"is a mixture of {count} experts ({kind}), which has no gradient rows" in capsys.readouterr().err
    assert {file.suffix for file in run.iterdir()} == {".json"}, "the failures alone"


def test_a_dense_model_has_no_experts(small, tmp_path):
    assert saved.experts(small.model) == 0
    AutoConfig.for_model("jamba", num_experts=1).save_pretrained(tmp_path)
    assert saved.experts(tmp_path) == 0


def test_adam_without_moments_is_reported_before_anything_starts(small, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(small.model, bare)
    (bare / optimizer.FILE).unlink()
    words = ["--model_dir", bare, "--data_path", small.shards, "--output_path", tmp_path / "run", "--dim", 36]
    assert cli.main(["grads", "collect", *map(str, words), "--grad_type", "adam"]) == 2
    assert "has no optimizer.safetensors" in capsys.readouterr().err
    with_them = [*map(str, words), "--grad_type", "adam", "--optimizer_dir", str(small.model), "--max_samples", "2"]
    assert cli.main(["grads", "collect", *with_them]) == 0


def test_further_columns(small, tmp_path, capsys):
    run = collect(small, tmp_path / "run", "--metadata", "loss,n_valid,document,position,n_tokens,perplexity")
    table = rows_of(run).meta.to_pylist()
    assert [row["position"] for row in table] == list(range(SAMPLES))
    for row in table:
        assert row["document"] == row["sample_id"].split("#")[0]
        assert row["n_valid"] == row["n_targets"] == row["n_tokens"] - 1
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    collect(small, tmp_path / "other", "--metadata", "los", expect=2)
    assert "Did you mean 'loss'" in capsys.readouterr().err


# --- memory, and a method that is wrong


def maker(small, projection="rademacher", method="hooks", batch_size=8):
    made_from = origin(SAMPLES, dims=[36], method=method, projection=projection)
    return rows.RowMaker(causal.load(small.model), made_from, torch.device("cpu"), batch_size=batch_size)


@pytest.mark.parametrize("projection", ["rademacher", "factored"])
def test_out_of_memory_halves_the_batch_and_is_reported(small, monkeypatch, capsys, projection):
    shards = Shards(small.shards, "train")
    wanted = maker(small, projection).blocks(shards, range(SAMPLES))[36]
    forward = rows.collate

    def scarce(samples, *args):
        if len(samples) > 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate much")
        return forward(samples, *args)

    monkeypatch.setattr(rows, "collate", scarce)
    made = maker(small, projection)
    found = made.blocks(shards, range(SAMPLES))[36]
    assert made.batch_size in (1, 2) and found.ids == wanted.ids
    torch.testing.assert_close(found.rows, wanted.rows, rtol=1e-4, atol=1e-5)
    assert "out of memory" in capsys.readouterr().err

    def hopeless(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rows, "collate", hopeless)
    with pytest.raises(RunFault, match=r"gradients of 1 sample do not fit into the memory of cpu"):
        maker(small, projection).blocks(shards, range(SAMPLES))


@pytest.mark.parametrize("where", ["stacked", "projected"])
def test_memory_that_runs_out_while_rows_are_stacked_or_projected_is_halved_too(small, monkeypatch, where):
    shards = Shards(small.shards, "train")
    wanted = maker(small, "factored", "vmap").blocks(shards, range(SAMPLES))[36]
    made, hopeless, most = *(maker(small, "factored", "vmap") for _ in range(2)), 2
    empty, project = torch.empty, made.projector.project

    def scarce(allocate):
        def allocating(rows, *args, **kwargs):
            if (rows if isinstance(rows, int) else len(rows)) > most:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
            return allocate(rows, *args, **kwargs)

        return allocating

    monkeypatch.setattr(made.projector, "project", scarce(project) if where == "projected" else project)
    monkeypatch.setattr(rows.torch, "empty", scarce(empty) if where == "stacked" else empty)
    found = made.blocks(shards, range(SAMPLES))[36]
    assert made.height <= 2 and found.ids == wanted.ids
    assert ((found.rows - wanted.rows).norm(dim=1) <= provenance.TOLERANCE["sgd"] * wanted.rows.norm(dim=1)).all()
    most = 0
    monkeypatch.setattr(hopeless.projector, "project", made.projector.project)
    with pytest.raises(RunFault, match=r"gradients of 1 sample do not fit into the memory of cpu"):
        hopeless.blocks(shards, range(2))


def wrong_under_fsdp2(rank, world, group, small, rule):
    """A check of a sharded model, its LayerNorm's rule perhaps wrong."""
    made_from = origin(SAMPLES, dims=[36], method="auto", projection="factored", strategy="fsdp2")
    model = wrap(causal.load(small.model), "fsdp2", device="cpu")
    made = rows.RowMaker(model, made_from, torch.device("cpu"), batch_size=2, sharded=True)
    plain = layer_factors.OF_TORCH[torch.nn.LayerNorm.forward]
    layer_factors.OF_TORCH[torch.nn.LayerNorm.forward] = lambda m, x, grad: plain(m, x, rule * grad)
    try:
        made.check(Shards(small.shards, "train"), [1, 4])
    except RunFault as error:
        return str(error)
    finally:
        layer_factors.OF_TORCH[torch.nn.LayerNorm.forward] = plain
    assert all(parameter.grad is None for parameter in model.parameters())
    return made.method


def test_a_method_is_checked_where_weights_are_sharded(world, small):
    assert world(2).run(wrong_under_fsdp2, small, 1.0) == ["hooks"] * 2
    for printed in world(2).run(wrong_under_fsdp2, small, 1.5):
        assert "--method hooks computes a different gradient of sample" in printed


def test_auto_takes_the_next_method_where_one_fails(small, monkeypatch, capfd):
    shards = Shards(small.shards, "train")
    plain = layer_factors.layer_normalisation
    monkeypatch.setitem(layer_factors.OF_TORCH, torch.nn.LayerNorm.forward, lambda m, x, grad: plain(m, x, 1.5 * grad))
    made = maker(small, "factored", "auto")
    made.check(shards, [1, 4])
    assert made.method == "vmap" and not made.fused
    monkeypatch.setitem(methods.METHODS, "vmap", lambda *_: 1 / 0)
    made = maker(small, "factored", "auto")
    made.check(shards, [1, 4])
    assert made.method == "loop"
    printed = capfd.readouterr().err
    assert "uses vmap, because hooks fails: --method hooks computes a different gradient of sample" in printed
    assert "uses loop, because vmap fails: division by zero" in printed
    with pytest.raises(BadInput, match="--method vmap does not support this model, use loop: division by zero"):
        maker(small, method="vmap").check(shards, [1, 4])


class Mean(torch.nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


def test_a_layer_that_mixes_samples_is_found_by_the_check(small):
    made = maker(small, "factored")
    made.model.transformer.drop = Mean()
    with pytest.raises(BadInput, match=r"depends on other samples in transformer.wte: a layer after it mixes"):
        made.check(Shards(small.shards, "train"), [1, 4])


@pytest.mark.parametrize("projection", ["rademacher", "factored"])
def test_a_method_that_is_wrong_for_a_model_is_found_out(small, monkeypatch, projection):
    shards = Shards(small.shards, "train")
    maker(small, projection).check(shards, [0, 1])
    made = maker(small, projection)
    plain = layer_factors.layer_normalisation
    monkeypatch.setitem(layer_factors.OF_TORCH, torch.nn.LayerNorm.forward, lambda m, x, grad: plain(m, x, 1.5 * grad))
    with pytest.raises(RunFault, match="--method hooks computes a different gradient"):
        made.check(shards, [0, 1])


def test_a_batch_fits_the_free_memory(small, monkeypatch):
    shards = Shards(small.shards, "train")
    made = maker(small)
    assert made.fitting(shards, 0) == rows.BATCH_AT_MOST["cpu"]
    monkeypatch.setattr(rows, "free_bytes", lambda device: 2 << 20)
    assert 1 <= made.fitting(shards, 0) < 5
    monkeypatch.setattr(rows, "free_bytes", lambda device: 0)
    assert made.fitting(shards, 0) == 1


def test_signs_of_noise_are_zero():
    g = torch.tensor([[3.0, -4e-7, 0.0, -2.0, 1e-3, -1e-3], [0.0, 0.0, 0.0, 0.0, -5e-9, 5e-9]])
    found = gradient_types.Sign([(4,), (2,)])(g.clone())
    assert found.tolist() == [[1, 0, 0, -1, 1, -1], [0, 0, 0, 0, -1, 1]]
    assert gradient_types.Sign([(2, 2), (), (1, 1)])(g.clone()).tolist()[0] == [1, 0, 0, -1, 1, -1], "row by row"


@pytest.mark.parametrize("sharper", [1, 20])
def test_signs_are_those_of_float64_wherever_float32_is_right(sharper):
    """A sharp softmax leaves most tokens a gradient that is small and exact; keys' biases leave noise."""
    model = causal.build("tiny", 290, 24, seed=0)
    model.transformer.ln_f.weight.data.mul_(sharper)
    found, exact = gradients(model), gradients(model.double())
    signs = gradient_types.Sign([*shapes(model).values()])(torch.cat([of.flatten(1) for of in found.values()], 1))
    at = 0
    for name, wanted in exact.items():
        sign = signs[:, at : (at := at + wanted[0].numel())].view(wanted.shape)
        right = (found[name] - wanted).abs() < 0.1 * wanted.abs()
        wrong = (right & (sign != wanted.sign())).double().mean()
        assert wrong <= (0 if "wte" in name else 2e-4), (name, wrong)
        if name.endswith("attn.c_attn.bias"):
            width = wanted.shape[1] // 3
            assert found[name][:, width : 2 * width].any() and not sign[:, width : 2 * width].any(), "the keys' third"
