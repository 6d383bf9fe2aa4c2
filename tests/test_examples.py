"""The scripts of `examples/` on two real ranks, and the names that `gradwire` itself offers."""

from __future__ import annotations

import io
import multiprocessing
import re
import shutil
import socket
from pathlib import Path

import examples_rank
import pytest
import torch
from world import PRELOAD

import gradwire

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = Path(__file__).with_name("helpers") / "own_script.py"
STEPS = 20
LINES = 36  # an example is read at one glance


def run(script: Path, folder: Path, *arguments: str, world_size: int = 2) -> list[str]:
    """What each rank of a script printed; it must end by itself, with 0, on all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    files = [folder / f"rank{rank}.txt" for rank in range(world_size)]
    ranks = [
        context.Process(target=examples_rank.run, args=([str(script), *arguments], rank, world_size, port, file))
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
        process.join()
    printed = [file.read_text() for file in files]
    assert [process.exitcode for process in ranks] == [0] * world_size, "\n".join(printed)
    return printed


def traffic(printed: str) -> tuple[int, int]:
    """The last line's bytes, sent and raw."""
    sent, raw = re.findall(r"([\d,]+) bytes sent of ([\d,]+)", printed)[-1]
    return int(sent.replace(",", "")), int(raw.replace(",", ""))


# Bytes of a step, uncompressed, sent by rank 0: an all-reduce of 8,705 numbers of 4 bytes; of a reduce-scatter what
# belongs to rank 1, 128 rows of the first layer with their biases (the last layer has one row, which is rank 0's).
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "raw", "ratio"),
    [("ddp", 8705 * 4, 3.7), ("fsdp2", 128 * 33 * 4, 20.0), ("with_accelerate", 8705 * 4, 4.5)],
)
def test_a_script_of_ones_own_learns_through_the_wire(tmp_path, name, raw, ratio):
    printed = run(EXAMPLES / f"{name}.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed[0])]
    sent, whole = traffic(printed[0])
    assert len(losses) == 4 and losses[-1] < losses[0] / 4
    assert (whole // STEPS, whole / sent > ratio) == (raw, True)
    assert printed[1] == ""


@pytest.mark.full
def test_the_trainers_gradients_go_through_the_reducer(tmp_path):
    printed = run(EXAMPLES / "trainer.py", tmp_path)[0]
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", printed)]
    sent, raw = traffic(printed)
    assert losses[1] < losses[0]
    assert "step 8:" in printed and 3.8 < raw / sent < 4, "int8 with a scale per 256 values sends a quarter"


@pytest.mark.full
def test_the_trainer_alone_has_nothing_to_send(tmp_path):
    printed = run(EXAMPLES / "trainer.py", tmp_path, world_size=1)[0]
    assert "'train_loss'" in printed and "bytes sent" not in printed


@pytest.mark.full
def test_lightning_resumes_as_if_unbroken(tmp_path):
    """Top-k with error feedback, bfloat16 autocast and accumulation; the second run begins after the second epoch."""
    pytest.importorskip("lightning", reason="examples/with_lightning.py needs `pip install lightning`")
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    resumed.mkdir()
    printed = run(EXAMPLES / "with_lightning.py", tmp_path, str(unbroken))[0]
    shutil.copy(unbroken / "epoch=1-step=8.ckpt", resumed / "last.ckpt")
    again = run(EXAMPLES / "with_lightning.py", tmp_path, str(resumed))[0]

    epochs, rest = (re.findall(r"epoch (\d): loss ([\d.]+)", text) for text in (printed, again))
    assert [epoch for epoch, _ in epochs] == list("01234") and rest == epochs[2:]
    assert float(epochs[-1][1]) < float(epochs[0][1]) / 2
    sent, raw = traffic(printed)
    assert raw == STEPS * 4 * 14432 and raw / sent > 8, "once per optimizer step, a tenth of the values with indices"
    first, second = (torch.load(folder / "epoch=4-step=20.ckpt", weights_only=True) for folder in (unbroken, resumed))
    torch.testing.assert_close(second["state_dict"], first["state_dict"], rtol=0, atol=0)
    ranks, same = (checkpoint["callbacks"]["CompressedGradients"]["ranks"] for checkpoint in (first, second))
    assert same == ranks
    mine, other = (torch.load(io.BytesIO(saved), weights_only=True)["residuals"] for saved in ranks)
    assert mine and str(mine) != str(other), "each rank has its own residuals"


@pytest.mark.full
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "accelerate", "trainer"])
def test_a_script_around_a_llama_resumes_as_if_unbroken(tmp_path, way):
    """Top-k with error feedback, bfloat16 autocast and accumulation; Lightning's turn is above."""
    pytest.importorskip("accelerate")
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    printed = []
    for folder, first, last in ((unbroken, 0, 6), (resumed, 0, 3), (resumed, 3, 6)):
        folder.mkdir(exist_ok=True)
        printed.append(run(SCRIPT, tmp_path, way, str(folder), str(first), str(last))[0])
    losses = [re.findall(r"loss ([\d.]+)", text) for text in printed]
    assert losses[2][-3:] == losses[0][3:] and float(losses[0][-1]) < float(losses[0][0])
    sent, raw = traffic(printed[0])
    assert raw / sent > 6, "a tenth of the values, with indices, once per optimizer step"
    ends = [
        [torch.load(folder / f"end{rank}.pt", weights_only=True) for rank in range(2)] for folder in (unbroken, resumed)
    ]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    first, second = (str(end["residuals"]) for end in ends[0])
    assert first != second, "each rank has its own residuals"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "with_accelerate"])
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES


