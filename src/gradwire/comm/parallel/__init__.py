"""Data-parallel training: one file per strategy, and the functions that a training loop needs."""

from gradwire.comm.parallel.comm_hook import comm_hook
from gradwire.comm.parallel.compression import Compression, compress_gradients, hook
from gradwire.comm.parallel.model import block_sizes, compile_blocks, named_parameters
from gradwire.comm.parallel.state import (
    checkpoint_state,
    filled,
    full_optimizer_state,
    full_state_dict,
    joined,
    load_checkpoint_state,
    own_part,
    replica_bytes,
    replicated,
)
from gradwire.comm.parallel.strategy import accumulation, clip_grad_norm, strategy_of
from gradwire.comm.parallel.wrap import strategy_class, wrap

__all__ = [
    "Compression",
    "accumulation",
    "block_sizes",
    "checkpoint_state",
    "clip_grad_norm",
    "comm_hook",
    "compile_blocks",
    "compress_gradients",
    "filled",
    "full_optimizer_state",
    "full_state_dict",
    "hook",
    "joined",
    "load_checkpoint_state",
    "named_parameters",
    "own_part",
    "replica_bytes",
    "replicated",
    "strategy_class",
    "strategy_of",
    "wrap",
]
