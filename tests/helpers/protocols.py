"""The reductions' protocols in one process: every rank's part in turn, written from the contract alone.

Nothing of `gradwire.comm.collectives` is used: the cutting, the generators, the residuals and the bytes are done here
again, one parameter at a time. Only encodings and `rounds` are the compressors' own, which their own tests define.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from lockstep import lockstep

from gradwire.comm.compressors.rounds import Context


class Shard(NamedTuple):
    """``parameter.flatten()[at:at + numel]``, which belongs to ``row`` and is encoded in the shape of ``form``."""

    row: int
    at: int
    numel: int
    form: tuple[int, ...]


def shard(row, at, numel, shape):
    """A matrix where it is whole rows of a parameter of at least two dimensions, else a vector."""
    width = math.prod(shape[1:])
    whole = len(shape) > 1 and at % width == 0 and numel % width == 0
    return Shard(row, at, numel, (numel // width, width) if whole else (numel,))


def by_rows(shapes, world):
    """Every parameter cut by `torch.chunk` along its first dimension: chunk r is rank r's."""
    cut = {}
    for name, shape in shapes.items():
        width, at = math.prod(shape[1:]), 0
        cut[name] = []
        for row, chunk in enumerate(torch.arange(shape[0]).chunk(world)):
            cut[name].append(shard(row, at, len(chunk) * width, shape))
            at += len(chunk) * width
    return cut


def anywhere(units, world):
    """Every unit's parameters one after another, each on a multiple of 16 bytes, cut into ``world`` equal rows."""
    cut = {}
    for shapes in units:
        starts, end = {}, 0
        for name, shape in shapes.items():
            starts[name] = -(-end // 4) * 4
            end = starts[name] + math.prod(shape)
        row_numel = -(-end // world)
        for name, shape in shapes.items():
            owners = (torch.arange(math.prod(shape)) + starts[name]) // row_numel
            rows, counts = owners.unique_consecutive(return_counts=True)
            places = [0, *counts.cumsum(0).tolist()]
            parts = zip(rows.tolist(), places, counts.tolist(), strict=False)
            cut[name] = [shard(row, at, numel, shape) for row, at, numel in parts]
    return cut


class Protocol:
    """All ranks of one run, with what they keep from step to step.

    Args:
        compressor: What encodes.
        cut: The shards of every parameter, in ascending order.
        shapes: Every parameter's shape.
        world: Number of ranks.
        seed: Of the generators and of the `rounds`.
        feedback: Whether the ranks keep what their encodings lose.
        decay: What they multiply it by before they add it.
        average: Weight of what they kept before in what they keep.
        reset: Steps after which they forget it; 0: never.
        store: The compressor that they keep it with; None: as float32.
    """

    def __init__(
        self, compressor, cut, shapes, world, seed=0, feedback=True, decay=1.0, average=0.0, reset=0, store=None
    ):
        self.compressor, self.cut, self.shapes = compressor, cut, shapes
        self.world, self.seed, self.feedback, self.decay = world, seed, feedback, decay
        self.average, self.reset, self.store = average, reset, store
        self.generators, self.residuals, self.states = {}, {}, {}
        self.step = 0
        self.sent = 0  # bytes of all ranks
        self.expected = 0  # the same by `wire_bytes`; None once a size depended on the data
        self.largest = {}  # magnitude that `native` added up for a parameter

    def reduce(self, algorithm, kind, gradients):
        """One optimizer step: the mean of ``gradients`` (one mapping per rank) as the algorithm gives it, flattened."""
        means = {}
        if self.reset and self.step % self.reset == 0:
            self.residuals = {}
        for name in self.shapes:
            flat = [mine[name].reshape(-1) for mine in gradients]
            if algorithm == "native":
                means[name] = self.native(name, flat)
            else:
                means[name] = torch.cat([self.piecewise(algorithm, kind, name, part, flat) for part in self.cut[name]])
        self.step += 1
        return means

    def piecewise(self, algorithm, kind, name, part, flat):
        """Encode everywhere, add up in the order of the ranks, divide once; an exchange sends that mean on, encoded."""
        mean = torch.zeros(part.numel)
        for rank in range(self.world):
            receivers = self.world - 1 if algorithm == "gather" else int(rank != part.row)
            mean += self.code(rank, "scatter", name, part, flat[rank][part.at : part.at + part.numel], receivers)
        mean /= self.world
        if algorithm == "exchange" and kind == "all_reduce":
            mean = self.code(part.row, "gather", name, part, mean, self.world - 1)
        return mean

    def native(self, name, flat):
        """The compressor's `rounds` of a whole parameter, with plain sums over a list."""
        shape = self.shapes[name]
        form = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape
        key = [(rank, "scatter", name, 0) for rank in range(self.world)]
        asked = [self.compensated(key[rank], flat[rank]).view(form) for rank in range(self.world)]
        if name not in self.states:
            self.states[name] = [self.compressor.new_state(form, self.seed) for _ in range(self.world)]
        context = Context(name, form, self.step, self.world, self.seed)
        means, sents, _ = lockstep(self.compressor, asked, self.states[name], context)
        self.largest[name] = max(float(x.abs().amax()) for x in (*asked, *sents))
        for rank in range(self.world):
            self.keep(key[rank], asked[rank].reshape(-1), sents[rank].reshape(-1))
        assert all(torch.equal(mean, means[0]) for mean in means)
        return means[0].reshape(-1)

    def code(self, rank, phase, name, part, values, receivers):
        """The numbers that the receivers decode of ``values``; sizes that nobody can know travel as 8 bytes."""
        key = (rank, phase, name, part.at)
        values = self.compensated(key, values)
        wire = self.compressor.encode(values.view(part.form), generator=self.generator(rank, phase, name))
        known = self.compressor.wire_bytes(part.form)
        self.sent += receivers * (wire.numel() + (8 if known is None else 0))
        self.expected = None if None in (known, self.expected) else self.expected + receivers * known
        decoded = self.compressor.decode(wire, part.form).view(-1)
        self.keep(key, values, decoded)
        return decoded

    def compensated(self, key, values):
        """The values with what was lost before."""
        return self.decay * self.residuals.get(key, 0.0) + values if self.feedback else values

    def keep(self, key, values, sent):
        """The part that was not sent is the next step's."""
        if self.feedback:
            kept = values - sent
            if self.average:
                kept = (1 - self.average) * kept + self.average * self.residuals.get(key, torch.zeros(()))
            self.residuals[key] = kept if self.store is None else self.stored(kept)

    def stored(self, kept):
        """Its value in fewer bits."""
        return self.store.decode(self.store.encode(kept), kept.numel())

    def generator(self, rank, phase, name):
        """Every rank, phase and parameter has a separate one, seeded by their names."""
        key = (rank, phase, name)
        if key not in self.generators:
            digest = hashlib.sha256(f"{self.seed}/{rank}/{phase}/{name}".encode()).digest()
            self.generators[key] = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        return self.generators[key]
