"""The Python blocks of the pages on the library run as they are, on the ranks that a page speaks of.

Those of ``PROGRAMS`` run one after another, as one program.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {  # page -> ranks
    "docs/index.md": 2,
    "docs/how-to/own-script.md": 2,
    "docs/explanation/communication.md": 4,
    "docs/explanation/local-updates.md": 2,
    "docs/how-to/from-a-tutorial.md": 4,
}
PROGRAMS = ("docs/how-to/nearest-samples.md",)
OF_SAMPLES = {"docs/explanation/norms.md": 2, "docs/private-training.md": 2}
BLOCKS = [
    (page, number, code, ranks)
    for page, ranks in PAGES.items()
    for number, code in enumerate(BLOCK.findall((ROOT / page).read_text(encoding="utf-8")))
]


def names(code, rank, folder):
    """Objects that a reader of a block has already: a model, wrapped unless the block does so, data, an optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    given = {
        "batch": torch.randn(4, 6),
        "batches": torch.randn(7, 4, 6),
        "loss_of": lambda output: output.square().mean(),
    }
    given["first"] = given["loss_of"](model(given["batch"])).item()
    given |= {"checkpoint": {}, "folder": folder, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}
    given |= {"torch": torch, "gw": gradwire, "DistributedDataParallel": DistributedDataParallel}
    if "comm_hook" in code:
        given["ddp"] = DistributedDataParallel(model)
    elif "DistributedDataParallel" not in code and "wrap(" not in code and "DiLoCo" not in code:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if "compression" in code and "compress_gradients" not in code:
        given["compression"] = gradwire.compress_gradients(model, "int8", optimizer=optimizer)
    return given | {"model": model, "optimizer": optimizer}


def ran(rank, world, group, code, folder):
    """Run a block; the bytes that its reducer has sent, and whether a step made the loss smaller."""
    given = names(code, rank, folder)
    if "ddp.register_comm_hook" in code:  # the page prints after a backward pass, and says so
        registered, _, rest = code.partition("print(")
        exec(registered, given)
        given["loss_of"](given["ddp"](given["batch"])).backward()
        exec("print(" + rest, given)
        return given["state"].reducer.traffic["sent"], True
    exec(code, given)
    loss = given["loss_of"](given["model"](given["batch"]))
    counted = (
        given["optimizer"] if "DiLoCo" in code else given.get("compression") or given.get("reducer") or given["group"]
    )
    if "backward" not in code:
        loss.backward()
        assert counted.finish()
    return counted.traffic["sent"], loss.item() < given["first"] or "step()" not in code


def test_pages_have_code():
    assert {page for page, *_ in BLOCKS} == PAGES.keys()


@pytest.mark.parametrize(
    ("code", "ranks"), [pytest.param(code, ranks, id=f"{page}-{number}") for page, number, code, ranks in BLOCKS]
)
def test_a_block_runs_as_it_is(world, code, ranks, tmp_path):
    for sent, trained in world(ranks).run(ran, code, tmp_path):
        assert sent > 0 and trained


def test_a_page_of_blocks_that_follow_each_other_is_a_program(tmp_path, monkeypatch, capsys):
    """From a model to the samples nearest to a drawing, which are drawings of the same shape."""
    monkeypatch.chdir(tmp_path)
    (page,) = PROGRAMS
    blocks, given = BLOCK.findall((ROOT / page).read_text(encoding="utf-8")), {}
    for block in blocks:
        exec(block, given)
    assert len(blocks) == 10 and given["loss"].item() < 0.1
    assert capsys.readouterr().out.startswith("240 (240, 1747) ['cross-0', 'cross-1']\n")
    rows = given["rows_of"](given["images"], given["labels"]).double().numpy()
    asked = given["query"].double().numpy()[0]
    cosines = rows @ asked / np.linalg.norm(rows, axis=1) / np.linalg.norm(asked)
    assert [hit.score for hit in given["near"]] == pytest.approx(sorted(cosines)[:-6:-1], abs=1e-3)
    assert {hit.sample_id.partition("-")[0] for hit in given["near"]} == {"square"}
    assert Path("near.svg").read_text(encoding="utf-8").count("<image") == 6
    assert gradwire.GradientStore("rows").ids == pq.read_table("rows.parquet")["sample_id"].to_pylist()


def of_samples(rank, world, group, code):
    """Run a block on gradients of samples, which are the same on all ranks."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    given = {"gradwire": gradwire, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    given |= {"inputs": torch.randn(4, 6), "targets": torch.randn(4, 3), "data": range(4096)}
    given |= {"losses_of": lambda output, targets: (output - targets).square().mean(1)}
    given |= {"loader": [(given["inputs"], given["targets"])] * 3}
    exec(code, given)
    return given["norms"].values.shape == (4,) if "norms" in given else given["private"].steps == 3


@pytest.mark.parametrize("page", OF_SAMPLES)
def test_a_block_on_samples_runs_as_it_is(world, page):
    for code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        assert all(world(OF_SAMPLES[page]).run(of_samples, code))
