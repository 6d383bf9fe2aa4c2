"""A rank's state: its form in a checkpoint, and what was loaded and not used since.

The form fits files, objects and `torch.distributed.checkpoint` (dcp): ``{"step": 7, "rank1": ({...},)}``. The step is
equal on all ranks, and the rest belongs to one of them. Dcp stores an entry that several ranks have once, so an entry
that differs is named by its rank. It loads only entries that exist before loading, and a new reducer has no residuals,
so that entry is stored as one object: dcp divides dictionaries and lists into entries, and no tuples.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.base.errors import BadInput, listed
from gradwire.base.units import amount, plural
from gradwire.comm.collectives.layout import Shard

Phase = Literal["scatter", "gather"]  # every rank's gradients to the owners; the owners' means to every rank
Key: TypeAlias = tuple[str, Phase, int]  # a parameter, a phase, and where the shard begins in the parameter
RESIDUAL = "residual.float32"  # the entry of `Residual.state_dict` with a residual of that type

RANK = "rank"


class Taken(NamedTuple):
    """A rank's state.

    Attributes:
        step: Optimizer steps finished.
        topology: The ranks that it is of, such as their number.
        part: The state of this rank; None if the state is of other ranks than these, so that only its step counts.
    """

    step: int
    topology: Any
    part: dict[str, Any] | None


# Why: docs/decisions.md, "A rank's state is one opaque entry named by the rank".
def stored(rank: int, step: int, topology: Any, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's state; its tensors are not copies.

    Args:
        rank: The rank in the default group.
        step: Optimizer steps finished.
        topology: The ranks, such as their number.
        part: The state of this rank: tensors and plain data.
    """
    return {"step": step, f"{RANK}{rank}": ({"world": topology, "step": step, **part},)}


