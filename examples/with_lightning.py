"""Lightning with compressed gradients: torchrun --nproc_per_node 2 examples/with_lightning.py FOLDER.

It needs lightning: pip install lightning. A second call resumes from the last checkpoint in FOLDER.
"""

import io
import sys
from typing import cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from gradwire import comm_hook


class Llama(lightning.LightningModule):
    """A tiny Llama."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
        self.llama = LlamaForCausalLM(config)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.llama(input_ids=ids, labels=ids).loss
        if self.trainer.is_last_batch:
            self.print(f"epoch {self.current_epoch}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class CompressedGradients(lightning.Callback):
    """Top-k with error feedback; a checkpoint holds the residuals of every rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.state, self.hook = comm_hook(model, {"method": "topk", "density": 0.1}, error_feedback=True)

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Register the hook, which DDPStrategy(ddp_comm_hook=...) does on GPUs only."""
        trainer.strategy.model.register_comm_hook(self.state, self.hook)

    def state_dict(self) -> dict:
        """Return the residuals of all ranks."""
        torch.save(self.state.state_dict(), file := io.BytesIO())  # its tensors share storage, which pickle would copy
        ranks = [b""] * dist.get_world_size()
        dist.all_gather_object(ranks, file.getvalue())
        return {"ranks": ranks}

    def load_state_dict(self, saved: dict) -> None:
        """Restore those of this rank."""
        self.state.load_state_dict(torch.load(io.BytesIO(saved["ranks"][dist.get_rank()]), weights_only=True))


model = Llama()
compressed = CompressedGradients(model)
saving = ModelCheckpoint(sys.argv[1], save_top_k=-1, save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed", max_epochs=5, accumulate_grad_batches=2,
    callbacks=[compressed, saving], logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
samples = (torch.arange(16) + torch.arange(64)[:, None]) % 64
trainer.fit(model, DataLoader(cast(Dataset, samples), batch_size=4, shuffle=True), ckpt_path="last")
traffic = compressed.state.reducer.traffic
model.print(f"{traffic['sent']:,} bytes sent of {traffic['raw']:,}")
