"""A check before the first collective that all ranks reduce the same parameters with the same options."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.collectives import Reducer, ops
from gradwire.errors import BadInput

Shapes = Sequence[tuple[str, tuple[int, ...]]]


def check_agreement(reducer: Reducer, shapes: Shapes) -> None:
    """Compare the reducer's options and the parameters over the ranks; every rank must call it.

    Args:
        reducer: The reducer.
        shapes: Names and shapes of the parameters that it reduces, in order.

    Raises:
        BadInput: On all ranks, with the first difference and the ranks that have it. Without this check they would
            wait for each other, or take each other's bytes for something else.
    """
    if reducer.world == 1:
        return
    own = {**reducer._options, "algorithm": reducer.algorithm, "parameters": len(shapes)}
    own |= {f"parameter {place}": f"{name} {list(shape)}" for place, (name, shape) in enumerate(shapes)}
    found = ops.gather_objects(own, reducer.group)
    for rank, other in enumerate(found):
        for key in [*found[0], *other]:
            one, two = found[0].get(key, "nothing"), other.get(key, "nothing")
            if one != two:
                raise BadInput(
                    f"ranks reduce gradients differently: {key} is {one} on rank 0 and {two} on rank {rank}; build the "
                    f"same model and reducer on every rank."
                )
