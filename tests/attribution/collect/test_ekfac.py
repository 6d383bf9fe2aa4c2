"""EK-FAC against dense matrices in float64, its identities, its command, and what is refused.

Of `factors.py`.
"""

from __future__ import annotations

import json
from functools import partial

import blocks
import full_disk
import numpy as np
import pytest
import torch

from gradwire import cli
from gradwire.attribution import projections
from gradwire.attribution.collect import ekfac
from gradwire.attribution.persample import loop
from gradwire.attribution.store import store
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, lora

DIM = 32


def batches_of(shards, size):
    def batches():
        for start in range(0, len(shards), size):
            part = [shards[at] for at in range(start, min(start + size, len(shards)))]
            yield collate(part, shards.meta["pad_id"], len(part))

    return batches


def factors(small, size=4, split="train"):
    model = causal.load(small.model)
    found = ekfac.factored(
        model,
        batches_of(Shards(small.shards, split), size),
        lambda batch: loop.gradients(model, batch, "mean"),
        "mean",
        torch.device("cpu"),
    )
    return model, found


def rows_of(model, shards):
    """Per-sample gradients by one backward pass each, and by parameter."""
    alone = [loop.gradients(model, batch, "mean").gradient for batch in batches_of(shards, 1)()]
    return {name: torch.cat([one[name] for one in alone]) for name in alone[0]}


def test_bases_are_the_eigenvectors_of_what_enters_and_leaves_a_layer(small):
    """Of a linear layer, from hooks written here: one sample at a time, without padding, in float64."""
    model, found = factors(small)
    model = model.double()
    name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("mlp.c_fc"))
    entered, left = [], []
    layer.register_forward_hook(lambda module, args, output: entered.append(args[0].detach()))
    layer.register_full_backward_hook(lambda module, inwards, outwards: left.append(outwards[0].detach()))
    for batch in batches_of(Shards(small.shards, "train"), 1)():
        if batch.n_targets:
            model(batch.input_ids, labels=batch.labels).loss.backward()
        else:
            entered.append(torch.zeros(1, 1, entered[0].shape[-1]))  # no gradient, no token
    for side, values in (("left", [one[:, :-1] for one in entered]), ("right", [one[:, :-1] for one in left])):
        tokens = torch.cat([one.flatten(0, 1) for one in values]).double()
        basis = found.bases[side, f"{name}.weight"].double()
        inside = basis.T @ (tokens.T @ tokens) @ basis
        off = inside - torch.diag(inside.diag())
        assert off.norm() < 1e-5 * inside.norm(), side
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=torch.float64), rtol=0, atol=1e-5)


