"""The end of a step: all ranks learn the worst that any of them met, and sum a vector in the same message."""

from __future__ import annotations

import pytest
import torch

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Meter
from gradwire.comm.collectives.agreement import FINITE, LEFT_OUT, NONFINITE, UNREDUCED, Agreement, check_reduced
from gradwire.comm.collectives.simulated import simulate

WORLD = 3


def agreed(rank, met, total):
    flag = torch.tensor([met[rank] == NONFINITE], dtype=torch.uint8)
    unreduced = [f"layer{rank}.weight"] if met[rank] == UNREDUCED else []
    left_out = {"head.weight", f"only{rank}"} if met[rank] == LEFT_OUT else set()
    vector = torch.tensor([float(rank), 1.0]) if total else None
    agreement = Agreement(None, Meter(), flag, unreduced, left_out, vector)
    assert not flag.any(), "the next step begins without it"
    return agreement, agreement.wait(), None if vector is None else vector.tolist()


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    ("met", "worst"),
    [
        ([FINITE] * 3, FINITE),
        ([FINITE, LEFT_OUT, LEFT_OUT], LEFT_OUT),
        ([LEFT_OUT, NONFINITE, FINITE], NONFINITE),
        ([NONFINITE, UNREDUCED, NONFINITE], UNREDUCED),
    ],
    ids=str,
)
def test_the_worst_of_all_ranks_is_agreed_on(met, worst, total):
    for _, found, summed in simulate(WORLD, lambda rank: agreed(rank, met, total), torch.device("cpu")):
        assert found == worst
        assert summed == ([3.0, 3.0] if total else None)


def test_only_what_all_ranks_left_out_is_left_out():
    def run(rank):
        agreement, *_ = agreed(rank, [LEFT_OUT] * 3, total=False)
        return agreement.left_out_by_all({"head.weight", "only0", "only1", "only2", "body"})

    assert simulate(WORLD, run, torch.device("cpu")) == [{"head.weight"}] * WORLD


def test_the_message_names_parameters_and_ranks():
    def run(rank):
        agreement, *_ = agreed(rank, [FINITE, UNREDUCED, UNREDUCED], total=False)
        return agreement.described(7)

    messages = simulate(WORLD, run, torch.device("cpu"))
    assert len({*messages}) == 1
    assert "optimizer step 7" in messages[0] and "layer1.weight" in messages[0] and "rank 2" in messages[0]


class Watched:
    """A model in which nothing, or all but some parameters, was reduced."""

    def __init__(self, missing):
        self.missing = missing

    def finish(self):
        return self.missing


def test_a_step_without_a_reduction_is_named():
    assert check_reduced([Watched([]), Watched(["bias"])], 3) == ["bias"]
    with pytest.raises(RunFault, match="optimizer step 4"):
        check_reduced([Watched(None)], 3)
