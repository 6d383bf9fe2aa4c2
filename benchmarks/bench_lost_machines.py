"""Groups that are killed at random times, and memory while groups come and go: the figures of ``lost-machines.md``.

- ``python benchmarks/bench_lost_machines.py FOLDER kills``: four groups of one process train by AdamW or Muon with
  rounds of one bit, twenty times. FOLDER gets the results as they come: a second call goes on.
- ``python benchmarks/bench_lost_machines.py FOLDER memory``: two groups train while a third joins and is killed, again
  and again.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from gradwire import DiLoCo, Muon
from gradwire.base.files import write_json
from gradwire.bench.launch.lighthouse import LOG, lighthouse
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.islands import QuorumReducer
from gradwire.comm.collectives.world import host_store
from gradwire.comm.parallel.optimizers.quorum import Quorum, digest_of
from gradwire.lm.data import corpus, tokenizer
from gradwire.lm.data.sources import build as source
from gradwire.lm.models import causal

MODEL = '{"architecture": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}'
GROUPS, ROUNDS, H = 4, 60, 5
INNER = ("adamw", "muon")
VOCABULARY, LENGTH, BATCH, RATE = 1024, 32, 8, 5e-3
HELD_OUT = 100_000  # tokens
ACTIVITIES: dict[str, list[tuple[Any, str]]] = {  # what a group does in a round besides its local steps
    "encoding": [(Codec, "encode")],
    "exchange": [(ops, "begin_all_gather"), (ops, "begin_all_to_all"), (ops.Pending, "wait"), (QuorumReducer, "agree")],
    "quorum": [(Quorum, "_ask")],
    "receiving": [(HTTPTransport, "recv_checkpoint")],
    "sending": [(HTTPTransport, "send_checkpoint")],
}
LONGEST = {"step": 0.1, "encoding": 0.002, "exchange": 0.01, "receiving": 0.01, "sending": 0.01}  # seconds to the kill
RECONFIGURATIONS = (20, 50, 100, 200)
FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torchft", "gradwire", "transformers.models.gpt2.modeling_gpt2"])  # groups start at once


class Kill(NamedTuple):
    """The end of a group: so many seconds after it begins an activity, in a step or later."""

    activity: str
    step: int
    seconds: float


Plan = dict[int, Sequence[Kill | None]]
"""By a group's number, for each of its starts the kill that ends it, or None."""


