"""A command for the tests of `gradwire launch`: as a module the command `probe`, as a script `gradwire` with it.

`python tests/helpers/rank_command.py launch --world_size 2 -- probe --output_dir D --ranks '{"1": "refuse"}'` does in
each rank what the JSON object says for it; a rank that it does not name waits to be ended if another one fails.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import Field

from gradwire import cli
from gradwire.base.errors import BadInput, Stopped
from gradwire.base.files import write_json
from gradwire.base.strict import Strict
from gradwire.bench.commands import Entry
from gradwire.bench.launch import launch
from gradwire.bench.launch.ranks import ALLOCATOR, THREADS


class Options(Strict):
    output_dir: Path
    ranks: str = Field("{}", description="what each rank does, by its number")
    bad_data: bool = False
    world_size: int | None = None
    device: str = "cpu"
    strategy: str = "naive"
    islands: int = 1


def output_dir(options: Options) -> Path:
    return options.output_dir


def preflight(options: Options) -> None:
    if options.bad_data:
        raise BadInput(f"the data is too small for {options.world_size} ranks.")


def main(options: Options) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *THREADS, *ALLOCATOR)
    environment = {name: os.environ[name] for name in names} | {"pid": os.getpid()}
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    deeds = json.loads(options.ranks)
    deed = deeds.get(os.environ["RANK"], "wait" if deeds else "end")
    signals: list[int] = []
    if deed == "save":  # before anyone knows that this rank is there
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    write_json(options.output_dir / f"started{os.environ['RANK']}.json", environment)
    if deed in TRAINS:
        train(*TRAINS[deed], options.output_dir)
    elif deed == "islands":
        cross(options.output_dir, options.islands)
    elif deed in ("transfer", "gather", "allocate"):
        {"transfer": transfer, "gather": gather, "allocate": allocate}[deed](options.output_dir)
    elif deed == "save":
        save(signals)
    else:
        DEEDS[deed]()


def refuse() -> None:
    raise BadInput("an option is bad.", step=7)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stumble() -> None:
    raise ZeroDivisionError("no such luck")


def wait() -> None:
    time.sleep(60)


def linger() -> None:
    """End while a thread is in torch's C++ code, and the interpreter, if it finalizes, takes longer than the thread."""
    import torch

    store = torch.distributed.HashStore()

    def look() -> None:
        while True:
            with suppress(torch.distributed.DistStoreError):
                store.wait(["nothing"], timedelta(milliseconds=20))

    threading.Thread(target=look, daemon=True).start()
    sys.late = Late()  # type: ignore[attr-defined]


