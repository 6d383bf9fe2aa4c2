"""The backend that compresses what runs on it: real groups of gloo ranks, against sums in float64 of decoded values."""

from __future__ import annotations

import math
import pickle
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from diagonals import diagonals
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.base.errors import BadInput
from gradwire.comm.collectives.backend import CompressedGroup
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.reduction import encoding_of

worlds = pytest.mark.parametrize("size", [2, 3])


def group_of(compressor, name="gradwire", **options):
    """A group of all ranks on a new backend."""
    gradwire.register_backend(compressor, name, smallest=1000, **options)
    return dist.new_group(backend=name)


def given(rank, numel, step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return (torch.randn(numel, generator=generator) + 0.01).to(dtype)


# Reductions

FOUR_BITS = {"method": "int8", "num_bits": 4}
METHODS = ["int8", FOUR_BITS, "fp8", "bf16", "hadamard+int8", "none"]
OPS = ["SUM", "AVG"]
DTYPES = [torch.float32, torch.bfloat16]


def reduced(rank, world, group, compressor, op, dtype, numel):
    """An all-reduce, and a reduce-scatter that is still on its way when it begins; and the traffic."""
    coded, operation = group_of(compressor), getattr(dist.ReduceOp, op)
    scattered = torch.empty(numel, dtype=dtype)
    work = dist.reduce_scatter_tensor(scattered, given(rank, world * numel, 0, dtype), operation, coded, async_op=True)
    everywhere = given(rank, numel, 1, dtype).view(3, -1)
    dist.all_reduce(everywhere, operation, coded)
    work.wait()
    return scattered, everywhere.view(-1), coded.traffic


def mean_of(coder, parts):
    """The mean in float64 of what the ranks' encodings decode to."""
    return sum(coder.decode(coder.encode(part), part.numel()).double() for part in parts) / len(parts)


def agreed(size):
    """The calls in which the ranks agree on the name of a reducer's group: its pickled length, and the name."""
    return {"allgather": {"calls": 2, "bytes": size * (8 + len(pickle.dumps(f"gradwire {uuid4()}")))}}


@worlds
@pytest.mark.parametrize(("compressor", "op", "dtype"), diagonals(METHODS, OPS, DTYPES), ids=str)
def test_reductions_are_sums_of_decoded_values(world, size, compressor, op, dtype):
    """Of a row of the buffer each; an all-reduce decodes the encoding of the mean."""
    numel, coder, scale = 2001, as_compressor(compressor), size if op == "SUM" else 1
    scattered, everywhere, traffic = zip(*world(size).run(reduced, compressor, op, dtype, numel), strict=True)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    for rank, row in enumerate(scattered):
        parts = [given(peer, size * numel, 0, dtype)[rank * numel : (rank + 1) * numel] for peer in range(size)]
        torch.testing.assert_close(row.double(), scale * mean_of(coder, parts), **close)
    cut = -(-numel // size)
    means = [
        mean_of(coder, [given(peer, numel, 1, dtype)[row * cut : (row + 1) * cut] for peer in range(size)])
        for row in range(size)
    ]
    expected = scale * torch.cat([coder.decode(coder.encode(mean.float()), mean.numel()).double() for mean in means])
    torch.testing.assert_close(everywhere[0].double(), expected, **close)
    assert all(torch.equal(tensor, everywhere[0]) for tensor in everywhere)
    assert [t["exact"] for t in traffic] == [agreed(size)] * size
    rows = [min(cut, numel - row * cut) for row in range(size)]
    sent = size * (size - 1) * coder.wire_bytes(numel) + 2 * (size - 1) * sum(map(coder.wire_bytes, rows))
    assert sum(t["sent"] for t in traffic) == sent


def coalesced(rank, world, group):
    coded = group_of("int8")
    tensors = [given(rank, numel, step) for step, numel in enumerate((1500, 5, 1301))]
    large, small, last = functional.all_reduce_coalesced(tensors, "sum", coded)
    return large + 0, small + 0, last + 0, coded.traffic


def test_a_call_with_tensors_of_all_sizes(world):
    results = world(2).run(coalesced)
    for large, small, last, traffic in results:
        torch.testing.assert_close(small, given(0, 5, 1) + given(1, 5, 1), rtol=0, atol=0)
        for tensor, step in ((large, 0), (last, 2)):
            exact = sum(given(rank, tensor.numel(), step) for rank in range(2))
            assert 0 < (tensor - exact).abs().max() < 0.1
        assert traffic["elements"] == 1500 + 1301
        assert traffic["exact"] == {"all_reduce": {"calls": 1, "bytes": 20}} | agreed(2)


def with_a_nan(rank, world, group):
    coded, x = group_of("int8"), given(rank, 1500)
    if rank == 1:
        x[7] = math.nan
    dist.all_reduce(x, group=coded)
    return x


def test_a_nan_reaches_all_ranks(world):
    assert all(x[:256].isnan().any() and x[1000:].isfinite().all() for x in world(3).run(with_a_nan))


def with_a_fault(rank, world, group):
    def fail(*_):
        raise KeyError("a bad wire")

    alone, under_ddp = group_of("int8"), group_of("int8")
    for coded in (alone, under_ddp):
        coded._reducer.codec.encode = fail
    work = dist.all_reduce(given(rank, 1500), group=alone, async_op=True)
    with pytest.raises(KeyError, match="a bad wire"):
        work.wait()
    model = DistributedDataParallel(nn.Linear(40, 40), process_group=under_ddp)
    with pytest.raises(RuntimeError, match="a bad wire"):
        model(torch.ones(1, 40)).sum().backward()


def test_an_error_of_a_reduction_is_raised_where_it_is_waited_for(world):
    world(2).run(with_a_fault)


# What passes as it is


def passed(rank, world, group, backend):
    """Collectives that must not be compressed, and the traffic."""
    coded = group_of("int8", parameters="int8") if backend == "gradwire" else dist.new_group(backend="gloo")
    results = []
    for dtype in (torch.int64, torch.float32):
        many = (1000 * given(rank, 2000)).to(dtype)
        for op in ("SUM", "MAX", "MIN"):
            few = many[:7].clone() if (op, dtype) == ("SUM", torch.float32) else many.clone()
            dist.all_reduce(few, getattr(dist.ReduceOp, op), coded)
            results.append(few)
        sent = [many + to for to in range(world)]
        received = [torch.empty_like(many) for _ in range(world)]
        dist.all_to_all_single(torch.stack(received), torch.stack(sent), group=coded)
        dist.all_gather(received, many, coded)
        dist.broadcast(many, 1, coded)
        total = many.clone()
        dist.reduce(total, 0, group=coded)
        results += [*received, many, total if rank == 0 else many]
    integers = torch.empty(world * 2000, dtype=torch.int64)
    dist.all_gather_into_tensor(integers, (1000 * given(rank, 2000)).to(torch.int64), coded)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, coded)
    dist.barrier(coded)
    return [*results, integers, objects], getattr(coded, "traffic", None)


@worlds
def test_everything_else_is_exact_and_counted(world, size):
    for (results, traffic), (expected, _) in zip(
        world(size).run(passed, "gradwire"), world(size).run(passed, "gloo"), strict=True
    ):
        assert all(map(torch.equal, results[:-1], expected[:-1]))
        assert results[-1] == expected[-1] == [{"rank": rank} for rank in range(size)]
        assert traffic["raw"] == traffic["sent"] == traffic["parameters"]["raw"] == 0
        counts = {op: cost["calls"] for op, cost in traffic["exact"].items()}
        assert counts.pop("allgather") == 4  # two of them gather objects
        assert counts == {"all_reduce": 6, "all_to_all_single": 2, "broadcast": 2, "reduce": 2, "all_gather": 1}
        assert traffic["exact"]["all_reduce"]["bytes"] == 3 * 2000 * 8 + 2 * 2000 * 4 + 7 * 4
        assert traffic["exact"]["all_gather"]["bytes"] == size * 2000 * 8


OTHER_CALLS = {
    *("abort", "boxed", "get_group_store", "merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size"),
    *("split_group", "unbox", "use_pg_for_symm_mem_rendezvous"),
}


def test_every_collective_is_the_backends():
    """torch calls an inherited one with Python's lock held, which may never return."""
    calls = {name for name, call in vars(dist.ProcessGroup).items() if callable(call) and name[0].islower()}
    assert {"barrier", "alltoall_base"} < calls - OTHER_CALLS
    assert {name for name in calls - OTHER_CALLS if name not in vars(CompressedGroup)} == set()


def received_from_anyone(rank, world, group):
    """What the last rank receives from whoever sends it, after a barrier that names late ranks."""
    coded = group_of("int8")
    coded.monitored_barrier()
    part = torch.full((1001,), rank + 1.5)
    if rank == world - 1:
        return sum(int(dist.recv(part, group=coded)) for _ in range(world - 1)), part, coded.traffic["exact"]
    dist.send(part, world - 1, group=coded)
    return None


@worlds
def test_a_tensor_from_any_rank_is_received(world, size):
    senders, part, exact = world(size).run(received_from_anyone)[-1]
    assert senders == sum(range(size - 1)) and part.unique().item() in [rank + 1.5 for rank in range(size - 1)]
    assert exact["recv_anysource"] == {"calls": size - 1, "bytes": (size - 1) * 1001 * 4}


# Parameters


def gathered(rank, world, group, parameters):
    coded = group_of("int8", parameters=parameters)
    full = torch.empty(world * 1001)
    work = dist.all_gather_into_tensor(full, given(rank, 1001), coded, async_op=True)
    work.wait()
    return full, coded.traffic


@worlds
@pytest.mark.parametrize("parameters", ["int8", "int4", "bf16", None])
def test_parameters_are_decoded_on_all_ranks_alike(world, size, parameters):
    rows = [given(rank, 1001) for rank in range(size)]
    if parameters is not None:
        encoding = encoding_of(parameters)
        coder = as_compressor({"method": encoding.method, **encoding.options})
        rows = [coder.decode(coder.encode(row), 1001) for row in rows]
    for full, traffic in world(size).run(gathered, parameters):
        assert torch.equal(full, torch.cat(rows))
        if parameters is None:
            assert traffic["exact"] == {"all_gather": {"calls": 1, "bytes": size * 4004}}
        else:
            sent = (size - 1) * coder.wire_bytes(1001)
            assert traffic["parameters"] == {"raw": (size - 1) * 4004, "sent": sent}


# Frameworks


class Shards(nn.Module):
    """A linear layer with gathers and reductions that autograd derives, as in SimpleFSDP."""

    def __init__(self, layer: nn.Linear, mesh, placement) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement]))

    def forward(self, x):
        whole = self.weight.redistribute(placements=[Replicate()])
        return x @ whole.to_local(grad_placements=[Partial("avg")]).T


