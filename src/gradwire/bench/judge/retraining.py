"""Trainings of one model on parts of its samples, which show what the samples do to a query's loss.

All trainings start from the same weights and take the same number of steps. Each epoch has one order of all samples, in
which those that a training does not use are skipped, so two trainings differ in nothing but their samples. They run on
one thread each: float32 sums, and so the files, do not depend on the number of workers.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from gradwire.attribution.persample.batch import evaluation, losses_of, n_targets
from gradwire.base import parent_watch
from gradwire.base.errors import BadInput, RunFault
from gradwire.base.files import read_object, write_json
from gradwire.base.machine import one_thread
from gradwire.bench.config import Training
from gradwire.bench.training.build import BETA1, decayed
from gradwire.bench.training.objective import loss_sum
from gradwire.bench.training.step import set_learning_rate
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal


# Why: docs/decisions.md, "Attribution is judged by trainings that differ in nothing but their samples".
class Recipe(NamedTuple):
    """How every training of an experiment is done.

    Attributes:
        model: As for `causal.build`.
        training: Steps, batch size, learning rate, and the defaults of `gradwire train` for the rest.
        seed: Of the initial weights and the order of the samples.
    """

    model: str
    training: Training
    seed: int


class Subsets(NamedTuple):
    """Trainings on random subsets, one file each.

    Attributes:
        folder: Gets ``<j>.json`` with the subset's ``members`` and the queries' ``losses``.
        shards: The shards folder: samples of its train split, queries of its val split.
        samples: Number of samples n, from the start of the split.
        queries: Number of queries, likewise.
        fraction: Size of a subset relative to n.
        recipe: Of the trainings.
    """

    folder: Path
    shards: Path
    samples: int
    queries: int
    fraction: float
    recipe: Recipe

    @property
    def size(self) -> int:
        """Number of samples of a subset."""
        return round(self.fraction * self.samples)

    def members(self, number: int) -> list[int]:
        """The positions of subset ``number``, ascending; they do not depend on how many subsets there are."""
        random = np.random.default_rng([self.recipe.seed, number])
        return sorted(random.permutation(self.samples)[: self.size].tolist())

    def run(self, number: int) -> None:
        """Train on one subset and write its file.

        Raises:
            RunFault: If a query's loss is not finite.
        """
        members, train, val = self.members(number), Shards(self.shards, "train"), Shards(self.shards, "val")
        with one_thread():
            model, _ = trained(self.recipe, train, members, self.samples)
            losses = query_losses(model, val, self.queries)
        if not all(map(math.isfinite, losses)):
            raise RunFault(f"the training on subset {number} diverged: use a smaller --lr in another --output_dir.")
        write_json(self.path(number), {"members": members, "losses": losses})

    def path(self, number: int) -> Path:
        """The file of a subset."""
        return self.folder / f"{number}.json"

    def read(self, number: int) -> tuple[list[int], list[float]]:
        """Return members and losses of a finished subset.

        Raises:
            BadInput: If the file is damaged, or of other members or queries.
        """
        stored = read_object(self.path(number))
        losses = stored.get("losses")
        if stored.get("members") != self.members(number) or not isinstance(losses, list) or len(losses) != self.queries:
            raise BadInput(f"{self.path(number)} is not of this subset and these queries: delete it to train again.")
        return stored["members"], losses


def run_missing(subsets: Subsets, total: int, workers: int) -> None:
    """Train on those of the first ``total`` subsets that have no file, in this process or in several.

    Raises:
        RunFault: If a training diverges, or a worker dies.
    """
    missing = [number for number in range(total) if not subsets.path(number).is_file()]
    subsets.folder.mkdir(parents=True, exist_ok=True)
    show = partial(tqdm, desc="subsets", total=total, initial=total - len(missing), disable=None)
    if workers == 1:
        for number in show(missing):
            subsets.run(number)
        return
    pool = ProcessPoolExecutor(min(workers, max(1, len(missing))), get_context("spawn"), _watch_parent)
    try:
        for done in show(as_completed([pool.submit(subsets.run, number) for number in missing])):
            done.result()
    except BrokenProcessPool:
        raise RunFault("a worker was killed, possibly for lack of memory: run the command again to resume.") from None
    finally:
        pool.shutdown(cancel_futures=True)


def trained(
    recipe: Recipe, shards: Shards, members: Sequence[int], samples: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model on ``members`` of the first ``samples`` samples."""
    training = recipe.training
    model = causal.build(recipe.model, shards.meta["vocab_size"], shards.meta["max_length"], recipe.seed)
    groups = decayed(model.named_parameters(), {name for name, p in model.named_parameters() if p.ndim >= 2}, training)
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=(BETA1, training.beta2))
    model.train()
    stream = in_order(members, samples, recipe.seed)
    for step in range(training.steps):
        chosen = [shards[position] for position in islice(stream, training.batch_size)]
        batch = collate(chosen, shards.meta["pad_id"], len(chosen))
        set_learning_rate(optimizer, training, step)
        optimizer.zero_grad()
        (loss_sum(model, batch) / max(1, batch.n_targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        optimizer.step()
    return model, optimizer


def in_order(members: Sequence[int], samples: int, seed: int) -> Iterator[int]:
    """Yield members forever, each epoch in its order of all ``samples``."""
    wanted = set(members)
    for epoch in count():
        order = np.random.default_rng([seed, epoch]).permutation(samples).tolist()
        yield from (position for position in order if position in wanted)


@torch.no_grad()
def query_losses(model: nn.Module, shards: Shards, queries: int) -> list[float]:
    """The loss of each of the first ``queries`` samples: the weighted mean over its targets.

    Raises:
        BadInput: If a query has no target.
    """
    chosen = [shards[position] for position in range(queries)]
    losses: list[float] = []
    with evaluation(model):
        for query in chosen:
            batch = collate([query], shards.meta["pad_id"], 1)
            if not n_targets(batch.labels).all():
                raise BadInput(f"the query {query.sample_id!r} has no target and so nothing to predict.")
            losses += losses_of(model, batch).tolist()
    return losses


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Adam's state by parameter name, as `lm.models.causal.save` takes it."""
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {"state": state, "param_groups": optimizer.param_groups}


def _watch_parent() -> None:
    """End this worker when the process that started it dies, and at Ctrl-C without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ[parent_watch.PARENT] = str(os.getppid())
    parent_watch.watch()
