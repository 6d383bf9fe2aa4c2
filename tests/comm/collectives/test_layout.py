"""Layouts: every element of every parameter is in the buffer exactly once, and nothing else does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.base.errors import RunFault
from gradwire.comm.closed_forms import rank_bytes, raw_bytes, share
from gradwire.comm.collectives import Exempt, Layout, Shard
from gradwire.comm.collectives.layout import Run

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5).map(
    lambda found: [(f"p{i}", shape) for i, shape in enumerate(found)]
)
worlds = st.integers(1, 5)
every_cut = pytest.mark.parametrize("cut", [Layout.dim0, Layout.cut, Layout.packed])


def numbered(shapes):
    """Parameters whose elements are all distinct and none is 0."""
    total = 0
    tensors = {}
    for name, shape in shapes:
        tensors[name] = torch.arange(total + 1, total + 1 + math.prod(shape), dtype=torch.float32).view(shape)
        total += math.prod(shape)
    return tensors, total


@every_cut
@given(shapes=shapes, world=worlds)
def test_shards_cover_every_element_once(cut, shapes, world):
    layout = cut(shapes, world)
    tensors, total = numbered(shapes)
    flat = layout.pack(tensors)
    assert sorted(flat[flat != 0].tolist()) == list(range(1, total + 1))
    assert sum(shard.numel for shard in layout.shards) == total
    assert [shard.start for shard in layout.shards] == sorted(shard.start for shard in layout.shards)


rows = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=3), min_size=1, max_size=5)


@given(rows=rows, by_row=st.booleans())
@example(rows=[[(0, 2)], [(0, 2)], [(4, 2)]], by_row=True)  # twice the second distance, which is not the first
def test_runs_are_the_elements_of_their_shards(rows, by_row):
    shards, end = [], 0
    for row, pieces in enumerate(rows):
        for gap, numel in pieces:
            shards.append(Shard("p", (99,), row, end + gap, numel, 0))
            end += gap + numel
    expected = [(shard.row, i) for shard in shards for i in range(end)[shard.place]]
    x, buffer = torch.arange(len(expected)), torch.arange(end)
    elements = {}
    for run in Run.merged(shards, by_row):
        of_x, of_buffer = run.in_vector(x), run.in_buffer(buffer)
        for piece, (sources, places) in enumerate(zip(of_x.tolist(), of_buffer.tolist(), strict=True)):
            for source, place in zip(sources, places, strict=True):
                elements[source] = (run.row + piece, place)
    assert [elements[i][1] for i in range(len(expected))] == [place for _, place in expected]
    assert not by_row or [elements[i] for i in range(len(expected))] == expected


def test_a_lone_piece_is_a_row_in_memory():
    """Where both strides of [1, n] are 1, torch copies one element at a time: 30 times as long."""
    [run] = Run.merged([Shard("p", (5,), 0, 2, 5, 0)], by_row=True)
    assert run.in_buffer(torch.arange(9)).stride() == run.in_vector(torch.arange(5)).stride() == (5, 1)
    assert run.in_buffer(torch.arange(9)).tolist() == [[2, 3, 4, 5, 6]]


@every_cut
@given(shapes=shapes, world=worlds)
def test_a_shard_is_in_its_row_and_holds_what_it_names(cut, shapes, world):
    layout = cut(shapes, world)
    tensors, _ = numbered(shapes)
    rows = layout.in_rows(layout.pack(tensors))
    for row, shards in enumerate(layout.rows):
        for shard in shards:
            assert shard.row == row and shard.numel > 0
            expected = tensors[shard.name].flatten()[shard.at : shard.at + shard.numel]
            assert torch.equal(rows[row][layout.place_in_row(shard)], expected)


@every_cut
@given(shapes=shapes, world=worlds)
def test_unpack_undoes_pack(cut, shapes, world):
    layout = cut(shapes, world)
    tensors, _ = numbered(shapes)
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout.unpack(layout.pack(tensors), copies)
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


@given(shapes=shapes, world=worlds)
def test_dim0_cuts_as_torch_chunk_does(shapes, world):
    layout = Layout.dim0(shapes, world)
    tensors, _ = numbered(shapes)
    flat = layout.pack(tensors)
    for name, tensor in tensors.items():
        chunks = torch.chunk(tensor if tensor.ndim else tensor.view(1), world)
        shards = [shard for shard in layout.shards if shard.name == name]
        assert len(shards) == len(chunks)
        for shard, chunk in zip(shards, chunks, strict=True):
            assert torch.equal(flat[shard.place], chunk.flatten())


def test_dim0_leaves_rows_empty_and_pads_each_parameter():
    layout = Layout.dim0([("weight", (3, 2)), ("bias", (1,))], 2)
    assert layout.row_numel == 5
    assert layout.shards == (
        Shard("weight", (3, 2), 0, 0, 4, 0),
        Shard("bias", (1,), 0, 4, 1, 0),
        Shard("weight", (3, 2), 1, 5, 2, 4),
    )
    assert Layout.dim0([("bias", (1,))], 3).rows == ((Shard("bias", (1,), 0, 0, 1, 0),), (), ())


def test_packed_puts_whole_parameters_one_after_the_other():
    layout = Layout.packed([("weight", (3, 2)), ("bias", (1,)), ("vector", (3,))], 2)
    assert layout.shards == (
        Shard("weight", (3, 2), 0, 0, 4, 0),
        Shard("weight", (3, 2), 1, 4, 2, 4),
        Shard("bias", (1,), 0, 6, 1, 0),
        Shard("vector", (3,), 0, 7, 2, 0),
        Shard("vector", (3,), 1, 9, 1, 2),
    )
    assert (layout.numel, layout.row_numel) == (10, 7)
    rows = layout.in_rows(torch.arange(1.0, 11))
    assert rows.tolist() == [[1, 2, 3, 4, 7, 8, 9], [5, 6, 10, 0, 0, 0, 0]]


def test_packed_tensors_that_follow_each_other_in_memory_are_not_copied():
    layout = Layout.packed([("a", (3, 2)), ("b", (5,))], 2)
    memory = torch.arange(12.0)
    tensors = {"a": memory[1:7].view(3, 2), "b": memory[7:12]}
    flat = layout.pack(tensors)
    assert flat.data_ptr() == tensors["a"].data_ptr() and torch.equal(flat, memory[1:])
    layout.unpack(-flat, tensors)
    assert memory.tolist() == [0, *(-float(i) for i in range(1, 12))]
    for others in (
        {"a": tensors["a"], "b": tensors["b"].clone()},
        {"a": memory[6:12].view(3, 2), "b": memory[1:6]},
        {"a": memory[1:7].view(2, 3).T, "b": memory[7:12]},
    ):
        copied = layout.pack(others)
        assert copied.data_ptr() != others["a"].data_ptr()
        assert torch.equal(copied, torch.cat([others["a"].flatten(), others["b"]]))
    assert Layout.dim0([("a", (3, 2)), ("b", (5,))], 1).pack(tensors).data_ptr() != flat.data_ptr()


def test_cut_leaves_gaps_out():
    layout = Layout.cut([("a", (3,)), (None, (2,)), ("b", (2, 2))], 2)
    assert layout.row_numel == 5
    assert layout.shards == (Shard("a", (3,), 0, 0, 3, 0), Shard("b", (2, 2), 1, 5, 4, 0))


def test_a_codec_sees_whole_rows_as_a_matrix():
    def form(shape, at, numel):
        return Shard("p", shape, 0, 0, numel, at).form

    assert form((4, 3), 3, 6) == (2, 3)
    assert form((4, 3), 2, 6) == (6,)
    assert form((4, 3), 3, 5) == (5,)
    assert form((4, 3, 2), 6, 12) == (2, 6)
    assert form((5,), 0, 5) == (5,)
    assert form((), 0, 1) == (1,)


def test_a_buffer_of_another_size_is_named():
    layout = Layout.dim0([("first", (3,)), ("last", (2,))], 2)
    with pytest.raises(RunFault, match=r"first \.\.\. last"):
        layout.check(torch.zeros(5))


def test_exempt_covers_what_it_says():
    weight, bias, scalar = ("block.weight", (4, 3)), ("block.bias", (5,)), ("scale", ())
    assert not any(Exempt().covers(*parameter) for parameter in (weight, bias, scalar))
    assert Exempt(max_ndim=1).covers(*bias) and not Exempt(max_ndim=1).covers(*weight)
    assert Exempt(max_numel=5).covers(*bias) and not Exempt(max_numel=11).covers(*weight)
    assert Exempt(names=["*.weight"]).covers(*weight) and not Exempt(names=["weight"]).covers(*weight)


@given(numel=st.integers(0, 50), world=worlds)
def test_parts_of_the_ranks_add_up_to_the_closed_form(numel, world):
    for op, passes in (("reduce_scatter", 1), ("all_reduce", 2)):
        parts = [rank_bytes(op, 4 * numel, share(4 * numel, world, rank), world) for rank in range(world)]
        assert sum(parts) == raw_bytes(op, numel, world) == passes * (world - 1) * 4 * numel
