"""Who a process is among the ranks, and the process group that it joins.

Of `base/rank_env.py`, `collectives/world.py`.
"""

from __future__ import annotations

import argparse
import socket

import pytest
import torch
import torch.distributed as dist

from gradwire.base.errors import BadInput
from gradwire.base.rank_env import LOCAL_WORLD_SIZE, RankEnv, RankOptions, rank_env, rank_options, ranks_here
from gradwire.base.strict import add_flags
from gradwire.comm.collectives.world import choose, host_store, process_group

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "2345"}


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_torchruns_environment_is_the_seat():
    found = RankEnv(rank=1, local_rank=1, world_size=3, master_addr="10.0.0.7", master_port=2345)
    assert rank_env({}, TORCHRUN) == found
    assert rank_env({"rank": 1, "world_size": 3, "master_port": None}, TORCHRUN) == found


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", 2), ("local_rank", 0), ("world_size", 2), ("master_addr", "10.0.0.8"), ("master_port", 2346)],
)
def test_a_flag_that_disagrees_with_the_environment(name, value):
    with pytest.raises(BadInput, match=rf"--{name} {value} disagrees with {name.upper()}=.*leave --{name} out"):
        rank_env({name: value}, TORCHRUN)


def test_ranks_started_by_hand():
    assert rank_env({}, {}) == RankEnv(0, 0, 1, "127.0.0.1", None)
    assert rank_env({"rank": 2, "world_size": 3, "master_port": 99}, {}) == RankEnv(2, 2, 3, "127.0.0.1", 99)
    assert rank_env({"rank": 2, "world_size": 3}, {}) == RankEnv(2, 2, 3, "127.0.0.1", 29500)
    with pytest.raises(BadInput, match=r"--world_size 2 without --rank: .*gradwire launch"):
        rank_env({"world_size": 2}, {})
    with pytest.raises(BadInput, match="--rank 3 with --world_size 3"):
        rank_env({"rank": 3, "world_size": 3, "master_port": 99}, {})
    with pytest.raises(BadInput, match="'MASTER_PORT' is not"):
        rank_env({}, {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})


def test_rank_flags_reach_the_seat():
    parser = argparse.ArgumentParser()
    add_flags(parser, RankOptions)
    args = parser.parse_args(["--world_size", "2", "--rank", "1", "--master_port", "77", "--device", "cpu"])
    here = RankEnv(1, 1, 2, "127.0.0.1", 77)
    assert rank_options(args) == {"backend": "auto", "device": "cpu", "here": here, "timeout": 60.0}


@pytest.mark.parametrize(
    ("asked", "machine", "chosen"),
    [
        (("auto", "auto"), (2, 0), ("gloo", "cpu")),
        (("auto", "auto"), (2, 2), ("nccl", "cuda")),
        (("auto", "auto"), (1, 4), ("nccl", "cuda")),
        (("gloo", "auto"), (2, 2), ("gloo", "cuda")),
        (("auto", "cpu"), (2, 2), ("gloo", "cpu")),
        (("auto", "auto"), (3, 2), ("gloo", "cuda")),
    ],
)
def test_choice_of_backend_and_device(asked, machine, chosen):
    choice = choose(*asked, *machine)
    assert choice[:2] == chosen
    assert bool(choice.note) == (0 < machine[1] < machine[0])


@pytest.mark.parametrize(
    ("asked", "machine", "complaint"),
    [
        (("auto", "cuda"), (1, 0), "no CUDA device"),
        (("nccl", "cpu"), (2, 2), "--backend nccl needs a GPU for each of the 2 ranks"),
        (("nccl", "auto"), (3, 2), "there are 2"),
        (("glo", "auto"), (1, 0), "Did you mean 'gloo'"),
        (("auto", "cudda"), (1, 0), "Did you mean 'cuda'"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(asked, machine, complaint):
    with pytest.raises(BadInput, match=complaint):
        choose(*asked, *machine)


def test_a_single_process_needs_no_port_and_leaves_no_group():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), process_group(device="cpu") as world:
            values = torch.tensor([3.0, 5.0])
            dist.all_reduce(values)
            assert values.tolist() == [3.0, 5.0]
            assert (world.rank, world.world_size, world.backend, world.device.type) == (0, 1, "gloo", "cpu")
            raise ZeroDivisionError
        assert not dist.is_initialized()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = RankEnv(rank=0, world_size=2, master_port=port)
        with pytest.raises(BadInput, match=f"127.0.0.1:{port} is in use"), process_group(device="cpu", here=here):
            pass


def test_a_store_listens_at_its_address_only():
    store = host_store("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port)).close()
    socket.create_connection(("127.0.0.1", store.port)).close()


def test_a_process_group_meets_at_its_address_only():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process_group(device="cpu", here=RankEnv(master_port=port)):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port)).close()
        socket.create_connection(("127.0.0.1", port)).close()


def first_kernel(message):
    """Stand in for `torch.zeros` on a GPU."""

    def fail(*size, dtype, device):
        raise RuntimeError(message)

    return fail


def test_a_gpu_that_torch_was_not_built_for_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (5, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla M40")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch, "zeros", first_kernel("CUDA error: no kernel image is available for execution"))
    with pytest.raises(BadInput, match=r"built for sm_80, sm_90, and Tesla M40 has compute capability 5\.2"):
        process_group(device="cuda").__enter__()
    monkeypatch.setattr(torch, "zeros", first_kernel("CUDA error: unknown error"))
    with pytest.raises(RuntimeError, match="unknown error"):
        process_group(device="cuda").__enter__()
    assert not dist.is_initialized()


def test_ranks_of_other_nodes_need_no_gpu_here(monkeypatch):
    monkeypatch.delenv(LOCAL_WORLD_SIZE, raising=False)
    assert ranks_here(4) == 4
    monkeypatch.setenv(LOCAL_WORLD_SIZE, "2")
    assert choose("nccl", "cuda", ranks_here(4), 2).backend == "nccl"
