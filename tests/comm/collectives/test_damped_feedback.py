"""Error feedback that averages, decays, forgets at times and stores few bits: LoCo's, bit for bit in one process."""

from __future__ import annotations

import math

import pytest
import torch
from protocols import Protocol, by_rows

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.compressors import build

SHAPES = {"matrix": (7, 41), "bias": (5,), "wide": (3, 2, 90)}
LOCO = {"ef_average": 0.8, "ef_reset": 3, "residual_dtype": "int8"}
CASES = {
    "loco": LOCO,
    "in float32": {"ef_average": 0.8},
    "a reset alone": {"ef_reset": 2},
    "decayed": {"ef_decay": 0.9, "ef_average": 0.5, "residual_dtype": "int8"},
}


def gradients(rank, step):
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=drawn) * (1 + step) for name, shape in SHAPES.items()}


def reduced(rank, world, group, options, steps):
    """This rank's row of every step's mean; halfway another reducer goes on from the state."""
    layout = Layout.dim0(SHAPES.items(), world)
    found, reducer = [], None
    for step in range(steps):
        if step in (0, steps // 2):
            compressor = build("hadamard+int8", num_bits=4, block=32)
            earlier, reducer = reducer, Reducer(compressor, group, error_feedback=True, seed=3, **options)
            if earlier is not None:
                reducer.load_state_dict(earlier.state_dict())
        found.append(reducer.reduce_scatter(layout.pack(gradients(rank, step)), layout).clone())
        assert reducer.finish()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_reduction_is_the_protocols(turns, case):
    steps, options = 6, CASES[case]
    results = turns(2).run(reduced, options, steps)
    protocol = Protocol(
        build("hadamard+int8", num_bits=4, block=32),
        by_rows(SHAPES, 2),
        SHAPES,
        2,
        seed=3,
        decay=options.get("ef_decay", 1.0),
        average=options.get("ef_average", 0.0),
        reset=options.get("ef_reset", 0),
        store=build("int8") if "residual_dtype" in options else None,
    )
    layout = Layout.dim0(SHAPES.items(), 2)
    for step in range(steps):
        means = protocol.reduce("exchange", "reduce_scatter", [gradients(rank, step) for rank in range(2)])
        for rank in range(2):
            for shard in layout.rows[rank]:
                own = results[rank][step][layout.place_in_row(shard)]
                assert torch.equal(own, means[shard.name][shard.source]), (step, shard)


def refused(rank, world, group, options):
    Reducer(build("int8"), group, error_feedback=True, **options)


def test_bad_values_are_refused(turns):
    for option, value in (("ef_average", 1.0), ("ef_average", -0.1), ("ef_average", math.nan), ("ef_reset", -1)):
        with pytest.raises(BadInput, match=rf"the reducer's option {option} is {value}"):
            turns(1).run(refused, {option: value})