def extended(state: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's state with more entries in what this rank keeps."""
    return {name: ({**value[0], **entries},) if is_part(name, value) else value for name, value in state.items()}


def taken(state: Any, rank: int, topology: Any, whose: str) -> Taken:
    """Take this rank's part from what `stored` returned.

    Args:
        state: The state, from a file or from dcp.
        rank: This rank in the default group.
        topology: The present ranks.
        whose: The owner that the state must have, for messages.

    Raises:
        BadInput: If it is something else, or another rank's.
    """
    if not isinstance(state, Mapping) or not whole(state.get("step")):
        raise BadInput(f"the state of {whose} is what its state_dict() returned, not {shown(state)}.")
    parts = {name: entry[0] for name, entry in state.items() if is_part(name, entry)}
    if not parts:
        raise BadInput(f"the state of {whose} has no entry of a rank, only {shown(state)}.")
    name = f"{RANK}{rank}"
    if name not in parts:
        first, part = next(iter(parts.items()))
        if part["world"] == topology:
            raise BadInput(
                f"the state is of rank {first.removeprefix(RANK)} of {topology}, and this is rank {rank}: every rank "
                f"saves and loads its state of {whose}, in a file or by torch.distributed.checkpoint."
            )
        return Taken(state["step"], part["world"], None)
    part = parts[name]
    if part["world"] != topology:
        return Taken(state["step"], part["world"], None)
    if part["step"] != state["step"]:  # dcp found no entry of this rank, and left the present one
        return Taken(state["step"], f"fewer than {rank + 1}", None)
    return Taken(state["step"], topology, part)


def is_part(name: Any, entry: Any) -> bool:
    """Return whether an entry is a rank's part of a state."""
    return (
        isinstance(name, str)
        and name.startswith(RANK)
        and name.removeprefix(RANK).isdecimal()
        and isinstance(entry, tuple | list)
        and len(entry) == 1
        and isinstance(entry[0], Mapping)
        and "world" in entry[0]
        and whole(entry[0].get("step"))
    )


def check_tensors(given: Any, needed: Mapping[str, Tensor], what: str) -> None:
    """Check that a saved mapping has the names and shapes of the present tensors.

    Raises:
        BadInput: If one differs; it names the first.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in needed.items()}
    if not isinstance(given, Mapping) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise BadInput(f"the state's {what} must be tensors by name, not {shown(given)}.")
    saved = {name: tuple(tensor.shape) for name, tensor in given.items()}
    differing = [name for name in {**shapes, **saved} if saved.get(name) != shapes.get(name)]
    if differing:
        name = differing[0]
        here, there = (list(of[name]) if name in of else "missing" for of in (shapes, saved))
        raise BadInput(
            f"the state's {what} differ from this model's in {amount(len(differing), 'name')} or "
            f"{plural('shape', len(differing))}: {name} is {there} in the state, and {here} here. Build the model that "
            f"wrote it."
        )


def check_keys(state: Any, keys: set[str], whose: str) -> None:
    """Check that a part of a state has some entries.

    Raises:
        BadInput: If one is missing.
    """
    if not isinstance(state, Mapping) or (missing := sorted(keys - state.keys())):
        raise BadInput(f"the state of {whose} lacks {', '.join(missing) if isinstance(state, Mapping) else 'all'}.")


def whole(value: Any) -> bool:
    """Return whether a value is an integer from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def shown(value: Any) -> str:
    """A short text of a value for a message: the names and numbers of a mapping, else its type."""
    if not isinstance(value, Mapping):
        return type(value).__name__ if value is not None else "None"
    entries = [f"{key!r}: {entry}" if isinstance(entry, int) else repr(key) for key, entry in value.items()]
    return "{" + ", ".join(entries[:5]) + (", …" if len(entries) > 5 else "") + "}"


class Loaded:
    """State from a checkpoint, of parameters that were not reduced since.

    Args:
        generators: States of generators, by parameter and phase.
        residuals: Those of shards.
        states: Those of `rounds`, by parameter.

    Attributes:
        unmet: Parameters of which nothing was used yet.
    """

    def __init__(
        self,
        generators: Mapping[tuple[str, Phase], Tensor] = {},
        residuals: Mapping[Key, dict[str, Tensor]] = {},
        states: Mapping[str, object] = {},
    ) -> None:
        self.generators, self.residuals = dict(generators), dict(residuals)
        self.unmet = {name for name, *_ in [*self.generators, *self.residuals]} | states.keys()
        self._met: dict[tuple[str, Phase], int] = {}  # the step in which other parameters were used first
        self._loose: dict[tuple[str, Phase], list[tuple[int, Tensor]]] = {}  # of shards that are cut again, by start

    def all_residuals(self) -> dict[Key, dict[str, Tensor]]:
        """Return the residuals of shards, also of those that are cut again."""
        loose = {
            (name, phase, start): {RESIDUAL: residual}
            for (name, phase), parts in self._loose.items()
            for start, residual in parts
        }
        return {**self.residuals, **loose}

    def residual(self, shard: Shard, phase: Phase) -> dict[str, Tensor] | None:
        """Return a shard's residual, which is then used; None without one."""
        if (shard.name, phase) not in self._loose:
            return self.residuals.pop((shard.name, phase, shard.at), None)
        residual, rest = torch.zeros(shard.numel, dtype=torch.float32, device="cpu"), list[tuple[int, Tensor]]()
        end = shard.at + shard.numel
        for start, loose in self._loose.pop((shard.name, phase)):
            first, last = max(start, shard.at), min(start + loose.numel(), end)
            if first >= last:
                rest.append((start, loose))
                continue
            residual = residual.to(loose.device)
            residual[first - shard.at : last - shard.at] = loose[first - start : last - start]
            parts = ((start, loose[: first - start]), (last, loose[last - start :]))
            rest += [(begin, part) for begin, part in parts if part.numel()]
        if rest:
            self._loose[shard.name, phase] = rest
        return {RESIDUAL: residual}

    def loosen(self, residuals: Mapping[Key, dict[str, Tensor]]) -> None:
        """Take residuals, and those that were loaded, from their shards; later shards get those of their elements."""
        for (name, phase, start), residual in {**self.residuals, **residuals}.items():
            self._loose.setdefault((name, phase), []).append((start, residual[RESIDUAL].clone()))
        self.residuals = {}

    def drop_loose(self) -> None:
        """Drop the residuals that no shard has taken up."""
        self._loose = {}

    def meet(self, name: str, phase: Phase, step: int) -> None:
        """Mark what was loaded of a parameter as used.

        When it is used again in a later step, all parameters had their turn: the names of the others are not the
        model's.
        """
        if self.unmet and self._met.setdefault((name, phase), step) < step:
            self.end(missing=sorted(self.unmet))
        self.unmet.discard(name)

    def end(self, missing: Sequence[str]) -> None:
        """Expect no other parameter, and warn of those that are missing in the model."""
        self.unmet = set()
        if missing:
            warnings.warn(
                f"the reducer's state holds residuals, generators or compressor states of {len(missing)} parameters "
                f"that are not reduced ({listed(missing)}): they are not used. Were parameters renamed or frozen?",
                stacklevel=2,
            )
