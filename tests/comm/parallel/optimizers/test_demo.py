"""DeMo against its protocol in one process, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from diagonals import swept
from protocols import Protocol, by_rows
from test_local_updates import CLIP, backward, gradients_of, held, set_rates, trainable
from test_optimizers import DECAY, RATES, REPLICAS, assert_same, groups_of

from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell
from gradwire.comm.collectives import Reducer
from gradwire.comm.communication import LOCAL
from gradwire.comm.compressors import build
from gradwire.comm.parallel import optimizers, wrap
from gradwire.comm.parallel.verify import first_difference

STEPS = 5
METHODS = {"dcttopk": {"k": 3, "tile": 4}, "int8": {"block": 16}}


def trained(rank, world, group, strategy, algorithm, method="dcttopk", bad=False, **more):
    """Parameters, norm, and what differs between the ranks, after each step; and the traffic."""
    options = {"error_feedback": True, "ef_decay": 0.999, "algorithm": algorithm, **more}
    reducer = Reducer(build(method, **METHODS[method]), group, seed=4, **options)
    model = wrap(held(), strategy, reducer, device="cpu", average=False)
    optimizer = optimizers.build("demo", model, groups_of(model), reducer, lr=1.0)
    found = []
    for step in range(STEPS):
        set_rates(optimizer, step)
        backward(model, rank, step)
        if bad and (rank, step) == (1, 3):
            next(iter(optimizer.parameters.values())).grad.view(-1)[2] = float("nan")
        norm, taken = optimizer.communicate(CLIP)
        if taken:
            optimizer.step()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
        found.append((parameters, norm, first_difference(model, optimizer, drifting=False), taken))
    return found, reducer.traffic


def simulated(size, algorithm, method="dcttopk"):
    """The same by the paper's loop: decay and add, send, subtract, step by the sign."""
    model = held()
    parameters = trainable(dict(model.named_parameters()))
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    protocol = Protocol(build(method, **METHODS[method]), by_rows(shapes, size), shapes, size, 4, True, 0.999)
    found = []
    for step in range(STEPS):
        rates = {name: RATES[step] * (1 if p.ndim > 1 else 2) for name, p in parameters.items()}
        sent, norms = [], []
        for rank in range(size):
            gradients = {name: gradients_of(rank, step)[name] for name in shapes}
            squares = torch.stack([torch.zeros(()), *map(torch.linalg.vector_norm, gradients.values())])
            norms.append(float(squares.double().square().sum().sqrt()))
            scale = CLIP / norms[-1] if norms[-1] > CLIP else 1.0
            sent.append({name: rates[name] * (gradients[name] * scale) for name in shapes})
        means = protocol.reduce(algorithm, "all_reduce", sent)
        with torch.no_grad():
            for name, p in parameters.items():
                decay = DECAY if p.ndim > 1 else 0.0
                p.mul_(1 - rates[name] * decay).sub_(rates[name] * means[name].view(p.shape).sign())
        found.append(({n: p.detach().clone() for n, p in parameters.items()}, norms))
    return found, protocol.sent


@pytest.mark.parametrize(
    ("strategy", "size", "method", "algorithm"),
    [
        (REPLICAS[0], 2, "dcttopk", "exchange"),
        (REPLICAS[1], 3, "dcttopk", "gather"),
        *swept((REPLICAS[0], 2, "int8", "gather")),  # sends nearly all of the momentum
        *swept((REPLICAS[2], 2, "dcttopk", "gather"), (REPLICAS[1], 3, "dcttopk", "exchange")),
    ],
)
def test_demo_is_its_protocol_in_one_process(world, strategy, size, method, algorithm):
    expected, bytes_sent = simulated(size, algorithm, method)
    results = world(size).run(trained, strategy, algorithm, method)
    for found, _ in results:
        for (parameters, norm, difference, _), (wanted, norms) in zip(found, expected, strict=True):
            assert_same(parameters, wanted)
            assert norm == pytest.approx(math.sqrt(sum(one**2 for one in norms) / size), rel=1e-6)
            assert difference is None, "parameters are equal on all ranks after every step"
    assert sum(traffic["sent"] for _, traffic in results) == bytes_sent
    assert [traffic.details["closed_form"] for _, traffic in results] == [traffic["sent"] for _, traffic in results]


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(world):
    for found, traffic in world(2).run(skipping):
        assert [taken for *_, taken in found] == [step != 3 for step in range(STEPS)]
        assert_same(found[3][0], found[2][0])
        assert traffic.details["nonfinite_steps"] == 1
        assert all(value.isfinite().all() for value in found[-1][0].values())


def skipping(rank, world, group):
    return trained(rank, world, group, "ddp", "gather", bad=True, nonfinite="skip")


def test_one_rank_takes_signs_of_gradients(world):
    [(found, traffic)] = world(1).run(trained, "naive", "gather")
    for name, p in trainable(dict(held().named_parameters())).items():
        rate, decay = (RATES[0], DECAY) if p.ndim > 1 else (2 * RATES[0], 0.0)
        expected = p.detach() * (1 - rate * decay) - rate * gradients_of(0, 0)[name].sign()
        torch.testing.assert_close(found[0][0][name], expected)
    assert traffic["sent"] == 0


def test_the_preset():
    """The paper's defaults; it has no rounds."""
    cell = Cell.parse("demo", {"comm_optimizer": "demo"})
    assert cell.method == "dcttopk" and cell.communication.module.endswith(".demo") and "demo" not in LOCAL
    assert (cell.reduction.error_feedback, cell.reduction.ef_decay) == (True, 0.999)
    method = build("dcttopk")
    assert (method.k, method.tile) == (32, 64)
    with pytest.raises(BadInput, match="H: an option of comm_optimizer diloco"):
        Cell.parse("demo", {"comm_optimizer": "demo", "H": 5})