def hooked(rank: int, world_size: int, group, way: str) -> list:
    """Gradients of a small model: hooked after it was wrapped by hand, and wrapped by `gradwire.wrap`."""
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.comm.collectives import Reducer
    from gradwire.comm.compressors import build
    from gradwire.comm.parallel import hook, wrap
    from gradwire.comm.parallel.strategy import local_gradients

    def backward(model: nn.Module, reducer: Reducer) -> list:
        model(torch.full((2, 5), 1.0 + rank)).square().sum().backward()
        assert reducer.finish()
        assert reducer.traffic["sent"] > 0
        return [gradient.tolist() for gradient in local_gradients(model)]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    reducer = Reducer(build("int8"), seed=1)
    if way == "ddp":
        ours = DistributedDataParallel(model())
    else:
        ours = fully_shard(model(), mesh=DeviceMesh("cpu", list(range(world_size)), mesh_dim_names=("dp",)))
    hook(ours, reducer)
    other = Reducer(build("int8"), seed=1)
    return [backward(ours, reducer), backward(wrap(model(), way, other, device="cpu"), other)]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_hooked_model_is_a_wrapped_one(world, way):
    for by_hand, wrapped in world(2).run(hooked, way):
        assert by_hand == wrapped


def hooked_twice(rank: int, world_size: int, group, way: str) -> list[str]:
    """What `hook` says to a model that was hooked, and to one that was wrapped with a reducer."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.base.errors import BadInput
    from gradwire.comm.collectives import Reducer
    from gradwire.comm.compressors import build
    from gradwire.comm.parallel import hook, wrap

    reducer = Reducer(build("int8"))
    first = DistributedDataParallel(nn.Linear(5, 3)) if way == "ddp" else fully_shard(nn.Linear(5, 3))
    hook(first, reducer)
    messages = []
    for model in (first, wrap(nn.Linear(5, 3), way, Reducer(build("int8")))):
        try:
            hook(model, reducer)
        except BadInput as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_a_second_reducer_is_refused(world, way):
    for messages in world(2).run(hooked_twice, way):
        assert len(messages) == 2 and all("has a reducer already" in message for message in messages)


def not_hookable(rank: int, world_size: int, group) -> str:
    from torch import nn

    from gradwire.base.errors import BadInput
    from gradwire.comm.collectives import Reducer
    from gradwire.comm.compressors import build
    from gradwire.comm.parallel import hook

    try:
        hook(nn.Linear(2, 2), Reducer(build("int8")))
    except BadInput as error:
        return str(error)
    return ""


def test_another_model_is_refused(world):
    assert all("Linear is neither a DistributedDataParallel" in message for message in world(2).run(not_hookable))


def on_a_mesh(rank: int, world_size: int, group) -> dict[str, str]:
    """What `hook` and `wrap` say to models that are spread over 2 x 2 ranks, or over others than the reducer's."""
    from torch import nn
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.base.errors import BadInput
    from gradwire.comm.collectives import Reducer
    from gradwire.comm.compressors import build
    from gradwire.comm.parallel import available, hook, wrap

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    inside = mesh["shards"].get_group()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def sharded(over) -> nn.Module:
        return fully_shard(model(), mesh=over)

    def hybrid() -> nn.Module:
        way = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(model(), device_mesh=mesh, sharding_strategy=way, device_id=torch.device("cpu"))

    def refusal(act) -> str:
        try:
            act()
        except BadInput as error:
            return str(error)
        return ""

    hooked = {
        "hsdp": (sharded(mesh), inside),
        "hsdp on all ranks": (sharded(mesh), None),
        "replicate": (replicate(model(), mesh=line), None),
        "shards of a half": (sharded(mesh["shards"]), None),
        "ddp of a half": (DistributedDataParallel(model(), process_group=inside), None),
        "all for a half": (sharded(line), inside),
        "fsdp1": (hybrid(), inside),
        "fine": (sharded(line), None),
        "fine in halves": (DistributedDataParallel(model(), process_group=inside), inside),
    }
    answers = {
        name: refusal(lambda model=model, of=of: hook(model, Reducer(build("none"), of)))
        for name, (model, of) in hooked.items()
    }
    for way in available():
        for name, made in (("sharded", sharded(mesh)), ("hybrid", hybrid()), ("ddp", DistributedDataParallel(model()))):
            options = {"param_compress": "int8"} if way == "fsdp2" else {}
            answers[f"wrap {name} {way}"] = refusal(
                lambda made=made, way=way, options=options: wrap(
                    made, way, Reducer(build("none")), device="cpu", **options
                )
            )
    return answers


def test_a_model_that_is_averaged_over_other_ranks_or_twice_is_refused(world):
    """Hooked as HSDP, the sums of two replicas would be added up: gradients were twice too large."""
    for answers in world(4).run(on_a_mesh):
        hooked = {name: message for name, message in answers.items() if not name.startswith("wrap")}
        wrapped = {name: message for name, message in answers.items() if name.startswith("wrap")}
        assert [hooked.pop(name) for name in ("fine", "fine in halves", "replicate")] == [""] * 3
        for name in ("hsdp", "hsdp on all ranks"):
            assert "use gradwire.compress_gradients, which builds its reducer" in hooked.pop(name), name
        assert "neither a DistributedDataParallel nor" in hooked.pop("fsdp1")
        assert "over ranks [0, 1, 2, 3], and the reducer over [" in hooked["all for a half"]
        assert len(hooked) == 3 and all("pass Reducer the process group" in message for message in hooked.values()), (
            hooked
        )
        assert len(wrapped) == 18 and all("wrapped or sharded already" in message for message in wrapped.values()), (
            wrapped
        )


def test_every_public_name_is_where_the_stub_says():
    assert len(gradwire.HOMES) > 30 and all(hasattr(gradwire, name) for name in gradwire.HOMES)