def test_it_is_the_inverse_of_a_dense_matrix(small):
    """Of one matrix: H = Q diag(M + damping mean M) Qᵀ, with Q the Kronecker product of the two bases."""
    model, found = factors(small)
    gradients = rows_of(model, Shards(small.shards, "train"))
    damped = ekfac.EKFAC(found.bases, found.moments, 0.3, torch.device("cpu"))
    made = damped(damped(torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)))  # twice the root
    parts = dict(zip(gradients, made.split([gradient[0].numel() for gradient in gradients.values()], 1), strict=True))
    name = next(name for name in gradients if name.endswith("attn.c_proj.weight"))
    left, right = (found.bases[side, name].double() for side in ("left", "right"))
    q = torch.kron(left, right)
    flat = gradients[name].flatten(1).double()
    moments = (flat @ q).square().mean(0)
    h = q @ torch.diag(moments + 0.3 * moments.mean()) @ q.T
    expected = torch.linalg.solve(h, flat.T).T
    torch.testing.assert_close(parts[name].double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    bias = next(name for name in gradients if name.endswith("ln_f.weight"))
    second = gradients[bias].double().square().mean(0)
    expected = gradients[bias].double() / (second + 0.3 * second.mean())
    torch.testing.assert_close(parts[bias].double(), expected, rtol=1e-4, atol=0)


def test_without_damping_the_mean_product_counts_entries(small):
    """mean of gᵀ H⁻¹ g over the samples is the number of entries of g, for every parameter that has a gradient."""
    model, found = factors(small)
    gradients = rows_of(model, Shards(small.shards, "train"))
    before = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
    after = found(before)
    products = after.double().square().mean(0)
    for name, part in zip(gradients, products.split([g[0].numel() for g in gradients.values()]), strict=True):
        if name.endswith(("mlp.c_fc.weight", "ln_f.weight", "mlp.c_proj.bias")):
            entries = int((found.moments[name] > 1e-6 * found.moments[name].mean()).sum())
            assert float(part.sum()) == pytest.approx(entries, rel=0.02), name


def test_a_gradient_that_is_noise_is_not_amplified(small):
    """The keys' bias has no gradient in exact arithmetic; its products stay far below the others'."""
    model, found = factors(small)
    gradients = rows_of(model, Shards(small.shards, "train"))
    before = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
    after = ekfac.EKFAC(found.bases, found.moments, 0.1, torch.device("cpu"))(before)
    sizes = [gradient[0].numel() for gradient in gradients.values()]
    products = dict(zip(gradients, after.square().split(sizes, 1), strict=True))
    name = next(name for name in gradients if name.endswith("attn.c_attn.bias"))
    width = products[name].shape[1] // 3
    keys, values = products[name][:, width : 2 * width], products[name][:, 2 * width :]
    assert keys.abs().max() < 1e-3 * values.abs().max()


def test_batches_change_nothing(small):
    one, other = (factors(small, size)[1] for size in (1, 5))
    for name, moment in one.moments.items():
        gap = (moment.sum() - other.moments[name].sum()).abs()
        assert gap <= 1e-4 * moment.sum() + 1e-12, "a rotation keeps the sum, padding and batches too"


@pytest.fixture(scope="module")
def collected(small, tmp_path_factory):
    """The factors by the command; stores of the training samples and of queries under the curvature."""
    base = tmp_path_factory.mktemp("stores")
    assert run("factors", small, "--output_dir", base / "factors", "--damping", 0.2) == 0
    for name, split in (("train", "train"), ("queries", "val")):
        words = ["--output_path", base / name, "--dim", DIM, "--projection", "sjlt", "--split", split]
        words += ["--grad_type", "ekfac", "--optimizer_dir", base / "factors"]
        assert run("collect", small, *words) == 0
        assert cli.main(["grads", "aggregate", "--base_path", str(base / name), "--dim", str(DIM)]) == 0
    return base


def run(command, small, *words):
    given = ["--model_dir", small.model, "--data_path", small.shards, *words]
    return cli.main(["grads", command, *map(str, given)])


def test_the_rows_are_the_preconditioned_gradients_projected(small, collected):
    model, found = factors(small, size=8)
    gradients = rows_of(model, Shards(small.shards, "val"))
    whole = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
    made = ekfac.EKFAC(found.bases, found.moments, 0.2, torch.device("cpu"))(whole)
    shapes = {name: tuple(gradient.shape[1:]) for name, gradient in gradients.items()}
    expected = projections.build("sjlt", shapes, 0).project(made, [DIM])[DIM]
    rows = blocks.read_rows(collected / "queries" / f"dim{DIM}" / "all_orig.pt")
    assert (rows - expected).norm() < 1e-3 * expected.norm(), "with the damping of the factors"


def test_stores_are_validated_and_ranked(small, collected, tmp_path):
    for name in ("train", "queries"):
        words = ["--output_dir", collected / name, "--recompute", 2]
        assert cli.main(["grads", "validate", *map(str, words)]) == 0
    words = ["--train", collected / "train" / f"dim{DIM}", "--validation", collected / "queries" / f"dim{DIM}"]
    words += ["--metric", "dot", "--output_dir", tmp_path / "top", "--top_k", 3]
    assert cli.main(["grads", "influence", *map(str, words)]) == 0
    files = [collected / name / f"dim{DIM}" / "all_orig.pt" for name in ("train", "queries")]
    rows, queries = (blocks.read_rows(file).double().numpy() for file in files)
    scores = np.sort((rows @ queries.T).mean(1))[::-1][:3]
    lines = [json.loads(line) for line in (tmp_path / "top" / "top.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == pytest.approx(scores.tolist(), rel=1e-6)


@pytest.mark.parametrize("changed", ["train", "queries"])
def test_plain_rows_are_not_compared_with_rows_under_the_curvature(small, collected, tmp_path, capsys, changed):
    """A product of the two would be under the root of the inverse curvature, which is no method."""
    plain = tmp_path / "plain"
    assert run("collect", small, "--output_path", plain, "--dim", DIM, "--projection", "sjlt") == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(plain), "--dim", str(DIM)]) == 0
    stores = {name: collected / name / f"dim{DIM}" for name in ("train", "queries")} | {changed: plain / f"dim{DIM}"}
    words = ["--train", stores["train"], "--validation", stores["queries"], "--output_dir", tmp_path / "top"]
    capsys.readouterr()
    assert cli.main(["grads", "influence", *map(str, words)]) == 2
    assert "differ in grad_type: of ekfac and sgd, collect both with --grad_type ekfac" in capsys.readouterr().err
    assert not [*(tmp_path / "top").glob("*.jsonl")]


def test_bad_input_is_one_message(small, collected, tmp_path, capsys):
    common = ["--output_path", tmp_path / "rows", "--dim", DIM, "--grad_type", "ekfac"]
    assert run("collect", small, *common) == 2
    assert "make it with `gradwire grads factors`" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / ekfac.FILE).write_bytes((collected / "factors" / ekfac.FILE).read_bytes()[:-9])
    assert run("collect", small, *common, "--optimizer_dir", damaged) == 2
    assert "is unusable" in capsys.readouterr().err
    shapes = {name: tuple(p.shape) for name, p in causal.load(small.model).named_parameters()}
    with pytest.raises(BadInput, match="factors of another model"):
        ekfac.load(collected / "factors", "another", "mean", shapes, torch.device("cpu"))
    assert run("collect", small, *common, "--optimizer_dir", collected / "factors", "--loss", "sum") == 2
    assert "collect with --loss mean" in capsys.readouterr().err


