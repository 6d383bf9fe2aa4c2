"""Peak memory of a rank at another world size."""

STATES = 16  # bytes per parameter: itself, its gradient, AdamW's two moments, all float32


def peak_memory(measured: float, sharded: int, world: int, other: int, outer: float = 0.0) -> float:
    """Peak memory of a rank at another world size, in bytes.

    A rank's share of parameters, gradients, moments and anchors changes with the number of ranks. Activations, buckets
    and what FSDP gathers of a block stay as they are.

    Args:
        measured: The peak at ``world`` ranks.
        sharded: Number of parameters that are divided among the ranks, 0 where each rank has all of them.
        world: The world size of the measurement, at least 2.
        other: The world size of the prediction, at least 2.
        outer: Bytes of anchors and outer momenta in ``measured``; they are divided as parameters are.
    """
    divided = STATES * sharded + (world * outer if sharded else 0.0)
    return measured + divided * (1 / other - 1 / world)
