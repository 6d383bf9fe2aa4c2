"""Work of one rank's Python code in a step, which does not grow with the number of ranks, as the shards do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradwire.comm.collectives import Exempt, Layout, Reducer, reducer
from gradwire.comm.compressors import build

SHAPES = [("wide", (128, 3)), ("norm", (192,)), ("tall", (65, 5)), ("cube", (64, 2, 3)), ("bias", (64,))]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("int8", {}),
    ("int8", {"error_feedback": True, "exempt": Exempt(max_ndim=1)}),
    ("onebit", {"error_feedback": True, "residual_dtype": "int8"}),
    ("bf16", {"error_feedback": True, "ef_average": 0.5, "ef_reset": 2}),
    ("topk+int8", {"error_feedback": True, "second": "float32"}),  # a fake message is none of a chain's of other shapes
    ("none", {}),
    ("int8", {"algorithm": "gather"}),
    ("bf16", {"algorithm": "native"}),
    ("powersgd", {"error_feedback": True}),
]


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """This process as rank 0 of torch's ``fake`` backend, whose messages are repetitions of what it sends."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def instructions(run: Callable[[], object]) -> int:
    """Bytecode instructions of the package's own code."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if "gradwire" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def of_a_step(world: int, kind: str, name: str, options: dict[str, Any]) -> int:
    """Instructions of the third step, with an algorithm that does not depend on the number of ranks."""
    with fake_ranks(world):
        reduces = Reducer(build(name), overlap=False, **{"algorithm": "exchange", **options})
        layout = reduces.layout(SHAPES) if kind == "all_reduce" else Layout.dim0(SHAPES, world)
        flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))

        def step() -> None:
            getattr(reduces, kind)(flat, layout)
            assert reduces.finish()

        return [instructions(step) for _ in range(3)][-1]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_step_takes_as_many_instructions_with_64_ranks_as_with_8(name, options, kind, monkeypatch):
    monkeypatch.setattr(reducer, "check_initialized", lambda what: None)
    options = {"algorithm": "native", **options} if name == "powersgd" else options
    few, many = (of_a_step(world, kind, name, options) for world in (8, 64))
    assert 300 < many < 1.2 * few
