"""The form of a rank's state, which fits files, objects and `torch.distributed.checkpoint` (dcp).

A state is ``{"step": 7, "rank1": ({...},)}``: the step is equal on all ranks, and the rest belongs to one of them. Dcp
stores an entry that several ranks have once, so an entry that differs is named by its rank. It loads only entries that
exist before loading, and a new reducer has no residuals, so that entry is stored as one object: dcp divides
dictionaries and lists into entries, and no tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.base.errors import BadInput

RANK = "rank"


class Taken(NamedTuple):
    """A rank's state.

    Attributes:
        step: Optimizer steps finished.
        topology: The ranks that it is of, such as their number.
        part: What this rank keeps; None if the state is of other ranks than these, so that only its step counts.
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
        part: What this rank keeps: tensors and plain data.
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
        whose: What the state must be of, for messages.

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
        raise BadInput(
            f"the state's {what} differ from this model's in {len(differing)} names or shapes: {name} is "
            f"{list(saved[name]) if name in saved else 'missing'} in the state, and "
            f"{list(shapes[name]) if name in shapes else 'missing'} here. Build the model that wrote it."
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
