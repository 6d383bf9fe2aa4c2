"""What training takes of each rank's memory: predicted from plain numbers, and measured on a wrapped model.

Everything is float32 and the optimizer is AdamW, so a parameter costs 4 bytes, its gradient 4 and its two moments 8;
sharding divides all three by the number of ranks (after Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, whose 16 bytes per parameter are shared out otherwise, for half precision).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradwire.collectives.bytes import FLOAT32
from gradwire.parallel.wrap import strategy_class

MOMENTS = 2  # AdamW's


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Args:
        parameters: Its parameters or shards of them.
        gradients: Theirs.
        optimizer: AdamW's moments of them.
        communication: What the strategy holds beside these: DDP's buckets, the units that FSDP has gathered.
        activations: What the forward pass keeps for the backward pass.
        residuals: What error feedback keeps.
    """

    parameters: int
    gradients: int
    optimizer: int
    communication: int = 0
    activations: int = 0
    residuals: int = 0

    @property
    def total(self) -> int:
        """All of it: about the peak. Activations go while gradients come; tensors of a moment are left out.

        Of these AdamW's step has the most, about half of its moments, when no activations are left.
        """
        return sum(getattr(self, field.name) for field in fields(self))


def predict(strategy: str, world: int, units: Sequence[int], *, activations: int = 0, residuals: int = 0) -> Memory:
    """What one rank needs, if every parameter is trained.

    A replica is whole everywhere. ``naive`` holds nothing else, the gradients of ``bucket`` are views of its buckets,
    and ``ddp`` has buckets beside the gradients. A sharded unit costs its W-th part, rounded up; at work FSDP holds,
    whole, the first unit, the parameters of two others (one computes, the next is prefetched) and the gradient of one.
    What `param_compress` encodes of one unit, for a moment, is less than that gradient and not counted.

    Args:
        strategy: Its name.
        world: Number of ranks.
        units: Elements of what FSDP shards as one: first what is in no block, then each block.
        activations: Bytes, as from `gpt2_activations`.
        residuals: Bytes of the reducer's residuals: with error feedback 4 per element on every rank, sharded or not,
            and in an all-reduce as much again for the rank's own row.

    Raises:
        BadInput: If there is no such strategy.
    """
    kept = {"activations": activations, "residuals": residuals}
    if strategy_class(strategy).kind == "all_reduce" or world == 1:
        whole = FLOAT32 * sum(units)
        buckets = whole if strategy == "ddp" else 0
        return Memory(whole, whole, MOMENTS * whole, buckets, **kept)
    shards = FLOAT32 * sum(-(-unit // world) for unit in units)
    first, *blocks = units
    gathered = first + sum(sorted(blocks)[-2:]) + max(units)
    return Memory(shards, shards, MOMENTS * shards, FLOAT32 * gathered, **kept)


def gpt2_activations(
    *, layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int, checkpointing: bool = False
) -> int:
    """Bytes that GPT-2's forward pass and its loss keep for the backward pass, in float32 and without dropout.

    Counted as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (MLSys 2023,
    section 4.1), for the model of `transformers`, whose attention keeps no matrix of scores. Per layer, in units of
    ``batch * length * width`` elements: 1 + 1 what enters the two normalisations, 1 + 1 what enters the two matrices
    behind them, 3 queries, keys and values, 1 the attention's output, 16 the four factors of the tanh form of GELU, 4
    its output: 28. Beside them a mean and a deviation per token and normalisation, and a logarithm per token and head.
    At the end two units more, and the logarithms of all the probabilities. Token ids are left out.

    Args:
        layers: Number of transformer blocks.
        width: Size of a token's vector.
        heads: Attention heads.
        vocabulary: Rows of the embedding, padding included.
        batch: Samples of a micro-batch.
        length: Tokens of a sample.
        checkpointing: Only what enters a block is kept, and one block at a time computes the rest again.
    """
    tokens = batch * length
    block = 28 * tokens * width + 4 * tokens + heads * tokens
    kept = layers * tokens * width + block - tokens * width if checkpointing else layers * block
    end = 2 * tokens * width + 2 * tokens + batch * (length - 1) * vocabulary
    return FLOAT32 * (kept + end)


def measure(model: nn.Module, optimizer: Optimizer) -> Memory:
    """The exact bytes of parameters, gradients and moments on this rank, after an optimizer step, gradients kept."""
    parameters = list(model.parameters())
    moments = (value for state in optimizer.state.values() for value in state.values() if value.ndim)
    return Memory(
        stored(parameters),
        stored(parameter.grad for parameter in parameters if parameter.grad is not None),
        stored(moments),
    )


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which tensors lie, shared memory once; of a sharded one this rank's part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    blocks = {block.data_ptr(): block.nbytes() for block in (tensor.untyped_storage() for tensor in local)}
    return sum(blocks.values())


@contextmanager
def saved_activations(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what forward passes in here keep for the backward pass, without the parameters of an unwrapped model.

    `stored` tells the bytes, as long as the list is held.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
