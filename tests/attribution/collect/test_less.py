"""The commands of "Select data as LESS does" run as they stand, and the selection is that of LESS's formula."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gradwire.attribution.store import store
from gradwire.lm.data.corpus import documents

ROOT = Path(__file__).parents[3]


def written(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


@pytest.mark.full
def test_the_commands_of_the_page_select_as_less_does(tmp_path):
    page = (ROOT / "docs/gradients.md").read_text(encoding="utf-8")
    (commands,) = re.findall(
        r"```sh\n(.*?)```", page.partition("## Select data as LESS does\n")[2].partition("\n## ")[0], re.S
    )
    words = ["gradient", "sample", "wire", "rank", "shard", "token", "byte", "sum", "mean", "row"]
    written(
        tmp_path / "train.jsonl",
        [
            {"id": f"sum/{i}", "prompt": f"{words[i % 10]} and {words[i % 7]}:", "completion": f" {words[i % 10]} {i}"}
            for i in range(40)
        ]
        + [
            {"id": f"chat/{i}", "messages": [{"role": role, "content": f"{words[i % 9]} {role} {i}"} for role in roles]}
            for i in range(40)
            for roles in [("user", "assistant")]
        ],
    )
    written(
        tmp_path / "validation.jsonl",
        [
            {"id": f"{task}/{i}", "prompt": f"{words[i]} of {task}:", "completion": f" {words[-i]}"}
            for task, count in (("anatomy", 3), ("law", 2))
            for i in range(count)
        ],
    )
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": tools, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    pairs, rates = 0.0, []
    for step in (20, 40, 60):
        one, other = (
            store.read_rows(tmp_path / f"grads/{part}-{step}/dim8192/all_orig.pt").double().numpy()
            for part in ("train", "validation")
        )
        one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, other))
        rates.append(
            json.loads((tmp_path / f"warmup/models/step-0000{step}/gradwire.json").read_text())["learning_rate"]
        )
        pairs = pairs + rates[-1] * one @ other.T
    pairs = pairs / sum(rates)
    lr = [row["lr"] for row in pq.read_table(tmp_path / "warmup/steps.parquet").to_pylist() if row["rank"] == 0]
    assert rates == pytest.approx([np.mean(lr[start : start + 20]) for start in (0, 20, 40)])
    ids = store.read_ids(tmp_path / "grads/validation-20/dim8192/all_ids.pkl")
    of_task = [pairs[:, [id_.startswith(task) for id_ in ids]].mean(1) for task in ("anatomy", "law")]
    table = pq.read_table(tmp_path / "selected/scores.parquet")
    np.testing.assert_allclose(table["score"].to_numpy(), np.maximum(*of_task), rtol=1e-9)
    order = np.argsort(-np.maximum(*of_task), kind="stable")[:10]
    chosen = [*documents(tmp_path / "selected.json")]
    assert [one.id for one in chosen] == [table["sample_id"][int(at)].as_py() for at in order]
    whole = {one.id: one for one in documents(tmp_path / "train.jsonl")}
    assert all(one == whole[one.id] for one in chosen) and chosen[0].spans
