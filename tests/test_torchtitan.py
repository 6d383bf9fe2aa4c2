"""torchtitan's debug models on CPUs, with its own trainer, meshes and checkpoints: with gradwire as without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGES = HERE.parent / ".titan"
MESHES = {
    "fsdp": (2, "llama3", {}),
    "fsdp, compiled": (2, "llama3", {}),
    "hsdp": (4, "llama3", {"data_parallel_replicate": 2, "data_parallel_shard": 2}),
    "tp x fsdp": (4, "llama3", {"tensor_parallel": 2}),
    "pp x fsdp": (4, "llama3", {"pipeline_parallel": 2}),
    "experts": (2, "qwen3", {"expert_parallel": 2}),
    "experts x fsdp": (4, "qwen3", {"expert_parallel": 2}),
}
INT8 = {"compressor": "int8", "error_feedback": True}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs torchtitan: make test-full installs it into .titan"),
]


def trained(folder: Path, mesh: str, compression: dict | str | None, steps: int = 4, checkpoint: bool = False) -> dict:
    """Losses and gradient norms of each step, and the traffic."""
    ranks, model, degrees = MESHES[mesh]
    folder.mkdir(parents=True, exist_ok=True)
    given = {"model": model, "folder": str(folder), "steps": steps, "mesh": degrees}
    varied = {"compiled": "compiled" in mesh, "checkpoint": checkpoint, "compression": compression}
    words = json.dumps({**given, **varied})
    paths = [PACKAGES, HERE / "titan", HERE.parent / "examples", os.environ.get("PYTHONPATH", "")]
    script = [HERE / "titan" / "train.py", words]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_without_gradwire(tmp_path, mesh):
    alone = trained(tmp_path / "alone", mesh, None)
    exact = trained(tmp_path / "none", mesh, {"compressor": "none"})
    coded = trained(tmp_path / "int8", mesh, INT8)
    assert exact["steps"].keys() == coded["steps"].keys() == alone["steps"].keys()
    for step, expected in alone["steps"].items():
        assert exact["steps"][step] == pytest.approx(expected, rel=1e-6)
        assert coded["steps"][step] == pytest.approx(expected, rel=5e-3)
    assert coded["steps"] != exact["steps"]
    for traffic in coded["traffic"]:
        assert traffic["sent"] < 0.27 * traffic["raw"]


@pytest.mark.parametrize("mesh", ["hsdp", "fsdp, compiled", "pp x fsdp"])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, mesh):
    unbroken = trained(tmp_path / "unbroken", mesh, "example", steps=4, checkpoint=True)
    trained(tmp_path / "stopped", mesh, "example", steps=2, checkpoint=True)
    resumed = trained(tmp_path / "stopped", mesh, "example", steps=4, checkpoint=True)
    assert resumed["steps"].keys() == {"3", "4"}
    for step, values in resumed["steps"].items():
        assert values == unbroken["steps"][step]


def test_the_page_shows_the_lines_of_the_example():
    text = (HERE.parent / "examples" / "with_torchtitan.py").read_text()
    assert len(text.splitlines()) <= 40
    page = (HERE.parent / "docs" / "how-to" / "torchtitan.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert textwrap.indent(lines, " " * 8) in text
