"""torchtitan 0.3 on CPUs under torch 2.13: synthetic data, and stand-ins for what it expects of GPUs and a later torch.

Its own code and models are unchanged. Imported before anything else of torchtitan.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as schedules
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule


class Cpu:
    """`torch.cpu` with what torchtitan asks a device for."""

    memory_stats = staticmethod(lambda *_: {})
    reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_device_properties = staticmethod(lambda *_: types.SimpleNamespace(total_memory=2**33))
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")
if not hasattr(dist, "set_timeout"):  # torch 2.14
    dist.set_timeout = lambda timeout, group=None: None


def whole_batch(step):
    """A pipeline's ``step`` of torch 2.13, which takes a batch, for a caller that passes its micro-batches."""

    def adapted(self, *args, arg_mbs=None, kwarg_mbs=None, target_mbs=None, **options):
        if arg_mbs:
            args = (torch.cat([micro[0] for micro in arg_mbs]),)
        if kwarg_mbs:
            options |= {name: torch.cat([micro[name] for micro in kwarg_mbs]) for name in kwarg_mbs[0]}
        return step(self, *args, target=torch.cat(target_mbs) if target_mbs else None, **options)

    return adapted


def summed(set_factor):
    """A setter of torchtitan's factor of 1, for a backend without PREMUL_SUM, which would apply it."""

    def adapted(self, factor):
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    return adapted


FSDPModule.set_gradient_divide_factor = summed(FSDPModule.set_gradient_divide_factor)
for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    schedule.step = whole_batch(schedule.step)

import torchtitan.models.qwen3 as qwen3  # noqa: E402  after the stand-ins, whose names it copies
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry as llama3_configs  # noqa: E402
from torchtitan.models.llama3 import model_registry as llama3_models  # noqa: E402
from torchtitan.models.qwen3 import config_registry as qwen3_configs  # noqa: E402
from torchtitan.models.qwen3 import model_registry as qwen3_models  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

SMALL = {"n_layers": 2, "moe_hidden_dim": 64, "num_experts": 4, "top_k": 2, "n_heads": 4, "n_kv_heads": 2}
build_layers = qwen3._build_qwen3_moe_layers
qwen3._build_qwen3_moe_layers = lambda **given: build_layers(**{**given, **SMALL})  # of 300 million parameters


class Tokens(BaseTokenizer):
    """Bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, **_):
        return list(text.encode())

    def decode(self, ids, **_):
        return bytes(ids).decode()

    def get_vocab_size(self):
        return 2048


class Sequences(BaseDataLoader):
    """Arithmetic sequences, which a model can learn; each data-parallel rank has its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.rank, self.world = dp_rank, dp_world_size
        self.length, self.batch, self.batches = seq_len, local_batch_size, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.batches * self.world + self.rank)
            self.batches += 1
            start = torch.randint(0, 64, (self.batch, 1), generator=generator)
            stride = torch.randint(1, 4, (self.batch, 1), generator=generator)
            tokens = (start + stride * torch.arange(self.length + 1)) % 64
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            positions = torch.arange(self.length).expand(self.batch, -1).contiguous()
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self):
        return {f"batches_{self.rank}": self.batches}

    def load_state_dict(self, state):
        self.batches = state.get(f"batches_{self.rank}", self.batches)


def config(model: str, folder: str, steps: int, **parallelism: int) -> Trainer.Config:
    """The configuration of a debug model: ``llama3`` or ``qwen3``, a mixture of experts."""
    if model == "llama3":
        chosen = llama3_configs.llama3_debugmodel()
        chosen.model_spec = llama3_models("debugmodel")
    else:
        chosen = qwen3_configs.qwen3_moe_debug()
        chosen.model_spec = qwen3_models("debugmodel_moe")
    for layer in chosen.model_spec.model.layers:  # flex attention has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    chosen.tokenizer, chosen.dataloader, chosen.dump_folder = Tokens.Config(), Sequences.Config(), folder
    training = chosen.training
    training.steps, training.local_batch_size, training.seq_len, training.disable_cuda_graphs = steps, 2, 64, True
    chosen.profiler.enable_profiling = chosen.validator.enable = False
    chosen.optimizer.implementation = "foreach"
    chosen.debug.seed = 1
    chosen.parallelism.spmd_backend = "partial_dtensor"  # torch 2.13 does not read the default's annotations
    for name, degree in parallelism.items():
        setattr(chosen.parallelism, f"{name}_degree", degree)
    return chosen
