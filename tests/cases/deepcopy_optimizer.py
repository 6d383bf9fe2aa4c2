"""torchrun --nproc_per_node 2 deepcopy_optimizer.py module|ddp|both: a copy of a model and optimizer trains on alike.

The optimizers take turns with and without DDP, unless both are asked for.
"""

import copy
import pickle
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.base.errors import BadInput

dist.init_process_group("gloo")
way, rank = sys.argv[1], dist.get_rank()
WAYS = ("module", "ddp")
ADAM = {"dense_steps": 2, "lr": 1e-2, "weight_decay": 0.1}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An inner optimizer with two groups."""
    named = dict(model.named_parameters())
    groups = [{"params": [p for p in named.values() if (p.ndim == 1) == vectors]} for vectors in (False, True)]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS = {
    "diloco": lambda m: gw.DiLoCo(adamw(m), m, sync_every=3, compressor="int8"),
    "sparse": lambda m: gw.DiLoCo(adamw(m), m, sync_every={0: 1, 4: 2}, compressor=gw.TopK(density=0.1)),
    "streaming": lambda m: gw.StreamingDiLoCo(adamw(m), m, sync_every=4, fragments=2, compressor="int8"),
    "replay": lambda m: gw.ReplayDiLoCo(adamw(m), m, sync_every=3, compressor="bins", embeddings="int8"),
    "demo": lambda m: gw.DeMo(m.parameters(), m, lr=1e-2),
    "onebit": lambda m: gw.OneBitAdam(m.parameters(), m, **ADAM),
}
COPIES = {"copied": copy.deepcopy, "pickled": lambda pair: pickle.loads(pickle.dumps(pair))}


def built() -> nn.Module:
    """A model."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Train for some steps of a run; return the parameters."""
    for step in steps:
        x = torch.randint(11, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


chosen = [
    (name, wrapped)
    for number, name in enumerate(OPTIMIZERS)
    for turn, wrapped in enumerate(WAYS)
    if way == "both" or (way == wrapped and number % 2 == turn)
]
if way != "module":  # a copy of a model alone is plain DDP, which averages
    model = DistributedDataParallel(built())
    optimizer = OPTIMIZERS["diloco"](model)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        loaded = pickle.loads(pickle.dumps(model))
    for twin in (copy.deepcopy(model), loaded):
        x = torch.full((2, 3), rank)
        twin(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        for mean, p in zip(twin.parameters(), model.parameters(), strict=True):
            mine = p.grad.clone()
            dist.all_reduce(p.grad)
            torch.testing.assert_close(mean.grad, p.grad / 2)
            assert p.ndim == 1 or not torch.equal(mine, mean.grad), "the ranks' gradients differ, and stay apart"
for name, wrapped in chosen:
    model = built() if wrapped == "module" else DistributedDataParallel(built())
    optimizer = OPTIMIZERS[name](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # replaces the optimizer's step
    train(model, optimizer, range(4))
    pairs = {copied: make((model, optimizer)) for copied, make in COPIES.items()}
    before = [p.detach().clone() for p in model.parameters()]
    for copied, (twin, its) in pairs.items():
        assert its.model is twin, (name, copied)
        pairs[copied] = train(twin, its, range(4, 9))
        assert all(map(torch.equal, model.parameters(), before)), f"{name}: the original has moved"
    right = train(model, optimizer, range(4, 9))
    for copied, parameters in pairs.items():
        assert all(map(torch.equal, parameters, right)), (name, copied)

alone = gw.DiLoCo(adamw(model := built()), model, sync_every=2)
copy.deepcopy(alone).step  # noqa: B018  by itself, of parameters that are copies, as torch's optimizers
pair = dist.new_group(timeout=timedelta(seconds=5))
model = DistributedDataParallel(built(), process_group=pair)
compression = gw.compress_gradients(model, "int8")
of_all = DistributedDataParallel(built())
for refused in (compression, compression.reducer, gw.compress_gradients(of_all, "int8")):
    try:
        pickle.dumps(refused)
    except BadInput as error:
        assert "state_dict()" in str(error), error
    else:
        raise AssertionError("accepted")
print("right")
