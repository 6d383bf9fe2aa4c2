"""The callback for Hugging Face's Trainer, on two ranks: a resumed training equals an unbroken one."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from gradwire.base.errors import BadInput

pytest.importorskip("accelerate")


TOPK = {"method": "topk", "density": 0.1}


@contextmanager
def trainer_of(rank, world, folder, steps, *callbacks):
    """A Trainer of a small model, in the environment that torchrun makes."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

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
        adam_epsilon=1e-3,  # keys' biases have gradients of 0, and Adam would take a whole step along their rounding
        ddp_backend="gloo", per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        disable_tqdm=True, ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=100,
    )  # fmt: skip
    yield Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:5], callbacks=[*callbacks])
    monkeypatch.undo()


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def trained(rank, world, group, folder, steps, resume, remove=False):
    """The weights, residuals and warnings of a training with top-k and error feedback."""
    from gradwire.comm.huggingface import CompressedGradients, residuals_file

    compressed = CompressedGradients(TOPK, error_feedback=True)
    caught = warnings.catch_warnings(record=True)
    with trainer_of(rank, world, folder, steps, compressed) as trainer, caught as noted:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    if remove:
        residuals_file(trainer.args, trainer.state).unlink()
    residuals = compressed.compression.reducer.codec.state_dict()["residuals"]
    return weights_of(trainer), residuals, [str(one.message) for one in noted]


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


def twice(rank, world, group, folder, compressor):
    """The weights after each of two trainings of one Trainer, with an evaluation in between, and the bytes sent."""
    from transformers import TrainerCallback

    from gradwire import comm_hook
    from gradwire.comm.huggingface import CompressedGradients

    class Registered(TrainerCallback):
        """The same compression by torch's own protocol, registered once."""

        def on_train_begin(self, *_, **__):
            if trainer.state.global_step == 0 and not hooks:
                hooks.append(comm_hook(trainer.model, TOPK, error_feedback=True))
                trainer.model_wrapped.register_comm_hook(*hooks[0])

    weights, sent, hooks = [], [], []
    with trainer_of(rank, world, folder, 3) as trainer:
        if compressor == "registered":
            trainer.add_callback(Registered())
        elif compressor is not None:
            callback = CompressedGradients(compressor, error_feedback=compressor == TOPK)
            trainer.add_callback(callback)
        for _ in range(2):
            trainer.train()
            weights.append(weights_of(trainer))
            sent.append(0 if compressor in (None, "registered") else callback.compression.traffic["sent"])
            trainer.evaluate()
    return weights, sent


def test_a_second_training_goes_on_with_the_first_ones_reducer(world, tmp_path):
    for compressor, oracle, bound in (("none", None, 2e-6), (TOPK, "registered", 0.0)):
        expected = world(2).run(twice, str(tmp_path / "expected"), oracle)
        for (weights, sent), (exact, _) in zip(
            world(2).run(twice, str(tmp_path / "trained"), compressor), expected, strict=True
        ):
            for after, plain in zip(weights, exact, strict=True):
                torch.testing.assert_close(after, plain, rtol=0, atol=bound)
            assert sent[1] == 2 * sent[0] > 0, "each gradient is sent once"


def rolled_back(rank, world, group, folder):
    """Weights and residuals of a training, and again after another one from its checkpoint in mid-training."""
    from gradwire.comm.huggingface import CompressedGradients

    reached = []
    compressed = CompressedGradients(TOPK, error_feedback=True)
    with trainer_of(rank, world, folder, 6, compressed) as trainer:
        for checkpoint in (None, f"{folder}/checkpoint-3"):
            trainer.train(resume_from_checkpoint=checkpoint)
            residuals = compressed.compression.reducer.codec.state_dict()["residuals"]
            reached.append((weights_of(trainer), deepcopy(residuals)))
    return reached


def test_a_second_training_from_a_checkpoint_has_the_checkpoints_residuals(world, tmp_path):
    for first, second in world(2).run(rolled_back, str(tmp_path)):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_callback_that_cannot_work_is_refused():
    from gradwire.comm.huggingface import CompressedGradients

    with pytest.raises(BadInput, match="cannot skip a step"):
        CompressedGradients("int8", nonfinite="skip")
    with pytest.raises(BadInput, match="'int8'"):
        CompressedGradients("int9")
    with pytest.raises(BadInput, match=r"'eror_feedback'\. Did you mean 'error_feedback'"):
        CompressedGradients("int8", eror_feedback=True)
    with pytest.raises(BadInput, match=r"for Trainer's callbacks: Trainer\(..., callbacks=\[...\]\)"):
        CompressedGradients("int8").on_train_begin(SimpleNamespace(world_size=2), None, None)
