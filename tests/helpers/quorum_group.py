"""A rank of a group that trains with others through a lighthouse, and may kill itself; for test_quorum.py."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchft.checkpointing import HTTPTransport

import gradwire as gw
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.islands import QuorumReducer
from gradwire.comm.parallel.optimizers.quorum import Quorum

SHAPES = {"0.weight": (13, 7), "0.bias": (13,), "2.weight": (5, 13), "2.bias": (5,)}
RATE, OUTER, H = 0.02, {"lr": 0.7, "momentum": 0.6}, 3


def model(width=13, seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, width), torch.nn.Tanh(), torch.nn.Linear(width, 5))


def batch(number, step):
    """Each group's samples, at another scale."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    x = (1 + number / 2) * torch.randn(6, 7, generator=generator)
    return x, torch.tanh(x[:, :5]) + 0.1 * number


def loss_of(trained, number, step, rank=0):
    x, y = batch(number + 4 * rank, step)
    return (trained(x) - y).square().mean()


def rate(step):
    return RATE * (1 + step % 4)


def manager_of(number, lighthouse, files, least=1, timeout=30.0, quorum_timeout=120.0, **options):
    from torchft import Manager, ProcessGroupGloo

    rank = dist.get_rank()
    port = 0 if rank == 0 else int(files.get("port"))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    files.set("port", str(store.port))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout)),
        min_replica_size=least,
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
        replica_id=f"group_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=rank,
        world_size=dist.get_world_size(),
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=timeout),
        quorum_timeout=timedelta(seconds=quorum_timeout),
        **options,
    )
    manager.kept_store = store
    return manager


def join_processes(files):
    """Make the ranks of this group a process group; it is the first rank's."""
    if dist.get_rank() == 0:
        os.setpgid(0, 0)
        files.set("leader", str(os.getpid()))  # afterwards: nobody can join a group that is not there yet
    else:
        os.setpgid(0, int(files.get("leader")))


def kill_now():
    """Kill this rank at once, and the others of its group a second later, as torchrun does."""
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 -{os.getpgrp()}"])
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(owner, name, due, after=False):
    """Kill this process in a call of a function for which ``due`` is true."""
    called = getattr(owner, name)

    def replaced(*args, **kwargs):
        if not due(*args):
            return called(*args, **kwargs)
        if after:
            called(*args, **kwargs)
        return kill_now()

    setattr(owner, name, replaced)


def lost_in(owner, name, due, calls):
    """After a call of a function for which ``due`` is true, note it and raise: a connection is lost."""
    called = getattr(owner, name)

    def replaced(*args, **kwargs):
        result = called(*args, **kwargs)
        if due(*args):
            calls.append(name)
            raise RuntimeError("a connection is lost")
        return result

    setattr(owner, name, replaced)


def arm(point, last):
    """Kill this process at a point of the round whose last optimizer step is ``last``, or lose a connection there."""
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
        killed_in(ops, "begin_all_to_all", nth(1 + (point == "second exchange")))
    elif point == "agreement":
        killed_in(QuorumReducer, "agree", lambda reducer: reducer.step == last, after=True)
    elif point == "quorum":
        killed_in(Quorum, "meet", lambda quorum: quorum.rounds and quorum.rounds[-1].step == last)
    elif point == "join":
        killed_in(Quorum, "_call_roll", lambda *_: time.sleep(3) is None)  # the others have its state by then
    elif point == "transfer":
        lost_in(QuorumReducer, "agree", lambda reducer: reducer.step == last, calls)
        lost_in(HTTPTransport, "recv_checkpoint", lambda *_: len(calls) == 1, calls)
    return current


def train(
    number,
    lighthouse,
    out,
    go,
    steps,
    kill=("none", -1),
    hold=(-1, ""),
    pause=0.0,
    options=None,
    manager=None,
    rank=0,
    ranks=1,
    whole=False,
):
    """Train as a rank of a group; write what it did to ``out`` at the end, and messages to a file of the same name.

    Args:
        number: The group's.
        lighthouse: Its address.
        out: Path of what it did.
        go: A file before which the group does not join; it makes ``out`` with the suffix ``.ready`` when it could.
        steps: Optimizer steps of the run.
        kill: A point of a round, the last step of that round, and the only rank if not all; at ``anchor`` it changes an
            anchor instead.
        hold: A step, and a file that it waits for in it.
        pause: Seconds of a step.
        options: Of DiLoCo.
        manager: Options of the manager.
        rank: This one in the group.
        ranks: Of the group; several hold the model in shards.
        whole: Whether they hold it whole all the same.
    """
    log = os.open(Path(out).with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    os.environ["RUST_LOG"] = "error"
    torch.set_num_threads(1)
    (point, last, *whose), (held, until) = kill, hold
    if whose not in ([], [rank]):
        point = "none"
    armed = arm(point, last)
    files = dist.FileStore(str(Path(out).with_suffix("").with_suffix(".store")), ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks)
    join_processes(files)
    with_manager = manager_of(number, lighthouse, files, **manager or {})
    Path(out).with_suffix(".ready").touch()
    while not Path(go).exists():  # the lighthouse knows all managers that are there
        time.sleep(0.05)
    trained = model(**(options or {}).pop("model", {}))
    if ranks > 1 and not whole:
        fully_shard(trained)
    inner = torch.optim.AdamW(trained.parameters(), lr=RATE, betas=(0.8, 0.9))
    given = {"outer": OUTER, "steps": steps, "compressor": "onebit", **(options or {})}
    optimizer = gw.DiLoCo(inner, trained, sync_every=H, manager=with_manager, **given)
    armed.append(optimizer)
    anchors = {}
    while (step := optimizer.reducer.step) < steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss_of(trained, number, step, rank).backward()
        if point == "step" and step == last:
            kill_now()
        if point == "anchor" and step == last:
            optimizer.anchors["0.bias"][2] += 1e-6
        optimizer.step()
        optimizer.zero_grad()
        while step == held and not Path(until).exists():
            time.sleep(0.05)
        time.sleep(0.5 if step >= held >= 0 else pause)  # who has come asks for a quorum
        if optimizer.in_step:
            anchors[optimizer.reducer.step] = {name: p.clone() for name, p in optimizer.anchors.items()}
    joined = [tuple(entry) for entry in optimizer.quorum.joined]
    rounds = [tuple(entry) for entry in optimizer.quorum.rounds]
    torch.save({"rounds": rounds, "joined": joined, "anchors": anchors, "rank": rank}, out)
    with_manager.shutdown(wait=False)
    os._exit(0)
