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
    """The output of each rank of a script; it must end by itself, with 0, on all ranks."""
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


@pytest.mark.full
def test_norms_of_samples_are_printed_while_fsdp2_trains(tmp_path):
    printed = run(EXAMPLES / "sample_norms.py", tmp_path)[0]
    losses, largest = (re.findall(rf"{name} ([\d.]+)", printed) for name in ("loss", "norm"))
    assert len(losses) == 4 and float(losses[-1]) < float(losses[0]) / 4 and all(float(norm) > 0 for norm in largest)


@pytest.mark.full
def test_rows_of_one_class_are_nearest(tmp_path):
    assert "16 of 16 nearest samples" in run(EXAMPLES / "gradient_rows.py", tmp_path, world_size=1)[0]


@pytest.mark.full
def test_private_training_learns_and_spends_epsilon(tmp_path):
    printed = run(EXAMPLES / "private.py", tmp_path)
    losses, spent = (
        [float(value) for value in re.findall(rf"{name} ([\d.]+)", printed[0])] for name in ("loss", "epsilon")
    )
    assert losses[-1] < losses[0] / 4 and spent == sorted(spent) and 2 < spent[-1] < 6
    assert printed[1] == ""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        *((name, LINES) for name in ("ddp", "fsdp2", "with_accelerate")),
        *((name, 30) for name in ("sample_norms", "gradient_rows", "private")),
    ],
)
def test_an_example_is_short(name, lines):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= lines


def test_every_public_name_is_where_the_stub_says():
    imported = {}
    exec("from gradwire import *", imported)
    assert len(gradwire.HOMES) > 30 and imported.keys() >= gradwire.HOMES.keys()
    assert imported["compress_gradients"].__module__ == "gradwire.comm.parallel.compression"
