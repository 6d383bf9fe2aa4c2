"""Models that a run keeps: those of its evaluations, with their moments and learning rates, also after a resumption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_runs import run, train, words

from gradwire import cli
from gradwire.lm.models import causal, optimizer


def kept(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "models").iterdir())


def val_loss(model: Path, data: Path, output: Path) -> float:
    words = ["--model_dir", model, "--data_path", data, "--output", output / "p.json", "--device", "cpu"]
    assert cli.main(["perplexity", *map(str, words)]) == 0
    return json.loads((output / "p.json").read_text())["avg_loss"]


def files(model: Path) -> dict[str, bytes]:
    steps = ("gradwire.json", "SHA256SUMS")  # which differ by the step
    return {file.name: file.read_bytes() for file in model.iterdir() if file.name not in steps}


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"strategy": "fsdp2", "comm_compress": "int8"}),
        (2, {"strategy": "ddp", "comm_optimizer": "diloco", "comm_config_json": '{"H": 4}'}),
    ],
)
def test_a_kept_model_is_the_one_evaluated_after_its_step(world, shards, tmp_path, size, changes):
    rows, _ = world(size).run(run, words(shards, tmp_path, keep_model_every=2, eval_every=2, **changes))[0]
    assert kept(tmp_path) == ["step-000002", "step-000004", "step-000006"]
    lr = [row["lr"] for row in rows]
    assert len(set(lr)) == 6
    for step in (2, 4, 6):
        model = tmp_path / "models" / f"step-{step:06d}"
        assert val_loss(model, shards, tmp_path) == pytest.approx(rows[step - 1]["val_loss"], rel=1e-5)
        noted = json.loads((model / "gradwire.json").read_text())
        assert noted["step"] == step and noted["learning_rate"] == pytest.approx(sum(lr[step - 2 : step]) / 2)
        assert set(optimizer.load(model, causal.load(model)).step.values()) == {step}
    final = json.loads((tmp_path / "final_model" / "gradwire.json").read_text())
    assert final["identity"] == noted["identity"]
    assert files(tmp_path / "models" / "step-000006").keys() == files(tmp_path / "final_model").keys()


def test_a_resumed_run_keeps_the_same_models_and_a_new_one_removes_them(shards, tmp_path):
    options = {"keep_model_every": 2, "keep_checkpoints": 3}
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert train(whole, shards, **options) == 0
    assert files(whole / "models" / "step-000006") == files(whole / "final_model")
    for part in ("checkpoints/step00000002", "models/step-000002", "models/step-000004"):  # killed in step 5
        shutil.copytree(whole / part, again / part)
    (again / "models/step-000004/model.safetensors").write_bytes(b"")
    assert train(again, shards, "--resume", **options) == 0
    assert kept(again) == kept(whole)
    for name in kept(whole):
        assert files(again / "models" / name) == files(whole / "models" / name)
        assert (again / f"models/{name}/gradwire.json").read_bytes() == (
            whole / f"models/{name}/gradwire.json"
        ).read_bytes()
    assert train(again, shards) == 0
    assert not (again / "models").exists()
