"""Perplexity after compressed training on eight simulated ranks of one process: ``python -m gpu.quality``.

As many steps of each cell as fit the time, the same number for all, on the token shards in the folder ``SHARDS``, else
on the documentation of the running Python, at the learning rates of two ranks.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.part import DEVICE, OUT, SMALL, Part, Row, run
from gpu.strategies import corpus, tokenized, total_of, trained
from gpu.workers import Failed, Ranks, alone

from gradwire.comm.collectives.world import simulated_world

MODEL = os.environ.get("MODEL") or ("micro" if SMALL else "small")
VOCABULARY, LENGTH = (512, 64) if SMALL else (4096, 128)
RANKS = 2 if SMALL else 8
BATCH = 4 if SMALL else 16  # samples of a rank and step
CALIBRATION, MOST = (3, 3) if SMALL else (8, 900)  # steps
CALIBRATED = ("none", "int8") if SMALL else ("none", "muon-onebit")
WARM = 0.12  # share of the steps that methods with a dense phase begin with


def cells(steps: int) -> dict[str, dict[str, Any]]:
    """The cells, with the learning rates of configs/quality-small.yaml."""
    dense = max(1, round(WARM * steps))
    local: dict[str, Any] = {"method": "onebit", "comm_optimizer": "diloco", "H": 5, "outer_lr": 1.0}
    local |= {"outer_momentum": 0.0, "lr": 0.0015}
    chosen: dict[str, dict[str, Any]] = {
        "none": {"method": "none", "lr": 0.003},
        "diloco-5-onebit": local,
        "muon": {"method": "none", "inner": "muon", "lr": 0.003},
        "muon-5-onebit": local | {"inner": "muon", "lr": 0.006},
        "onebit_adam": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": dense, "lr": 0.0015},
        "int4": {"method": "int8", "num_bits": 4, "block": 64, "lr": 0.003},
        "muon-onebit": {"method": "onebit", "error_feedback": True, "inner": "muon", "lr": 0.003},
        "int8": {"method": "int8"},
    }
    del chosen["int4" if SMALL else "int8"]
    return {name: chosen[name] for name in ("none", "int8", "diloco-5-onebit")} if SMALL else chosen


def shards() -> Path:
    """The given shards, or the documentation of the running Python, tokenized; a made-up corpus at a small size."""
    if given := os.environ.get("SHARDS"):
        return Path(given)
    folder = OUT / "pydocs"
    if SMALL:
        return corpus(folder)
    if (folder / "shards").is_dir():
        return folder / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    gradwire = [sys.executable, "-m", "gradwire"]
    file = str(folder / "corpus.json")
    subprocess.run([*gradwire, "download", "--source", "pydocs", "--output", file], check=True, timeout=120)
    return tokenized(folder, vocab_size=VOCABULARY, max_length=LENGTH, shard_size=4096)


def simulated(_: None, *arguments: Any) -> list[Row]:
    """Train on simulated ranks; what each of them measured."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    return simulated_world(RANKS, device, lambda world: trained(world, *arguments))


def main() -> int:
    """Choose the number of steps, then train every cell."""
    part = Part("quality")
    data = shards()
    process = Ranks(lambda: [alone])
    folder = OUT / "runs" / "quality"

    def train(name: str, steps: int, seconds: float) -> list[Row]:
        try:
            options = {"batch_size": BATCH, "steps": steps, "lr_warmup_steps": max(1, steps // 20), "evaluate": True}
            return process.run(seconds, simulated, data, folder, "ddp", cells(steps)[name], MODEL, options)[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def calibrated() -> Row:
        step_ms: dict[str, float] = {}
        for name in CALIBRATED:
            try:
                step_ms[name] = train(name, CALIBRATION, 60)[0]["step_ms"][-1]
            except Failed as error:  # it fails again below, where it counts
                print(f"calibration of {name}: {error}", flush=True)
        share = 0.7 * part.left / len(cells(CALIBRATION))  # the rest for slower cells and evaluation
        return {"step_ms": step_ms, "steps": max(CALIBRATION, min(MOST, int(1e3 * share / max(step_ms.values()))))}

    chosen = part.measure("calibration", calibrated)
    if chosen is None:
        return part.finish()
    steps: int = chosen["steps"]
    for name in cells(steps):

        def work(name: str = name) -> Row:
            here = train(name, steps, max(30.0, part.left + 20))
            sent, raw = total_of(here, "sent"), 2 * (RANKS - 1) * 4 * here[0]["numel"]
            total = None if None in sent else sum(number for number in sent if number is not None)
            return {
                "steps": steps,
                "ratio": raw * steps / total if total else 1.0,
                "train_loss": here[0]["losses"][-1],
                "val_ppl": math.exp(here[0]["val_loss"]),
                "step_ms": here[0]["step_ms"][-1],
                "wrong": [f"diverged: {here[0]['diverged']}"] if here[0]["diverged"] else [],
            }

        part.measure(name, work)
    process.end()
    return part.finish(["steps", "ratio", "train_loss", "val_ppl", "step_ms"])


if __name__ == "__main__":
    run(main)
