"""The mesh has one dimension, dp, over the ranks of any process group; it refuses the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import ops
from gradwire.comm.parallel import mesh


def built(rank, world, group):
    """A mesh of all ranks and one of two of them: dimensions, this rank's place, and a sum over the group."""
    pair = dist.new_group([0, world - 1])
    meshes = [mesh.build("cpu", tp=1), mesh.build("cpu", pair, dp=2)] if rank in (0, world - 1) else [mesh.build("cpu")]
    return [
        (
            made.mesh_dim_names,
            made["dp"].get_local_rank(),
            made.size(),
            float(ops.all_reduce(torch.tensor(1.0 + rank), group=made.get_group("dp"))),
        )
        for made in meshes
    ]


def test_dp_is_the_process_group(world):
    first, second, third = world(3).run(built)
    assert first == [(("dp",), 0, 3, 6.0), (("dp",), 0, 2, 4.0)]
    assert second == [(("dp",), 1, 3, 6.0)]
    assert third == [(("dp",), 2, 3, 6.0), (("dp",), 1, 2, 4.0)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 2}, r"tp = 2, but tensor parallelism is not implemented; only dp"),
        ({"dp": 4, "cp": 3}, r"cp = 3, but context"),
        ({"dp": 4, "pp": 0}, r"pp = 0, but pipeline"),
        ({"dp": 2}, r"dp = 2, but there are 4 ranks"),
        ({"dp": 4, "dq": 1}, r"unknown dimension of the mesh 'dq'\. Did you mean 'dp'"),
    ],
)
def test_the_rest_is_refused(sizes, message):
    mesh.check(4, {"dp": 4, "tp": 1, "cp": 1, "pp": 1})
    with pytest.raises(BadInput, match=message):
        mesh.check(4, sizes)
