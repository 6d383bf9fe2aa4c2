"""torchrun --nproc_per_node 1 sync_every.py: each wrong argument of an optimizer is one clear ValueError."""

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.base.errors import BadInput
from gradwire.comm.communication import Outer, Streaming
from gradwire.comm.reduction import Exempt

dist.init_process_group("gloo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def local(kind, **given):
    net = Net()
    return kind(torch.optim.AdamW(net.parameters()), net, **{"sync_every": 5, **given})


def direct(kind, **given):
    net = Net()
    return kind(net.parameters(), net, **given)


counts = (0, -1, 2.5, "5", True, float("nan"))
lengths = (*counts, None, {}, {1: 5}, {0: 2.5}, [5])
rates = (-1.0, "x", None, float("nan"))
ADAMW = {"lr": rates, "eps": rates, "weight_decay": rates, "betas": [(0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9, ("x", 0.9)]}
programs = (  # an optimizer, the arguments that it needs, and wrong values of each argument
    (local, gw.DiLoCo, {}, {"sync_every": lengths, "steps": counts, "reducer": ["int8"]}),
    (local, gw.StreamingDiLoCo, {"fragments": 2}, {"sync_every": lengths, "steps": counts}),
    (local, gw.StreamingDiLoCo, {"fragments": 2}, {"fragments": counts, "delay": counts[1:], "alpha": [1, -1, "x"]}),
    (local, gw.ReplayDiLoCo, {"embeddings": "int8"}, {"sync_every": lengths, "steps": counts}),
    (direct, gw.OneBitAdam, {"dense_steps": 2}, ADAMW),
    (direct, gw.Muon, {}, ADAMW),
    (direct, gw.OneBitAdam, {"dense_steps": 2}, {"dense_steps": counts, "max_norm": [0, -1, "x"], "reducer": ["int8"]}),
    (direct, gw.DeMo, {}, {"lr": rates, "weight_decay": rates, "reducer": ["int8"], "ef_decay": [2, "x"]}),
)
faults = []
for make, kind, needed, arguments in programs:
    for name, values in arguments.items():
        for wrong in values:
            try:
                make(kind, **{**needed, name: wrong})
                faults.append(f"{kind.__name__}({name}={wrong!r}): accepted")
            except ValueError as error:  # BadInput is one
                if name not in str(error) or "\n" in str(error):
                    faults.append(f"{kind.__name__}({name}={wrong!r}): {error}")
            except Exception as error:
                faults.append(f"{kind.__name__}({name}={wrong!r}): {type(error).__name__}: {error}")
models = (  # a model of options, and wrong values of one
    (Outer, {}, {"lr": rates, "momentum": (1.0, *rates), "nesterov": ("x", None), "lrr": [1]}),
    (Streaming, {"fragments": 2}, {"fragments": counts, "delay": counts[1:], "alpha": (1, *rates), "ends": [1]}),
    (Exempt, {}, {"max_numel": counts[1:], "max_ndim": counts[1:], "names": (1, [2]), "name": ["x"]}),
)
for kind, needed, arguments in models:
    kind(**needed)
    for name, wrong in ((name, value) for name, values in arguments.items() for value in values):
        try:
            kind(**{**needed, name: wrong})
            faults.append(f"{kind.__name__}({name}={wrong!r}): accepted")
        except BadInput as error:
            if not str(error).startswith(f"{kind.__name__}: ") or name not in str(error) or "\n" in str(error):
                faults.append(f"{kind.__name__}({name}={wrong!r}): {error}")
for kind in (gw.OneBitAdam, gw.DeMo, gw.Muon):
    try:
        kind(Net().parameters(), None, **({"dense_steps": 2} if kind is gw.OneBitAdam else {}))
        faults.append(f"{kind.__name__} without a model: accepted")
    except Exception as error:
        faults += [] if isinstance(error, ValueError) else [f"{kind.__name__} without a model: {error!r}"]
print("\n".join(faults) or "right", flush=True)