class Group(FORKS.Process):
    """A start of a group.

    Attributes:
        results: The file of what it did, if it was not killed.
        used: The file of what it used at each reconfiguration.
        activity: What it does at present.
    """

    def __init__(self, args: argparse.Namespace, number: int, kill: Kill | None, address: str, together: Any) -> None:
        super().__init__(daemon=True)
        self.args, self.number, self.killed, self.address, self.together = args, number, kill, address, together
        self.results, self.used = args.folder / f"{number}.json", args.folder / f"{number}.used.json"
        self.activity, self.step = FORKS.Array("c", 20), 0
        self.start()

    def run(self) -> None:
        """Train, and write what it did."""
        os.dup2(os.open(self.args.folder / "groups.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        tokens, steps = torch.load(self.args.folder / "tokens.pt"), self.args.rounds * H
        model, digests = causal.build(MODEL, VOCABULARY, LENGTH, 0).train(), {}
        self.watch()
        manager, _store = manager_of(self.number, self.address)
        if self.together is not None:
            self.together.wait()  # the lighthouse knows all groups
        inner = Muon(model.parameters(), model) if self.args.inner == "muon" else torch.optim.AdamW(model.parameters())
        given = {"sync_every": H, "steps": steps, "compressor": "onebit", "manager": manager}
        optimizer = DiLoCo(inner, model, outer={"lr": 1.0, "momentum": 0.0}, **given)
        while (step := optimizer.reducer.step) < steps:
            self.step = step
            with self.doing("step"):
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1, (step + 1) / 10, 2 * (1 - step / steps))
                model(**batch(tokens[HELD_OUT:], self.number, step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if optimizer.in_step:
                shared = [*optimizer.anchors.values(), *optimizer.momenta.values()]
                digests[optimizer.reducer.step] = int(digest_of(shared))
        with torch.no_grad():
            losses = [float(model.eval()(**batch(tokens[:HELD_OUT], 0, part, 64)).loss) for part in range(8)]
        perplexity, rounds = math.exp(sum(losses) / len(losses)), [ended._asdict() for ended in optimizer.quorum.rounds]
        write_json(self.results, {"perplexity": perplexity, "digests": digests, "rounds": rounds})
        os._exit(0)

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Note an activity; kill this process in it, if that is planned."""
        before, self.activity.value = self.activity.value, name.encode()
        activity, first, seconds = self.killed or Kill("", 0, 0)
        if name == activity and self.step >= first and not any(signal.getitimer(signal.ITIMER_REAL)):
            signal.setitimer(signal.ITIMER_REAL, seconds)  # the signal ends a process as SIGKILL does
        try:
            yield
        finally:
            self.activity.value = before

    def watch(self) -> None:
        """Note activities of a round, and what this process uses before each reconfiguration."""
        for name, functions in ACTIVITIES.items():
            for owner, function in functions:
                setattr(owner, function, self.doing(name)(getattr(owner, function)))
        used, configure = [], ProcessGroupGloo.configure

        def configured(*given: Any) -> None:
            used.append((self.step // H, *resources()))
            write_json(self.used, used)
            configure(*given)

        ProcessGroupGloo.configure = configured


def manager_of(number: int, address: str) -> tuple[Manager, dist.TCPStore]:
    """A group's manager, and the store that it needs."""
    store, limit = host_store("127.0.0.1", 0), timedelta(minutes=3)
    given = {"store_addr": "127.0.0.1", "store_port": store.port, "rank": 0, "world_size": 1, "hostname": "127.0.0.1"}
    given |= {"lighthouse_addr": address, "replica_id": f"group_{number}", "load_state_dict": None, "state_dict": None}
    given |= {"min_replica_size": 2, "use_async_quorum": False, "timeout": limit, "quorum_timeout": limit}
    return Manager(pg=ProcessGroupGloo(timeout=limit), **given), store


def resources() -> tuple[float, int]:
    """Resident MiB, and open file descriptors."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the allocator keeps some of what is free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len([*Path("/proc/self/fd").iterdir()])


def prepare(folder: Path) -> None:
    """Write the tokens of a corpus."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tokens.pt").exists():
        corpus.write(folder / "corpus.json", source("pydocs", {}).open().documents, 3_000_000)
        words = tokenizer.prepare("bpe", folder / "tokenizer", folder / "corpus.json", VOCABULARY)
        encoded = words.encode_batch([document.text for document in corpus.documents(folder / "corpus.json")])
        torch.save(torch.tensor([token for ids in encoded for token in (*ids, words.eos_id)]), folder / "tokens.pt")


def batch(tokens: torch.Tensor, number: int, step: int, size: int = BATCH) -> dict[str, Any]:
    """A group's samples of a step."""
    starts = torch.randint(len(tokens) - LENGTH, (size,), generator=torch.Generator().manual_seed(1000 * number + step))
    ids = tokens[starts[:, None] + torch.arange(LENGTH)]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def trained(args: argparse.Namespace, plan: Plan) -> tuple[list[Any], list[str]]:
    """Train; return what the groups did that have not been killed, and what the others did when they were."""
    kills, ends, killed = {number: [*starts] for number, starts in plan.items()}, [], []
    with lighthouse(2, 60) as (address, _):
        together = FORKS.Barrier(len(plan))
        running = [Group(args, number, starts.pop(0), address, together) for number, starts in kills.items()]
        while running:
            for ended in [group for group in running if group.sentinel in wait([g.sentinel for g in running])]:
                running.remove(ended)
                if ended.exitcode == 0:
                    ends.append(json.loads(ended.results.read_text()))
                elif ended.exitcode == -signal.SIGALRM:
                    killed.append(f"{ended.number} in {ended.activity.value.decode()}")
                    if kills[ended.number]:
                        running.append(Group(args, ended.number, kills[ended.number].pop(0), address, None))
                else:
                    raise RuntimeError(f"group {ended.number} ended with {ended.exitcode}: see groups.log")
    return ends, killed


def planned(index: int) -> tuple[str, Plan]:
    """An inner optimizer, and a kill in the first half; where a group recovers, it or the sender of the state."""
    draw, recovery = random.Random(index), ("receiving", "sending")[index // 4 % 2]
    activity = ("step", "encoding", "exchange", recovery)[index % 4]
    number, step, plan = draw.randrange(1, GROUPS), H * draw.randint(2, ROUNDS // 2), {n: [None] for n in range(GROUPS)}
    kill = Kill(activity, step, draw.uniform(0, LONGEST[activity]))
    returns = [None] * draw.randrange(2)
    if activity == recovery:
        plan[number] = [Kill("step", step, draw.uniform(0, LONGEST["step"])), None]
    if activity == "receiving":
        plan[number][1:] = [kill._replace(step=0), *returns]
    else:
        plan[0 if activity == "sending" else number] = [kill, *returns]
    return draw.choice(INNER), plan


def result_of(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Train; say whether all groups had the same anchors after each round, and what the kills cost."""
    ends, killed = trained(args, plan)
    digests = {item for end in ends for item in end["digests"].items()}
    means = {ended["step"]: ended["groups"] for end in ends for ended in end["rounds"] if ended["groups"]}
    return {
        "inner": args.inner,
        "killed": ", ".join(killed),
        "restarts": sum(map(len, plan.values())) - GROUPS,
        "ended": len(ends),
        "equal": len(digests) == len(dict(digests)) and len({end["perplexity"] for end in ends}) == 1,
        "repeated": max(ended["attempts"] - 1 for end in ends for ended in end["rounds"]),
        "missed": max(sum(not ended["groups"] for ended in end["rounds"]) for end in ends),
        "without a mean": args.rounds - len(means),
        "perplexity": ends[0]["perplexity"],
    }


def kills(args: argparse.Namespace) -> str:
    """Make the runs that have no result yet; return all as a table."""
    results = args.folder / "kills.jsonl"
    done = results.read_text().splitlines() if results.exists() else []
    whole = [{first + number: [None] for number in range(GROUPS)} for first in (0, 4, 8)]  # numbers choose the data
    plans = [*itertools.product(INNER, whole), *map(planned, range(20))]
    for index in range(len(done), len(plans)):
        args.inner, plan = plans[index]
        done.append(json.dumps(result_of(args, plan)))
        results.write_text("\n".join(done) + "\n")
    rows = [json.loads(line) for line in done]
    for row in rows:
        without = next(base for base in rows if base["inner"] == row["inner"])
        row["difference"] = f"{100 * (row['perplexity'] / without['perplexity'] - 1):+.2f} %"
    return tabulate(rows, "keys", tablefmt="pipe", floatfmt=".2f")


def memory(args: argparse.Namespace) -> str:
    """Train in two groups while a third comes and goes; return what the two use then."""
    args.rounds = 1_000_000
    with lighthouse(2, 60, lost_after=1) as (address, _):
        together = FORKS.Barrier(2)
        kept = [Group(args, number, None, address, together) for number in range(2)]
        used: list[Any] = []
        while len(used) <= max(RECONFIGURATIONS):
            Group(args, 2, Kill("step", 0, LONGEST["step"]), address, None).join()
            used = json.loads(kept[0].used.read_text())
        for group in kept:
            group.kill()
    first, second = [json.loads(group.used.read_text()) for group in kept]
    rows = [[after, *first[after], *second[after][1:]] for after in RECONFIGURATIONS]
    columns = ["reconfigurations", "rounds", "group 0: MiB", "descriptors", "group 1: MiB", "descriptors"]
    return tabulate(rows, columns, tablefmt="pipe", floatfmt=".1f")


def main() -> None:
    """Run what was asked for, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=("kills", "memory"))
    args = parser.parse_args()
    args.rounds, args.inner = ROUNDS, "adamw"
    os.environ |= LOG
    prepare(args.folder)
    print(kills(args) if args.what == "kills" else memory(args))


if __name__ == "__main__":
    main()
