"""The callback for Hugging Face's Trainer, on two ranks: a resumed training equals an unbroken one."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradwire.errors import BadInput

pytest.importorskip("accelerate")


def trained(rank, world, group, folder, steps, resume, remove=False):
    """The weights, residuals and warnings of a training with top-k and error feedback."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gradwire.huggingface import CompressedGradients, residuals_file

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # as torchrun sets them; the group is there
    monkeypatch = pytest.MonkeyPatch()
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    AcceleratorState._reset_state(reset_partial_state=True)  # other tests' ranks use this process, too
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLMLoss"}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **ids))
    samples = [{"input_ids": row, "labels": row} for row in (torch.arange(12) + torch.arange(64)[:, None]) % 61]
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True,
        ddp_backend="gloo", per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        disable_tqdm=True, ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=100,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples)
    compressed = CompressedGradients(trainer, {"method": "topk", "density": 0.1}, error_feedback=True)
    trainer.add_callback(compressed)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    monkeypatch.undo()
    if remove:
        residuals_file(arguments, trainer.state).unlink()
    residuals = compressed.reducer.codec.state_dict()["residuals"]
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return weights, residuals, [str(one.message) for one in noted]


def test_a_resumed_training_equals_an_unbroken_one(world, tmp_path):
    unbroken = world(2).run(trained, str(tmp_path / "unbroken"), 6, None)
    world(2).run(trained, str(tmp_path / "resumed"), 3, None)
    resumed = world(2).run(trained, str(tmp_path / "resumed"), 6, True)
    for (weights, residuals, _), (again, kept, _) in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        torch.testing.assert_close(kept, residuals, rtol=0, atol=0)
    first, second = (residuals for _, residuals, _ in unbroken)
    assert str(first) != str(second), "each rank has its own residuals"


def test_a_checkpoint_without_residuals_is_resumed_with_a_warning(world, tmp_path):
    world(2).run(trained, str(tmp_path), 3, None, True)
    for _, _, notes in world(2).run(trained, str(tmp_path), 6, True):
        assert any("the compressor starts without residuals" in note for note in notes)


def test_a_trainer_cannot_skip_steps():
    from gradwire.huggingface import CompressedGradients

    with pytest.raises(BadInput, match="cannot skip a step"):
        CompressedGradients(None, "int8", nonfinite="skip")
