"""The commands of "Select data as LESS does" run as they stand, and the selection is that of LESS's formula."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest

from gradwire.attribution.store import store
from gradwire.lm.data.corpus import documents

ROOT = Path(__file__).parents[3]


def written(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


WORDS = ("gradient", "sample", "wire", "rank", "shard", "token", "byte", "sum", "mean", "row")
TRAIN = [
    {"id": f"sum/{i}", "prompt": f"{WORDS[i % 10]} and {WORDS[i % 7]}:", "completion": f" {WORDS[i % 10]} {i}"}
    for i in range(40)
] + [
    {"id": f"chat/{i}", "messages": [{"role": role, "content": f"{WORDS[i % 9]} {role} {i}"} for role in roles]}
    for i in range(40)
    for roles in [("user", "assistant")]
]
VALIDATION = {
    task: [
        {"id": f"{task}/{i}", "prompt": f"{WORDS[i]} of {task}:", "completion": f" {WORDS[-i]}"} for i in range(count)
    ]
    for task, count in (("anatomy", 3), ("law", 2))
}


def run_page(section, folder):
    """Run the commands of a section of the page."""
    page = (ROOT / "docs/gradients.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", page.partition(f"## {section}\n")[2].partition("\n## ")[0], re.S)
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": tools, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(["bash", "-euc", commands], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.full
def test_two_commands_select_documents_as_they_were_given(tmp_path):
    written(tmp_path / "train.jsonl", [*TRAIN, {**TRAIN[3], "id": "copy"}, {**TRAIN[50], "id": "another"}])
    for task, documents_of_task in VALIDATION.items():
        written(tmp_path / f"{task}.jsonl", documents_of_task)
    run_page("Select data in two commands", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "selected/top.jsonl").read_text().splitlines()]
    by_id = {one["id"]: one for one in [*TRAIN]}
    assert len(lines) == 4 and all(line == by_id[line["id"]] for line in lines)  # 5 % of 82
    stated = json.loads((tmp_path / "selected/less.json").read_text())["checkpoints"]
    assert [each["step"] for each in stated] == [20, 40, 60]


@pytest.mark.full
def test_the_commands_of_the_page_select_as_less_does(tmp_path):
    written(tmp_path / "train.jsonl", TRAIN)
    written(
        tmp_path / "validation.jsonl", [one for documents_of_task in VALIDATION.values() for one in documents_of_task]
    )
    run_page("Select data as LESS does", tmp_path)
    pairs, rates = 0.0, []
    for step in (20, 40, 60):
        one, other = (
            blocks.read_rows(tmp_path / f"grads/{part}-{step}/dim8192/all_orig.pt").double().numpy()
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
