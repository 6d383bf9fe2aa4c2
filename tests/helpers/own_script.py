"""A training script of one's own around a small Llama: WAY FOLDER FIRST LAST.

It takes the steps from FIRST to LAST with top-k, error feedback, bfloat16 autocast and two micro-batches, continues
from FOLDER if FIRST is not 0, and leaves its state there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from gradwire import comm_hook
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

COMPRESSOR = {"method": "topk", "density": 0.1}
MICROS = 2


def llama() -> LlamaForCausalLM:
    """Grouped attention, two layers, the same weights on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def ids_of(rank: int, step: int, micro: int) -> torch.Tensor:
    """A micro-batch: rows that count, each from a different start."""
    start = torch.randint(61, (4, 1), generator=torch.Generator().manual_seed(1000 * rank + MICROS * step + micro))
    return (torch.arange(13) + start) % 61


def plain(way: str, folder: Path, first: int, last: int) -> None:
    """DDP with the pair of a state and a hook, or FSDP2 with a hooked reducer, in a loop written by hand."""
    dist.init_process_group("gloo")
    model = llama()
    if way == "ddp":
        model = DistributedDataParallel(model)
        reducing, reduce = comm_hook(model, COMPRESSOR, error_feedback=True)
        model.register_comm_hook(reducing, reduce)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        reducing = Reducer(COMPRESSOR, error_feedback=True)
        hook(model, reducing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    residuals = folder / f"residuals{dist.get_rank()}.pt"
    if first:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        reducing.load_state_dict(torch.load(residuals, weights_only=True))
    for step in range(first, last):
        for micro in range(MICROS):
            ends = micro == MICROS - 1
            if way == "ddp":
                model.require_backward_grad_sync = ends
            else:
                model.set_requires_gradient_sync(ends)
            ids = ids_of(dist.get_rank(), step, micro)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss / MICROS
            loss.backward()
        if way != "ddp":
            reducing.finish()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {MICROS * loss.item():.3f}", flush=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    torch.save(reducing.state_dict(), residuals)
    finish(model, getattr(reducing, "reducer", reducing), folder)


def with_accelerate(folder: Path, first: int, last: int) -> None:
    """Accelerate's loop and checkpoints."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICROS)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reducer = Reducer(COMPRESSOR, error_feedback=True)
    hook(model, reducer)
    residuals = folder / f"residuals{accelerator.process_index}.pt"
    if first:
        accelerator.load_state(str(folder / "checkpoint"))
        reducer.load_state_dict(torch.load(residuals, weights_only=True))
    for step in range(first, last):
        for micro in range(MICROS):
            ids = ids_of(accelerator.process_index, step, micro)
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    reducer.finish()
                optimizer.step()
                optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)
    accelerator.save_state(str(folder / "checkpoint"))
    torch.save(reducer.state_dict(), residuals)
    finish(model, reducer, folder)


def with_trainer(folder: Path, first: int, last: int) -> None:
    """Hugging Face's Trainer and the callback, which keeps the residuals in the Trainer's checkpoints."""
    from transformers import Trainer, TrainingArguments

    from gradwire.comm.huggingface import CompressedGradients

    samples = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(13) + torch.arange(96)[:, None]) % 61]
    arguments = TrainingArguments(
        str(folder), max_steps=last, save_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True,
        bf16=True, ddp_backend="gloo", ddp_find_unused_parameters=False, per_device_train_batch_size=4,
        gradient_accumulation_steps=MICROS, dataloader_pin_memory=False, logging_steps=1, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    compressed = CompressedGradients(COMPRESSOR, error_feedback=True)
    trainer = Trainer(llama(), arguments, train_dataset=samples, callbacks=[compressed])
    trainer.train(resume_from_checkpoint=bool(first))
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step'] - 1}: loss {entry['loss']:.3f}", flush=True)
    assert compressed.compression is not None
    finish(trainer.model_wrapped, compressed.compression.reducer, folder)


def finish(model: torch.nn.Module, reducer: Reducer, folder: Path) -> None:
    """Save what a resumed run has to have too, and print the bytes."""
    weights = {
        name.removeprefix("module."): p.detach().to_local() if hasattr(p, "to_local") else p.detach()
        for name, p in model.named_parameters()
    }
    ended = {"weights": weights, "residuals": reducer.codec.state_dict()["residuals"]}
    torch.save(ended, folder / f"end{dist.get_rank()}.pt")
    print(f"{reducer.traffic['sent']:,} bytes sent of {reducer.traffic['raw']:,}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    way, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if way == "accelerate":
        with_accelerate(folder, first, last)
    elif way == "trainer":
        with_trainer(folder, first, last)
    else:
        plain(way, folder, first, last)
