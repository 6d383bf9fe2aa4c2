"""The private parts of torch that the library reads, each by itself: a new torch that lacks one is named here."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire.comm
from gradwire.base.errors import BadInput
from gradwire.comm import torch_internals as internals

FLOOR = Path(gradwire.comm.__file__).parent
FILES = sorted(FLOOR.rglob("*.py"))
NAMEDTUPLE = {"_replace", "_asdict", "_fields"}


def private(text: str) -> list[str]:
    """Names with one leading underscore that are read of what is not ``self`` or ``super()``, or imported."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__") and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and node.attr not in NAMEDTUPLE:
                names.append(node.attr)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names += [part for part in [*node.module.split("."), *(a.name for a in node.names)] if part[0] == "_"]
    return names


def test_only_one_file_reads_private_parts_of_torch():
    ours = {node.attr for file in FILES for node in ast.walk(ast.parse(file.read_text())) if stored(node)}
    ours |= {
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    reading = {str(f.relative_to(FLOOR)): sorted({*private(f.read_text())} - ours) for f in FILES}
    assert {name: names for name, names in reading.items() if names}.keys() == {"torch_internals.py"}


def stored(node: ast.AST) -> bool:
    """Whether a node sets a private attribute of ``self``: then it is ours."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def test_private_names_are_found():
    text = "from torch._x import y\nfrom torch.z import _n\nmodel._handle\nself._ours\npiece._replace()\na.__class__"
    assert private(text) == ["_x", "_n", "_handle"]


def test_autograd():
    x = nn.Parameter(torch.ones(2))
    version, passes, ended = internals.version_of(x), [], []

    def in_the_pass(gradient):
        passes.append(internals.backward_id())
        internals.at_end_of_backward(lambda: ended.append(len(passes)))

    x.register_hook(in_the_pass)
    assert internals.backward_id() == -1
    assert not internals.post_accumulate_hooks(x)
    x.register_post_accumulate_grad_hook(lambda _: passes.append(-7))
    assert internals.post_accumulate_hooks(x)
    x.sum().backward()
    assert passes[0] >= 0
    assert passes[1] == -7
    assert ended == [2], "called at the end of the pass"
    with torch.no_grad():
        x.add_(1)
    assert internals.version_of(x) == version + 1


def test_optimizers_modules_and_the_profiler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    assert internals.has_step_hooks(optimizer)
    assert not internals.has_step_hooks(object.__new__(torch.optim.SGD))
    assert not internals.profiler_runs()
    with torch.profiler.profile():
        assert internals.profiler_runs()
    assert isinstance(nn.BatchNorm1d(3), internals.NormWithStatistics)
    assert internals.shards_of(torch.ones(3)) is None


def test_groups_of_a_simulated_rank():
    group, before = dist.ProcessGroup(1, 3), internals.tables_of_groups()
    internals.set_tables_of_groups(internals.new_tables(group, "simulated"))
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 3, "simulated")
        assert dist.group.WORLD is group
    finally:
        internals.set_tables_of_groups(before)
    assert not dist.is_initialized()
    internals.finished_work([torch.ones(1)]).wait()


def test_a_step_that_allocates_state():
    class Asked(torch.optim.Adam):
        def step(self, closure=None):
            answers.append(internals.allocating())
            return super().step(closure)

    answers = []
    model = nn.Linear(2, 2)
    optimizer = Asked(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    optimizer.step()
    assert answers == [True, False]


def ddp(rank, world, group):
    model = DistributedDataParallel(nn.Linear(3, 2))
    before = internals.has_comm_hook(model), internals.join_runs(model)
    with model.join():
        joined = internals.join_runs(model)
        model(torch.ones(1, 3)).sum().backward()
    model.register_comm_hook(None, hook)
    return before, joined, internals.has_comm_hook(model), internals.timeout_of(None), internals.FIRST_BUCKET_BYTES


def hook(state, bucket):
    raise AssertionError


def test_ddp_and_groups(world):
    for before, joined, hooked, timeout, first in world(2).run(ddp):
        assert before == (False, False)
        assert joined
        assert hooked
        assert timedelta(seconds=1) < timeout < timedelta(hours=1)
        assert first == 2**20


def fsdp1(rank, world, group):
    model = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"), use_orig_params=True)
    internals.set_hook_state(model, "state")
    return [(name, shape) for name, shape, _ in internals.flat_parts(model)], internals.accumulates_flat(model)


def test_fsdp1(world):
    for parts, accumulates in world(2).run(fsdp1):
        assert [part for part in parts if part[0]] == [("weight", (5, 3)), ("bias", (5,))]
        assert not accumulates


def named(rank, world, group):
    """Of a group of the last two ranks in the other order: ranks, this one's number, timeout, and a sum."""
    members = [world - 1, world - 2]
    if rank not in members:
        return None
    made = internals.named_group("a name", members, timedelta(seconds=7), "gloo")
    ones = torch.ones(3) * (rank + 1)
    dist.all_reduce(ones, group=made)
    return dist.get_process_group_ranks(made), dist.get_rank(made), internals.timeout_of(made).seconds, ones.tolist()


def test_a_named_group(world):
    assert world(3).run(named) == [None, *(([2, 1], number, 7, [5.0] * 3) for number in (1, 0))]


def fsdp2(rank, world, group):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    outer, inner = internals.parameter_groups(model, names)
    got = {
        "names": [list(group) for group in (outer, inner)],
        "shapes": (outer.shapes, inner.trained),
        "ranks": [dist.get_process_group_ranks(ranks) for ranks in (inner.shards, inner.replicas)],
        "dimensions": (inner.shards_name, inner.replicas_name),
        "collective": (inner.reduce_scatter, inner.has_all_reduce_hook, inner.divide_factor, inner.averages_replicas),
        "waiting": inner.waiting,
    }
    inner.drop_replicas()
    outer.drop_replicas()
    model.set_requires_gradient_sync(False)
    (model(torch.ones(1, 3)).sum() * (rank + 1)).backward()
    got["kept"] = inner.waiting, len(inner.gathered)
    got["interrupted"] = internals.backward_interrupted(model)
    model.set_requires_gradient_sync(True)
    (model(torch.ones(1, 3)).sum() * (rank + 1)).backward()
    got["gradient"] = model[2].bias.grad.to_local().tolist()
    got["alone"] = inner.replicas
    return got


def test_fsdp2(world):
    for rank, got in enumerate(world(4).run(fsdp2)):
        assert got["names"] == [["2.weight", "2.bias"], ["0.weight", "0.bias"]]
        assert got["shapes"] == ({"2.weight": (2, 5), "2.bias": (2,)}, {"0.weight": (5, 3), "0.bias": (5,)})
        island = rank // 2 * 2
        assert got["ranks"] == [[island, island + 1], [rank % 2, rank % 2 + 2]]
        assert got["dimensions"] == ("shards", "replicas")
        assert got["collective"] == ("DefaultReduceScatter", False, None, True)
        assert got["waiting"] == []
        assert got["kept"] == (["0.weight", "0.bias"], 2)
        assert not got["interrupted"]
        assert got["gradient"] == [2 * (island + 1.5)], "of both passes, averaged over the island alone"
        assert got["alone"] is None


def test_torchft():
    torchft = pytest.importorskip("torchft", reason="torchft is not installed")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=7),
        quorum_timeout=timedelta(seconds=9),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}",
        replica_id="group_5",
        hostname="127.0.0.1",
    )
    assert internals.managed(manager) == ("group_5", False, 1, timedelta(seconds=7), timedelta(seconds=9))
    assert internals.quorum_group(manager) is None
    manager.start_quorum()
    assert internals.quorum_group(manager).size() == 1
    internals.abort_quorum_group(manager)
    assert internals.quorum_group(manager) is None
    manager.shutdown(wait=False)
    lighthouse.shutdown()


def test_a_setter_that_this_torch_lacks_is_named():
    internals.check_offered("a compressor", "set_custom_reduce_scatter")
    with pytest.raises(BadInput, match=r"strategy fsdp2 with a compressor needs FSDPModule.set_no_such_thing"):
        internals.check_offered("a compressor", "set_no_such_thing")