def test_factors_with_a_flipped_bit_are_refused(tmp_path):
    made = ekfac.EKFAC({("left", "w"): torch.eye(3)}, {"w": torch.rand(3, 3)}, 0.0, torch.device("cpu"))
    ekfac.save(made, 0.1, tmp_path, {"model_digest": "of", "loss": "mean"})
    load = partial(ekfac.load, tmp_path, "of", "mean", {"w": (3, 3)}, torch.device("cpu"))
    assert torch.equal(load().moments["w"], made.moments["w"])
    content = bytearray((tmp_path / ekfac.FILE).read_bytes())
    content[-3] ^= 1
    (tmp_path / ekfac.FILE).write_bytes(content)
    with pytest.raises(BadInput, match="is not as it was saved"):
        load()


def test_a_full_disk_leaves_no_half_factors(small, tmp_path, capsys):
    with full_disk.limited(1500):
        assert run("factors", small, "--output_dir", tmp_path / "factors") == 3
    file = tmp_path / "factors" / ekfac.FILE
    assert capsys.readouterr().err.strip() == f"gradwire grads factors: {file} cannot be written: File too large."
    assert not [*(tmp_path / "factors").glob(f"{ekfac.FILE}*")]


def test_the_factors_of_an_adapter(small, collected, tmp_path, capsys):
    """Against the dense inverse of the adapter's own gradients' factors; factors of the model are refused."""
    pytest.importorskip("peft")
    made = lora.attach(causal.load(small.model), small.model, rank=3, seed=1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    made.save_pretrained(tmp_path / "adapter")
    made = lora.attach(causal.load(small.model), small.model, adapter=tmp_path / "adapter")
    shards = Shards(small.shards, "train")
    words = ["--model_dir", small.model, "--data_path", small.shards, "--lora_dir", tmp_path / "adapter"]
    folder = ["--output_dir", tmp_path / "factors", "--damping", 0.2]
    assert cli.main(["grads", "factors", *map(str, [*words, *folder])]) == 0
    gradients = {name: values.double() for name, values in rows_of(made, shards).items()}
    numel = sum(values[0].numel() for values in gradients.values())
    words += ["--grad_type", "ekfac", "--projection", "none", "--dim", numel, "--output_path", tmp_path / "run"]
    capsys.readouterr()
    assert cli.main(["grads", "collect", *map(str, words), "--optimizer_dir", str(collected / "factors")]) == 2
    assert "has the factors of another model, LoRA adapter or modules" in capsys.readouterr().err
    assert cli.main(["grads", "collect", *map(str, words), "--optimizer_dir", str(tmp_path / "factors")]) == 0
    found = blocks.read(store.all_names(tmp_path / "run" / "rank_0" / f"dim{numel}")).rows.double()
    exact = ekfac.factored(
        made,
        batches_of(shards, 1),
        lambda batch: loop.gradients(made, batch, "mean"),
        "mean",
        torch.device("cpu"),
    )
    done = 0
    for name, values in gradients.items():
        assert "lora_" in name
        moment = exact.rotated(name, values.float()).double().square().mean(0)
        inside = exact.rotated(name, values.float()).double() / (moment + 0.2 * moment.mean()).sqrt()
        wanted = exact.rotated(name, inside.float(), back=True).double().flatten(1)
        part = found[:, done : done + wanted.shape[1]]
        torch.testing.assert_close(
            part @ part.T, wanted @ wanted.T, rtol=2e-2, atol=2e-2 * float(wanted.square().sum(1).max())
        )
        done += wanted.shape[1]
    assert done == numel and found.norm(dim=1).min() > 0
