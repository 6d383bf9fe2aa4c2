"""torchrun --nproc_per_node 2 defaults.py few|bfloat16|float64|meta|inference|deterministic: torch's settings.

Training scripts set the default type or device, or deterministic algorithms, or evaluate where the compression is
made. Neither a gradient nor a weight depends on that, bit by bit.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.base.errors import BadInput
from gradwire.comm.compressors.registry import available

dist.init_process_group("gloo")
rank, way, few = dist.get_rank(), sys.argv[1], sys.argv[1] == "few"
CHAINS = ("hadamard+int8", "topk+int8", "randomk+bf16", "randomk")
LOCAL = {
    "DiLoCo": {"sync_every": 2, "compressor": "int8", "error_feedback": True},
    "StreamingDiLoCo": {"sync_every": 2, "fragments": 1, "compressor": "int8", "algorithm": "exchange"},
    "ReplayDiLoCo": {"sync_every": 2, "embeddings": "int8"},
    "OneBitAdam": {"dense_steps": 1},
    "DeMo": {},
}


class Net(nn.Module):
    """An embedding and two layers."""

    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(19, 16), nn.Linear(16, 65), nn.Linear(65, 1)

    def forward(self, x):
        return self.head(self.body(self.words(x)).tanh())


@contextlib.contextmanager
def settings(changed, making=False):
    """Set what the way says; inference mode only where the compression is made."""
    try:
        if changed and way == "meta":
            torch.set_default_device("meta")
        elif changed and way == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif changed and way != "inference":
            torch.set_default_dtype(torch.float64 if few else getattr(torch, way))
        with torch.inference_mode(changed and making and way == "inference"):
            yield
    finally:
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def steps(model, optimizer, changed):
    """Train; return all weights."""
    xs = [torch.randint(19, (5,), generator=torch.Generator().manual_seed(9 * i + rank)) for i in range(4)]
    for x in xs:
        with settings(changed):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([weight.detach().flatten() for weight in weights])


def compressed(method, changed, **options):
    """Train with compressed gradients of DDP."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with settings(changed, making=True):
        gw.compress_gradients(model, method, optimizer=optimizer, **options)
    return steps(model, optimizer, changed)


def sharded(method, changed, **options):
    """Train with compressed gradients and parameters of FSDP2."""
    model = net()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with settings(changed, making=True):
        gw.compress_gradients(model, method, optimizer=optimizer, **options)
    return steps(model, optimizer, changed)


def local(name, changed, **options):
    """Train with an optimizer that communicates."""
    model = net()
    with settings(changed, making=True):
        given = model.parameters() if "Adam" in name or name == "DeMo" else torch.optim.AdamW(model.parameters())
        optimizer = getattr(gw, name)(given, model, **options)
    return steps(model, optimizer, changed)


wrong = []


def compare(train, name, **options):
    """Compare training with and without the setting."""
    try:
        want = train(name, False, **options)
    except BadInput:
        assert options == {"error_feedback": True}, (name, options)  # unbiased and lossless ones refuse it
        return
    try:
        got = train(name, True, **options)
    except Exception as error:
        wrong.append(f"{name} {options}: {type(error).__name__}: {error}")
    else:
        wrong.extend([] if torch.equal(got, want) else [f"{name} {options}: other weights"])


for method in ("hadamard+int8", "sketch", "randomk") if few else (*available(), *CHAINS):
    compare(compressed, method)
compare(compressed, "bins", error_feedback=True, ef_average=0.8, granularity="row")
compare(local, "DiLoCo", **LOCAL["DiLoCo"])
if not few:
    for method in (*available(), *CHAINS):
        compare(compressed, method, error_feedback=True)
    compare(sharded, "int8", error_feedback=True, parameters="int4-diff")
    compare(sharded, "topk", error_feedback=True, residual_dtype="bf16", parameters="int8")
    for name, options in LOCAL.items():
        compare(local, name, **options)
assert not wrong, "\n".join(wrong)
print("right")
