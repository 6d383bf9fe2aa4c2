"""Training of a LoRA adapter against a plain loop of peft and AdamW, and what reads the adapter.

Of `lm/models/lora.py`.
"""

from __future__ import annotations

import json

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from small_model import make
from small_runs import parsed, run, words
from torch.nn.functional import cross_entropy

from gradwire import cli
from gradwire.base.files import sha256_file
from gradwire.bench.training.settings import settings_of
from gradwire.bench.training.step import learning_rate
from gradwire.lm.data.batches import train_batches
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

RANK, STEPS, SEED, CLIPPED = 3, 4, 5, 0.3
PRIVATE = ("--dp_max_grad_norm", str(CLIPPED), "--dp_sampling", "shuffled")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("lora"))


def arguments(small, folder, *more, **changes):
    given = {"model": small.model, "lora_rank": RANK, "steps": STEPS, "seed": SEED, "eval_every": 0, **changes}
    return words(small.shards, folder, *more, **given)


def loss_of(model, input_ids, labels, reduction="sum"):
    """The loss of a batch's targets, written out."""
    logits = model(input_ids=input_ids).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction)


def by_hand(small, training, ranks, private):
    """Adapter weights after a plain loop over all ranks' batches: A from the seed, B zero, the base frozen."""
    import peft

    torch.manual_seed(SEED)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal.load(small.model), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, training.beta2), weight_decay=training.weight_decay)
    split = Shards(small.shards, "train")
    feeds = [train_batches(split, training.batch_size, rank, ranks, SEED) for rank in range(ranks)]
    for step in range(STEPS):
        batches = [next(feed) for feed in feeds]
        if private:
            samples = [pair for b in batches for pair in zip(b.input_ids[:, None], b.labels[:, None], strict=True)]
            total = [torch.zeros_like(parameter) for parameter in trained]
            for ids, labels in samples:
                gradient = torch.autograd.grad(loss_of(model, ids, labels, "mean"), trained)
                norm = torch.stack([of.norm() for of in gradient]).norm()
                for sum_, of in zip(total, gradient, strict=True):
                    sum_ += of * min(1.0, CLIPPED / norm.item())
            for parameter, sum_ in zip(trained, total, strict=True):
                parameter.grad = sum_ / len(samples)
        else:
            optimizer.zero_grad()
            loss = sum(loss_of(model, batch.input_ids, batch.labels) for batch in batches)
            (loss / sum(batch.n_targets for batch in batches)).backward()
        torch.nn.utils.clip_grad_norm_(trained, training.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [("ddp", 1, ()), ("ddp", 2, PRIVATE), ("fsdp2", 2, ("--gradient_checkpointing",)), ("fsdp2", 2, PRIVATE)],
)
def test_an_adapter_is_that_of_a_plain_loop(world, small, tmp_path, strategy, ranks, more):
    base = sha256_file(small.model / "model.safetensors")
    given = arguments(small, tmp_path / "run", *more, strategy=strategy, keep_model_every=2)
    _, record = world(ranks).run(run, given)[0]
    made = load_file(tmp_path / "run/final_model/adapter_model.safetensors")
    wanted = by_hand(small, settings_of(parsed(given)).training, ranks, more == PRIVATE)
    assert made.keys() == wanted.keys() and all(of.count_nonzero() for of in made.values())
    for name, of in wanted.items():
        torch.testing.assert_close(made[name], of, rtol=2e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert record["parameters"] == sum(of.numel() for of in wanted.values())
    assert sha256_file(small.model / "model.safetensors") == base
    names = {path.name for path in (tmp_path / "run/final_model").iterdir()}
    assert {"adapter_config.json", "optimizer.safetensors", "gradwire.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names and "config.json" not in names
    kept = load_file(tmp_path / "run/models/step-000004/adapter_model.safetensors")
    assert all(torch.equal(kept[name], of) for name, of in made.items()), "that of the last step"


def test_a_warm_up_of_epochs_is_selected_from_as_less_does(small, tmp_path, capsys):
    """`train --lora_rank --epochs`, then `grads less`; rows of the adapter are those of autograd through peft."""
    import peft

    assert cli.main(["train", *arguments(small, tmp_path / "warmup", epochs=2, steps=60)]) == 0
    of_epoch = len(Shards(small.shards, "train")) // 2
    models = sorted((tmp_path / "warmup/models").iterdir())
    assert [path.name for path in models] == [f"step-{epoch * of_epoch:06d}" for epoch in (1, 2)]
    record = json.loads((tmp_path / "warmup/record.json").read_text())
    assert record["steps"] == 2 * of_epoch

    data = tmp_path / "validation.json"
    data.write_text(json.dumps(json.loads(small.corpus.read_text())[:3]))
    given = {"data_path": small.corpus, "validation": data, "checkpoints": tmp_path / "warmup/models"}
    given |= {"model_dir": small.model, "top_k": 4, "dim": 64, "output_dir": tmp_path / "less"}
    assert cli.main(["grads", "less", *(str(word) for name, of in given.items() for word in (f"--{name}", of))]) == 0
    stated = json.loads((tmp_path / "less/less.json").read_text())
    assert [each["step"] for each in stated["checkpoints"]] == [of_epoch, 2 * of_epoch]
    assert len(stated["selected"]) == 4

    given |= {"strategy": "fsdp2", "output_dir": tmp_path / "sharded"}
    assert cli.main(["grads", "less", *(str(word) for name, of in given.items() for word in (f"--{name}", of))]) == 0
    scores = [pq.read_table(tmp_path / run / "influence/scores.parquet")["score"] for run in ("less", "sharded")]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-3)
    assert (
        json.loads((tmp_path / "sharded/grads" / f"train-{of_epoch}/collect.json").read_text())["strategy"] == "fsdp2"
    )

    pairs = {"train": [], "validation": []}
    for part, stores in pairs.items():
        stores += [tmp_path / f"less/grads/{part}-{epoch * of_epoch}/dim64" for epoch in (1, 2)]
    influence = ["--weights", "learning_rate", "--output_dir", str(tmp_path / "influence"), "--over", "mean"]
    flags = [word for part, stores in pairs.items() for word in (f"--{part}", *map(str, stores))]
    assert cli.main(["grads", "influence", *flags, *influence]) == 0
    rates = [each["learning_rate"] for each in stated["checkpoints"]]
    weights = json.loads((tmp_path / "influence/influence.json").read_text())["weights"]
    assert weights == pytest.approx([rate / sum(rates) for rate in rates])

    model = peft.PeftModel.from_pretrained(causal.load(small.model), str(models[0]), is_trainable=True).double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    words_ = ["--model_dir", small.model, "--lora_dir", models[0], "--data_path", small.shards, "--max_samples", 3]
    whole = [*words_, "--projection", "none", "--dim", numel, "--output_path", tmp_path / "rows"]
    assert cli.main(["grads", "collect", *map(str, whole)]) == 0
    rows = blocks.read_rows(tmp_path / f"rows/rank_0/dim{numel}/all_orig.pt").double()
    for row, sample in zip(rows, Shards(small.shards, "train"), strict=False):
        loss = loss_of(model, sample.input_ids[None], sample.input_ids[None], "mean")
        exact = torch.cat([of.flatten() for of in torch.autograd.grad(loss, trained)])
        assert (row - exact).norm() <= 2e-5 * exact.norm()
    capsys.readouterr()


def test_an_adapter_needs_a_saved_model(small, tmp_path, capsys):
    assert cli.main(["train", *arguments(small, tmp_path / "run", model="micro")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "--lora_rank 3 trains an adapter of a saved model, and --model micro" in printed
    assert not (tmp_path / "run" / "final_model").exists()


def test_an_adapter_of_another_rank_is_another_run(small, tmp_path):
    first, second = (settings_of(parsed(arguments(small, tmp_path, lora_rank=rank))) for rank in (2, 4))
    assert first.identity(1, "data") != second.identity(1, "data")
