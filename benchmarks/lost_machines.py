"""Replica groups on torchft: one is killed and returns, against the same training without a kill.

``RUST_LOG=error python benchmarks/lost_machines.py FOLDER`` (with ``pip install torchft``) starts torchft's lighthouse
and four groups of one process, which train a small GPT-2 by `DiLoCo` with one bit. Group 2 kills itself in a round.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from gradwire import DiLoCo
from gradwire.base.files import read_json, write_json
from gradwire.lm.data import corpus, tokenizer
from gradwire.lm.data.sources import build as source
from gradwire.lm.models import causal

GROUPS, LEAST, KILLED = 4, 2, 2  # groups of a run, the fewest that train, and the group that is killed
ROUNDS, H = 60, 5
STEP = 10 * H + H // 2  # in which it is killed
MODEL = '{"architecture": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}'
VOCABULARY, LENGTH, BATCH, RATE, HELD_OUT = 1024, 32, 8, 5e-3, 100_000
LIMIT = timedelta(minutes=3)
FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torchft", "gradwire", "transformers.models.gpt2.modeling_gpt2"])  # groups start at once


def prepare(folder: Path) -> None:
    """Write the tokens of a corpus."""
    corpus.write(folder / "corpus.json", source("pydocs", {}).open().documents, 3_000_000)
    words = tokenizer.prepare("bpe", folder / "tokenizer", folder / "corpus.json", VOCABULARY)
    encoded = words.encode_batch([document.text for document in corpus.documents(folder / "corpus.json")])
    torch.save(torch.tensor([token for ids in encoded for token in (*ids, words.eos_id)]), folder / "tokens.pt")


def batch(tokens: torch.Tensor, number: int, step: int, size: int = BATCH) -> dict[str, Any]:
    """A group's samples of a step."""
    starts = torch.randint(len(tokens) - LENGTH, (size,), generator=torch.Generator().manual_seed(1000 * number + step))
    ids = tokens[starts[:, None] + torch.arange(LENGTH)]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def group(folder: Path, number: int, address: str, last: int | None) -> None:
    """Train as a group, and write what it did; one with a last step kills itself before it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=LEAST,
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"group_{number}",
        hostname="127.0.0.1",
    )
    tokens, steps = torch.load(folder / "tokens.pt"), ROUNDS * H
    model = causal.build(MODEL, VOCABULARY, LENGTH, 0).train()
    inner, outer = torch.optim.AdamW(model.parameters()), {"lr": 1.0, "momentum": 0.0}
    optimizer = DiLoCo(inner, model, sync_every=H, outer=outer, steps=steps, compressor="onebit", manager=manager)
    while (step := optimizer.reducer.step) < steps:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameters in optimizer.param_groups:
            parameters["lr"] = RATE * min(1, (step + 1) / 10, 2 * (1 - step / steps))
        model(**batch(tokens[HELD_OUT:], number, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [float(model.eval()(**batch(tokens[:HELD_OUT], 0, part, 64)).loss) for part in range(8)]
    rounds = [ended.groups for ended in optimizer.quorum.rounds]
    write_json(folder / f"{number}.json", {"perplexity": math.exp(sum(losses) / len(losses)), "rounds": rounds})
    os._exit(0)  # torchft's threads would wait for each other


def trained(folder: Path, last: int | None) -> list[Any]:
    """Train with a group that ends before its last step and returns; return the perplexity and the rounds."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=LEAST, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    starts = [(number, last if number == KILLED else None) for number in range(GROUPS)]
    running = [FORKS.Process(target=group, args=(folder, number, address, end)) for number, end in starts]
    for process in running:
        process.start()
    if last is not None:
        running[KILLED].join()
        running[KILLED] = FORKS.Process(target=group, args=(folder, KILLED, address, None))
        running[KILLED].start()
    for process in running:
        process.join()
    ends = [read_json(folder / f"{number}.json") for number in range(GROUPS)]
    assert len({end["perplexity"] for end in ends}) == 1, "groups ended with different weights"
    means = [len(groups) for groups in ends[0]["rounds"]]
    return [ends[0]["perplexity"], *(means.count(size) for size in range(GROUPS, 0, -1))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the corpus, the tokens and what each group records")
    to = parser.parse_args().folder
    prepare(to)
    rows = [["no kill", *trained(to, None)], ["killed, returns", *trained(to, STEP)]]
    columns = ["", "perplexity", *(f"rounds of {size}" for size in range(GROUPS, 0, -1))]
    print(tabulate(rows, columns, tablefmt="pipe", floatfmt=".2f"))