class Late:
    """Freed last, and slowly."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(0.5)


def save(signals: list[int]) -> None:
    """Look for the signal between short steps, as training does, and say that a checkpoint was written.

    A handler that raised could do so where Python ignores it, or before a long sleep that it does not interrupt.
    """
    while not signals:
        time.sleep(0.02)
    raise Stopped("stopped after a checkpoint; run it again to resume.", step=5)


def reduce() -> None:
    """All ranks but the last, which dies, wait for it in a collective."""
    import torch

    from gradwire.comm.collectives.world import process_group

    with process_group(device="cpu") as world:
        values = torch.arange(3.0) + world.rank
        torch.distributed.all_reduce(values)
        assert values.tolist() == [1.0, 3.0, 5.0], values
        if world.rank == world.world_size - 1:
            kill()
        torch.distributed.all_reduce(values)


def desert() -> None:
    """Rank 1 fails while a collective is under way that no other rank joins."""
    import torch

    from gradwire.comm.collectives.world import process_group

    with process_group(device="cpu") as world:
        if world.rank == 1:
            pending = torch.distributed.all_reduce(torch.ones(7), async_op=True)  # noqa: F841
            refuse()
        wait()


def train(strategy: str, method: str | None, folder: Path) -> None:
    """Train for ever; the last rank notes the time and dies in a backward pass, and the others wait for it.

    Under DDP it dies when it encodes its second bucket.
    """
    import torch
    from torch import nn

    from gradwire.comm.collectives import Reducer
    from gradwire.comm.collectives.codec import Codec
    from gradwire.comm.collectives.world import process_group
    from gradwire.comm.compressors import build
    from gradwire.comm.parallel import wrap

    encode, encoded = Codec.encode, itertools.count()

    def die(*_: object) -> None:
        write_json(folder / "killed.json", time.time())
        kill()

    def encode_or_die(self: Codec, *args: Any) -> torch.Tensor:
        if next(encoded) == 3:
            die()
        return encode(self, *args)

    with process_group(device="cpu") as world:
        reducer = None if method is None else Reducer(build(method), error_feedback=True)
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), strategy, reducer, device="cpu")
        for step in itertools.count():
            output = model(torch.ones(2, 5))
            if step == 3 and world.rank == world.world_size - 1:
                if strategy == "ddp":
                    Codec.encode = encode_or_die  # type: ignore[method-assign]
                else:
                    output.register_hook(die)
            output.square().sum().backward()
            model.zero_grad()


def transfer(folder: Path) -> None:
    """Average a megabyte five times, then send one from rank 0; note the fastest, and what the interface sent."""
    import torch

    from gradwire.bench.training import measure
    from gradwire.comm.collectives.world import process_group

    with process_group(device="cpu") as world:
        times = []
        for _ in range(5):
            values = torch.full((2**18 + 1,), 1.0 + world.rank)
            torch.distributed.barrier()
            before, began = measure.transmitted(), time.perf_counter()
            torch.distributed.all_reduce(values)
            times.append(time.perf_counter() - began)
            assert values.eq(values[0]).all() and values[0] == 3.0
        torch.distributed.barrier()  # what is still on its way out is sent before
        found = {"link": measure.link_name(), "seconds": min(times), "bytes": measure.transmitted_since(before)}
        before = measure.transmitted()
        torch.distributed.broadcast(values, 0)
        torch.distributed.barrier()
        found["broadcast"] = measure.transmitted_since(before)
        write_json(folder / f"transfer{world.rank}.json", found)


def cross(folder: Path, islands: int) -> None:
    """Average a megabyte inside each island, then between the islands; note what the interface sent for each."""
    import torch

    from gradwire.bench.training import measure
    from gradwire.comm.collectives.islands import build_islands
    from gradwire.comm.collectives.world import process_group

    with process_group(device="cpu") as world:
        groups = build_islands(islands, "cpu")
        found: dict[str, Any] = {"link": measure.link_name()}
        for name, group in {"inside": groups.inside, "between": groups.between}.items():
            peers = torch.distributed.get_process_group_ranks(group)
            warm = torch.zeros(1)
            torch.distributed.all_reduce(warm, group=group)  # connects them
            torch.distributed.barrier()
            before = measure.transmitted()
            values = torch.full((2**18 + 1,), 1.0 + world.rank)
            torch.distributed.barrier()  # before the other rank of the island sends
            torch.distributed.all_reduce(values, group=group)
            assert values.eq(sum(1.0 + peer for peer in peers)).all()
            torch.distributed.barrier()
            found[name] = measure.transmitted_since(before)
        write_json(folder / f"islands{world.rank}.json", found)


def gather(folder: Path) -> None:
    """Join the others, say so, and wait."""
    from gradwire.comm.collectives.world import process_group

    with process_group(device="cpu") as world:
        write_json(folder / f"joined{world.rank}.json", {})
        wait()


def allocate(folder: Path) -> None:
    """Add tensors of 16 MB in the main and in another thread; note how many of their pages the kernel handed out."""
    import resource
    from threading import Thread

    import torch

    found = []

    def work() -> None:
        for step in range(30):
            if step == 10:
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            torch.ones(4_000_001).add(1).mul(2)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        found.append(faults / (20 * 3 * 16_000_004 / resource.getpagesize()))

    work()
    other = Thread(target=work)
    other.start()
    other.join()
    write_json(folder / f"allocated{os.environ['RANK']}.json", found)


DEEDS = {deed.__name__: deed for deed in (refuse, kill, stumble, wait, reduce, desert, linger)}
DEEDS |= {"end": lambda: None}
TRAINS = {"naive": ("naive", "topk"), "ddp": ("ddp", "int8"), "bucket": ("bucket", None), "fsdp2": ("fsdp2", "topk")}

if __name__ == "__main__":
    cli.COMMANDS["probe"] = Entry("rank_command", "do what a test says")
    launch.RANK = (sys.executable, __file__)
    cli.entry()