def simple(model, group, name, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,), backend_override={name: group})
    return nn.Sequential(*(Shards(layer, mesh, placement) for layer in model)), mesh.get_group()


def fsdp2(model, backend, name):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,), backend_override={name: backend})
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh.get_group()


def ddp(model, backend, name):
    group = dist.new_group(backend=backend)
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01), group


FRAMEWORKS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "autograd, sharded": lambda model, backend, name: simple(model, backend, name, Shard(0)),
    "autograd, replicated": lambda model, backend, name: simple(model, backend, name, Replicate()),
}
STEPS = 3


def trained(rank, world, group, framework, compressor, parameters=None):
    """Losses of this rank, its parameters before and after some steps, and the traffic."""
    backend = "gloo" if compressor is None else "gradwire"
    if compressor is not None:
        gradwire.register_backend(compressor, backend, parameters=parameters, smallest=1000)
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(37, 37, bias=framework in ("ddp", "fsdp2")) for _ in range(3)))
    # torch caches what it derives from meshes, and those of one shape and name are equal
    model, ranks = FRAMEWORKS[framework](layers, backend, f"{framework} {compressor} {parameters}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses, before = [], values(model)
    for step in range(STEPS):
        x = given(rank, 4 * 37, step).view(4, 37)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, before, values(model), getattr(ranks, "traffic", None)


def values(model):
    """What this rank has of the parameters; gathering them may be compressed."""
    parts = [p.detach() for p in model.parameters()]
    return torch.cat([(p.to_local() if isinstance(p, DTensor) else p).reshape(-1) for p in parts])


@worlds
@pytest.mark.parametrize(
    ("framework", "parameters"),
    [(framework, None) for framework in FRAMEWORKS] + [("fsdp2", "int8"), ("autograd, sharded", "int8")],
)
def test_training_is_that_without_it_within_the_codecs_error(world, size, framework, parameters):
    """With `none` it is the same, up to the order of a sum of three."""
    run = world(size).run
    alone, exact = run(trained, framework, None), run(trained, framework, "none")
    coded = run(trained, framework, "int8", parameters)
    for (losses, before, after, _), same, other in zip(alone, exact, coded, strict=True):
        torch.testing.assert_close(same[2], after, rtol=0, atol=0 if size == 2 else 1e-6)
        assert same[0] == pytest.approx(losses, rel=0 if size == 2 else 1e-6)
        moved = (after - before).norm()
        assert 1e-5 < (other[2] - after).norm() / moved < (0.05 if parameters else 0.01)
        assert other[0] == pytest.approx(losses, rel=5e-3)
        assert 3.5 < other[3]["raw"] / other[3]["sent"] < 4
        gathers = framework in ("fsdp2", "autograd, sharded")
        assert ("all_gather" in other[3]["exact"]) == (gathers and parameters is None)
    if framework == "ddp":
        assert all(torch.equal(after, coded[0][2]) for _, _, after, _ in coded)


def as_the_default(rank, world, group, folder):
    """A program whose only process group is of the backend, and what a mesh makes of it."""
    dist.destroy_process_group()
    gradwire.register_backend("int8")
    dist.init_process_group("gradwire", init_method=f"file://{folder}/again", rank=rank, world_size=world)
    x = given(rank, 2**14 + 1)
    for part in (x, x[2:]):  # the second is too small
        dist.all_reduce(part)
    some = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=some)
        assert some.traffic["elements"] == len(x)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"), backend_override={"tp": "gloo"})
    kinds = type(dist.group.WORLD), type(mesh.get_group("dp")), type(mesh.get_group("tp"))
    return x, [kind.__name__ for kind in kinds], dist.group.WORLD.traffic["elements"]


def test_the_default_group(world, tmp_path):
    results = world(3).run(as_the_default, tmp_path)
    assert torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(results[1][0] * 2, results[0][0], rtol=0, atol=0.5)
    for _, kinds, elements in results:
        assert elements == 2**14 + 1
        assert kinds == ["CompressedGroup", "CompressedGroup", "ProcessGroup"]


# Refusals


@pytest.mark.parametrize(
    ("compressor", "name", "options", "message"),
    [
        (
            "topk",
            "gradwire",
            {},
            "sees buffers, and topk needs parameters.*take a quantizer such as int8.*compress_gradients",
        ),
        ("powersgd", "gradwire", {}, "powersgd needs parameters"),
        ("topk+int8", "gradwire", {}, "topk.int8 needs parameters"),
        ("int8", "gradwire", {"parameters": "int4-diff"}, "int4-diff needs parameters"),
        ("int8", "gradwire", {"parameters": "int9"}, "int9"),
        ("int9", "gradwire", {}, "int8"),
        ("int8", "gloo", {}, "there is a backend gloo already: give another name"),
    ],
)
def test_refused(compressor, name, options, message):
    with pytest.raises(BadInput, match=message):
        gradwire.register_backend(compressor, name, **options)
