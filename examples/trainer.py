"""Hugging Face's Trainer with compressed gradients: torchrun --nproc_per_node 2 examples/trainer.py.

It needs accelerate: pip install 'gradwire[trainer]'.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from gradwire import Reducer, build, hook


class CompressedGradients(TrainerCallback):
    """Sends gradients through a compressor; with one process there is nothing to send, and it does nothing."""

    def __init__(self, trainer: Trainer, compressor: str, **options: Any) -> None:
        self.trainer = trainer
        self.compressor = build(compressor, **options)
        self.reducer: Reducer | None = None

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Hook the model that the Trainer has just wrapped by DDP."""
        if args.world_size > 1:
            self.reducer = Reducer(self.compressor, error_feedback=True, seed=args.seed)
            hook(self.trainer.model_wrapped, self.reducer)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End the reducer's step; a gradient that is not finite ends the training on every rank."""
        if self.reducer is not None:
            self.reducer.finish()


def main() -> None:
    """Train a tiny GPT-2 on a sentence of numbers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLMLoss"))
    samples = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(16) + torch.arange(64)[:, None]) % 64]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=8, learning_rate=1e-2, gradient_accumulation_steps=2, use_cpu=True, ddp_backend="gloo",
            ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=4, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=samples)
        compressed = CompressedGradients(trainer, "int8")
        trainer.add_callback(compressed)
        trainer.train()
    if compressed.reducer is not None and arguments.process_index == 0:
        traffic = compressed.reducer.traffic
        print(f"step {compressed.reducer.step}: {traffic['sent']:,} bytes sent of {traffic['raw']:,}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
