"""torchrun --nproc_per_node 2 subclass_state.py: moments that are tensor subclasses, as torchao's, resume."""

import io

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

dist.init_process_group("gloo")
rank = dist.get_rank()


class Coded(torch.Tensor):
    """A tensor that is stored in half the bits; what it is made of can be copied, and little else works."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function is aten.copy_.default:
            source = args[1].codes if isinstance(args[1], Coded) else args[1]
            args[0].codes.copy_(source)
            return args[0]
        if function in (aten.detach.default, aten.alias.default):
            return cls(args[0].codes)
        if function is aten._to_copy.default:
            return cls(args[0].codes.to((kwargs or {}).get("device")))  # shares memory on one device, as torchao's
        raise NotImplementedError(f"{function} of {cls.__name__}")


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum of that type."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                kept = self.state[p]
                if not kept:
                    kept["momentum"] = Coded(torch.zeros_like(p, dtype=torch.bfloat16))
                momentum = kept["momentum"].codes.float().mul(0.9).add(p.grad)
                kept["momentum"].copy_(momentum)
                p.add_(momentum, alpha=-group["lr"])


def start(embeddings):
    """A model and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    inner = Momentum(model.parameters())
    kept = {"embeddings": "int8"} if embeddings else {}
    kind = gw.ReplayDiLoCo if embeddings else gw.DiLoCo
    return model, kind(inner, model, sync_every=3, compressor="int8", **kept)


def train(model, optimizer, steps):
    """Take some steps of a run; return the parameters."""
    for step in steps:
        x = torch.randint(9, (4,), generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


for embeddings in (False, True):
    unbroken = train(*start(embeddings), range(8))
    for at in (2, 4):
        model, optimizer = start(embeddings)
        train(model, optimizer, range(at))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        for again in (False, True):  # into a new optimizer, and into one that has moments
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            codes = [p["momentum"].codes.clone() for p in saved["optimizer"]["state"].values()]
            if not again:
                model, optimizer = start(embeddings)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            assert all(map(torch.equal, train(model, optimizer, range(at, 8)), unbroken)), (embeddings, at, again)
            after = [p["momentum"].codes for p in saved["optimizer"]["state"].values()]
            assert all(map(torch.equal, codes, after)), "training changed what was loaded"
print("right")
