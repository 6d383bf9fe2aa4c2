"""The callback that collects rows at a Trainer's checkpoints: its stores, and a training that it does not change.

Of `collect/huggingface.py`.
"""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from gradwire import cli
from gradwire.attribution.persample import loop
from gradwire.attribution.store import store
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

pytest.importorskip("accelerate")

SAMPLES = 5


def trained(small, folder, *callbacks, words=True):
    """The weights after four steps with dropout, with checkpoints after steps 2 and 4."""
    from transformers import Trainer, TrainingArguments

    model = causal.load(small.model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    samples = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(9) + 7 * torch.arange(16)[:, None]) % 280]
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=3, learning_rate=1e-2, use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, save_total_limit=1, seed=5,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(small.model) if words else None
    trainer = Trainer(model, arguments, train_dataset=samples, processing_class=tokenizer, callbacks=[*callbacks])
    trainer.train()
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def test_every_checkpoint_has_a_store_and_the_training_is_unchanged(small, tmp_path):
    from gradwire.attribution.collect.huggingface import CollectedGradients

    model = causal.load(small.model)
    size = sum(parameter.numel() for parameter in model.parameters())
    options = {"projection": "none", "max_samples": SAMPLES, "save_interval": 2}
    collected = CollectedGradients(tmp_path / "rows", small.shards, size, **options)
    weights = trained(small, tmp_path / "with", collected)
    plain = trained(small, tmp_path / "without")
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert not (tmp_path / "with/checkpoint-2").exists()
    shards, rows = Shards(small.shards, "train"), {}
    for step in (2, 4):
        rows[step] = store.read(store.all_names(tmp_path / f"rows/step-{step}/dim{size}")).rows
    model.load_state_dict(weights, strict=False)  # without the tied weight's second name
    for position in range(SAMPLES):
        gradient = loop.gradients(model.double(), collate([shards[position]], 0, 1), "mean").gradient
        expected = torch.cat([values.flatten() for values in gradient.values()])
        torch.testing.assert_close(rows[4][position].double(), expected, rtol=1e-3, atol=1e-6)
        assert not torch.allclose(rows[2][position], rows[4][position], rtol=0.1)


def on_a_rank(rank, ranks, group, small, folder, size):
    """Train as torchrun starts it, with rows at each checkpoint; returns the rank's weights."""
    from accelerate.state import AcceleratorState

    from gradwire.attribution.collect.huggingface import CollectedGradients

    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier test in this process
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    options = {"projection": "none", "max_samples": SAMPLES, "save_interval": 2}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}):
        return trained(small, folder / "run", CollectedGradients(folder / "rows", small.shards, size, **options))


def test_rows_of_several_ranks_are_there_once_in_the_order_of_the_data(world, small, tmp_path):
    model = causal.load(small.model)
    size = sum(parameter.numel() for parameter in model.parameters())
    first, second = world(2).run(on_a_rank, small, tmp_path, size)
    assert all(torch.equal(first[name], second[name]) for name in first)
    block, shards = store.read(store.all_names(tmp_path / f"rows/step-4/dim{size}")), Shards(small.shards, "train")
    assert block.ids == [shards[position].sample_id for position in range(SAMPLES)]
    model.load_state_dict(first, strict=False)  # without the tied weight's second name
    for position, row in enumerate(block.rows):
        gradient = loop.gradients(model.double(), collate([shards[position]], 0, 1), "mean").gradient
        expected = torch.cat([values.flatten() for values in gradient.values()])
        torch.testing.assert_close(row.double(), expected, rtol=1e-3, atol=1e-6)


def test_moments_are_those_of_the_checkpoint(small, tmp_path):
    from gradwire.attribution.collect.huggingface import CollectedGradients

    options = {"grad_type": "adam", "projection": "factored", "modules": ("*.mlp.*",), "max_samples": SAMPLES}
    trained(small, tmp_path / "run", CollectedGradients(tmp_path / "rows", small.shards, 64, **options))
    run = tmp_path / "rows/step-4"
    assert json.loads((run / "dim64/manifest.json").read_text())["grad_type"] == "adam"
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--recompute", "3"]) == 0


def test_bad_options_and_a_checkpoint_without_tokenizer_are_refused(small, tmp_path):
    from gradwire.attribution.collect.huggingface import CollectedGradients

    with pytest.raises(BadInput, match="CollectedGradients: unknown key 'grad_typ'"):
        CollectedGradients(tmp_path / "rows", small.shards, 64, grad_typ="adam")
    callback = CollectedGradients(tmp_path / "rows", small.corpus, 64, cache_dir=tmp_path)
    with pytest.raises(BadInput, match="tokenizer"):
        trained(small, tmp_path / "run", callback, words=False)
