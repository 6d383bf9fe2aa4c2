"""A callback for Hugging Face's Trainer under DDP. It needs accelerate: ``pip install 'gradwire[trainer]'``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradwire.base.errors import BadInput
from gradwire.comm.collectives.reducer import check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.parallel import Compression, compress_gradients

ARGUMENTS = ("optimizer", "inside", "parameters")  # of `compress_gradients`, not of a reducer


class CompressedGradients(TrainerCallback):
    """Averages the gradients of a Trainer's model through a compressor; with one rank it does nothing.

    Pass it as any callback: ``Trainer(..., callbacks=[CompressedGradients("int8")])``, or to `Trainer.add_callback`.

    A gradient that is not finite ends the training on every rank. Each checkpoint holds the residuals of every rank,
    and resuming from it restores them. A second ``trainer.train()`` goes on with the residuals and the steps of the
    first one, as it does with the optimizer's moments; where the Trainer starts from another model (``model_init``), it
    starts without any.

    Args:
        compressor: As for `compress_gradients`: a compressor, its name, or a mapping of its ``method`` and options.
        options: Other options of `compress_gradients`, such as ``error_feedback``. ``nonfinite`` is ``raise``.

    Attributes:
        compression: The compression, from the start of training on; None with one rank.

    Raises:
        BadInput: If the compressor or an option is unknown or invalid, or ``nonfinite`` is ``skip``, as the
            Trainer has no way to skip a step; from the training, as `compress_gradients`.
    """

    def __init__(self, compressor: Compressor | str | Mapping[str, Any], **options: Any) -> None:
        if options.get("nonfinite") == "skip":
            raise BadInput("nonfinite is 'skip', but a Trainer's callback cannot skip a step: use 'raise'.")
        self.compressor = as_compressor(compressor)
        self.options = options
        check_options(self.compressor, **{name: given for name, given in options.items() if name not in ARGUMENTS})
        self.compression: Compression | None = None
        self._hooked: ref[nn.Module] | None = None  # the model of the last training

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Hook the model that the Trainer has wrapped, unless it is, and restore residuals if it resumes."""
        if args.world_size == 1:
            return
        wrapped = trainer_of(self).model_wrapped
        if self.compression is None or self._hooked is None or self._hooked() is not wrapped:
            defaults = {"nonfinite": "raise", "seed": args.seed}
            self.compression = compress_gradients(wrapped, self.compressor, **{**defaults, **self.options})
            self._hooked = ref(wrapped)
        if state.global_step:
            file = residuals_file(args, state)
            if file.is_file():
                self.compression.load_state_dict(torch.load(file, weights_only=True))
            else:
                warnings.warn(f"{file} is missing: the compressor starts without residuals", stacklevel=2)
                self.compression.reducer.begin(state.global_step)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End the step of the compressor."""
        if self.compression is not None:
            self.compression.finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save this rank's residuals."""
        if self.compression is not None:
            file = residuals_file(args, state)
            file.parent.mkdir(parents=True, exist_ok=True)  # another rank may not have made it yet
            torch.save(self.compression.state_dict(), file)


def trainer_of(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that is calling a callback: transformers hands callbacks the model before it was wrapped."""
    frame = inspect.currentframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Trainer) and callback in value.callback_handler.callbacks:
                return value
        frame = frame.f_back
    raise BadInput(f"{type(callback).__name__} is for Trainer's callbacks: Trainer(..., callbacks=[...]).")


def residuals_file(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the file of this rank's residuals in the checkpoint of the current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"gradwire-rank{args.process_index}.pt"
