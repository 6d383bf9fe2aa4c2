"""The pool of ranks itself: a failure stays with the test that had it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import Pool


def summed(rank, world, group):
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    return value.item()


def test_a_group_that_never_forms_does_not_break_the_next_one():
    """Torch names default groups by a counter, which a failed `init_process_group` leaves behind on the ranks in it."""
    pool = Pool(3)
    try:
        assert pool.run(2, summed, ()) == [3.0, 3.0]
        pool.store = None  # where the ranks would meet
        with pytest.raises(RuntimeError):
            pool.run(2, summed, ())
        assert pool.run(3, summed, ()) == [6.0, 6.0, 6.0]
    finally:
        pool.stop()
