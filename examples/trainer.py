"""Hugging Face's Trainer with compressed gradients: torchrun --nproc_per_node 2 examples/trainer.py.

It needs accelerate: pip install 'gradwire[trainer]'.
"""

import tempfile
from typing import cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.comm.huggingface import CompressedGradients


def main() -> None:
    """Train a tiny GPT-2 on a sentence of numbers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    others = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLMLoss"}
    model = GPT2LMHeadModel(GPT2Config.from_dict({**sizes, **others}))
    samples = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(16) + torch.arange(64)[:, None]) % 64]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=8, learning_rate=1e-2, gradient_accumulation_steps=2, use_cpu=True, ddp_backend="gloo",
            ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=4, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        compressed = CompressedGradients("int8", error_feedback=True)
        Trainer(model, arguments, train_dataset=cast(Dataset, samples), callbacks=[compressed]).train()
    if compressed.compression is not None and arguments.process_index == 0:
        traffic = compressed.compression.traffic
        print(f"step {compressed.compression.step}: {traffic['sent']:,} bytes sent of {traffic['raw']:,}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
