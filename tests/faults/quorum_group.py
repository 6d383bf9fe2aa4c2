"""A group of one process that trains with others through a lighthouse, and may kill itself; started by test_quorum.py.

``python quorum_group.py '{"number": 0, "lighthouse": …, "out": …, …}'`` writes what it did to ``out`` when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.quorum import QuorumReducer
from gradwire.comm.parallel.optimizers.quorum import Quorum

SHAPES = {"0.weight": (13, 7), "0.bias": (13,), "2.weight": (5, 13), "2.bias": (5,)}
RATE, OUTER, H = 0.02, {"lr": 0.7, "momentum": 0.6}, 3


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))


def batch(number, step):
    """Each group's own samples, of its own size of inputs."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    x = (1 + number / 2) * torch.randn(6, 7, generator=generator)
    return x, torch.tanh(x[:, :5]) + 0.1 * number


def loss_of(trained, number, step):
    x, y = batch(number, step)
    return (trained(x) - y).square().mean()


def rate(step):
    return RATE * (1 + step % 4)


def manager_of(number, lighthouse, least=1, timeout=30.0, quorum_timeout=120.0, **options):
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout)),
        min_replica_size=least,
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
        replica_id=f"group_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(seconds=quorum_timeout),
        **options,
    )
    manager.kept_store = store
    return manager


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(owner, name, due, after=False):
    """Kill this process in a call of a function for which ``due`` is true."""
    called = getattr(owner, name)

    def replaced(*args, **kwargs):
        if not due(*args):
            return called(*args, **kwargs)
        if after:
            called(*args, **kwargs)
        return kill()

    setattr(owner, name, replaced)


def arm(point, last):
    """Kill this process at a point of the round whose last optimizer step is ``last``."""
    calls = []

    def nth(number):
        def due(*_):
            calls.append(current[0].reducer.step == last)
            return sum(calls) == number and calls[-1]

        return due

    current = []
    if point == "encoding":
        killed_in(Codec, "encode", lambda codec, *_: codec.step == last)
    elif point in ("exchange", "second exchange"):
        killed_in(ops, "all_to_all", nth(1 + (point == "second exchange")))
    elif point == "agreement":
        killed_in(QuorumReducer, "agree", lambda reducer: reducer.step == last, after=True)
    elif point == "quorum":
        killed_in(Quorum, "meet", lambda quorum: quorum.rounds and quorum.rounds[-1].step == last)
    elif point == "recovery":
        killed_in(Quorum, "_receive", lambda *_: True)
    return current


def main():
    given = json.loads(sys.argv[1])
    number, steps, point, last = given["number"], given["steps"], *given.get("kill", ("none", -1))
    torch.set_num_threads(1)
    current = arm(point, last)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = manager_of(number, given["lighthouse"], **given.get("manager", {}))
    Path(given["out"]).with_suffix(".ready").touch()
    while not Path(given["go"]).exists():  # the lighthouse knows all managers that are there
        time.sleep(0.05)
    trained = model()
    inner = torch.optim.AdamW(trained.parameters(), lr=RATE, betas=(0.8, 0.9))
    options = {"outer": OUTER, "steps": steps, "compressor": "onebit", **given.get("options", {})}
    optimizer = gw.DiLoCo(inner, trained, sync_every=H, manager=manager, **options)
    current.append(optimizer)
    anchors = {}
    while (step := optimizer.reducer.step) < steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss_of(trained, number, step).backward()
        if point == "step" and step == last:
            kill()
        optimizer.step()
        optimizer.zero_grad()
        held, until = given.get("hold", (-1, ""))
        while step == held and not Path(until).exists():
            time.sleep(0.05)
        time.sleep(0.5 if step >= held >= 0 else 0)  # who has come asks for a quorum
        if optimizer.in_step:
            anchors[optimizer.reducer.step] = {name: p.clone() for name, p in optimizer.anchors.items()}
    torch.save(
        {
            "rounds": [tuple(entry) for entry in optimizer.quorum.rounds],
            "joined": [tuple(entry) for entry in optimizer.quorum.joined],
            "anchors": anchors,
            "momenta": optimizer.momenta,
        },
        given["out"],
    )
    manager.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
