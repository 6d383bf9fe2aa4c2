"""Overhead of running: planning 1,000 runs, a run's overhead beyond its steps, a checkpoint of the 62m model.

``python benchmarks/bench_running.py [plan] [run] [checkpoint]`` prints a row per figure, with wall and CPU time;
CPU time is more reliable on a shared machine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
THOUSAND = {
    "name": "thousand",
    "dataset": {"source": "pydocs"},
    "training": {"device": "cpu"},
    "compressors": {"none": {}, "fp16": {}, "int8": {}, "topk": {}, "onebit": {"error_feedback": True}},
    "grid": {
        "strategies": ["naive", "bucket", "ddp", "fsdp1", "fsdp2"],
        "world_sizes": [1, 2, 4, 8],
        "seeds": list(range(10)),
    },
}


def timed(command: list[str], **options) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a command and its children."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, spent


def plan(folder: Path) -> None:
    """Time `snakemake -n` on 1,000 runs."""
    config = folder / "thousand.yaml"
    config.write_text(json.dumps(THOUSAND))
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--cores", "2"]
    wall, cpu = timed([*command, "--directory", str(folder), "--configfile", str(config)], cwd=ROOT)
    print(f"| `snakemake -n`, 1,000 runs (3,005 jobs) | {wall:.1f} s | {cpu:.1f} s | < 20 s |", flush=True)


def run(folder: Path) -> None:
    """Time a run of two ranks and four steps, and the bare imports of such a run."""
    corpus = folder / "corpus.json"
    text = " ".join(f"word{n}" for n in range(200))
    corpus.write_text(json.dumps([{"id": str(n), "title": "t", "text": text} for n in range(60)]))
    gradwire = [sys.executable, "-m", "gradwire"]
    made = ["--vocab_size", "300", "--max_length", "32", "--val_fraction", "0.2"]
    timed([*gradwire, "tokenize", "--data_path", str(corpus), "--output_dir", str(folder / "data"), *made])
    train = ["train", "--data_path", str(folder / "data/shards"), "--output_dir", str(folder / "run"), "--steps", "4"]
    train += ["--warmup_steps", "0", "--no-profile", "--no-evaluate", "--device", "cpu", "--batch_size", "2"]
    wall, cpu = timed([*gradwire, "launch", "--world_size", "2", "--", *train])
    table = (folder / "run/record.json").read_text()
    steps = json.loads(table)["step_time_ms_mean"] * 4 / 1000
    imported = "import gc, {}; gc.freeze()"  # ends as `gradwire` does
    rank = "gradwire.bench.training.loop, gradwire.bench.training.results"
    one, own = timed([sys.executable, "-c", imported.format(rank)])
    agent, third = timed([sys.executable, "-c", imported.format("torch.distributed.launcher.api")])
    print(f"| a run of 2 ranks, without its {steps:.1f} s of steps | {wall - steps:.1f} s | {cpu:.1f} s | < 12 s |")
    print(f"| of it: imports of launcher ({agent:.1f} s) and rank | {one + agent:.1f} s | {own + third:.1f} s | |")
    print(f"| the rest, ours and starting processes | {wall - steps - one - agent:.1f} s | | < 2 s |", flush=True)


def checkpoint(folder: Path) -> None:
    """The 62m model on one rank: optimizer steps of 8 samples of 128 tokens, and a checkpoint."""
    import torch

    from gradwire.bench.training.checkpoint import Checkpoints
    from gradwire.comm import parallel
    from gradwire.comm.collectives.world import process_group
    from gradwire.lm.models import causal

    with process_group(device="cpu") as world:
        model = parallel.wrap(causal.build("62m", 50257, 128, 0), "fsdp2", None, device=world.device)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 50257, (8, 128))
        times = []
        for _ in range(3):
            began = time.perf_counter()
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        began, spent = time.perf_counter(), time.process_time()
        Checkpoints(folder, {"identity": "bench", "source": "bench"}, world, 2).save(3, model, optimizer, {"rows": []})
        wall, cpu = time.perf_counter() - began, time.process_time() - spent
    size = sum(path.stat().st_size for path in folder.rglob("*.pt")) / 1e6
    share = wall / (100 * min(times))
    name = f"a checkpoint of 62m, {size:.0f} MB (steps: {min(times):.2f} s)"
    print(f"| {name} | {wall:.2f} s | {cpu:.2f} s | < 5 % of 100 steps: {share:.2%} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    for name in sys.argv[1:] or ("plan", "run", "checkpoint"):
        with tempfile.TemporaryDirectory() as temporary:
            {"plan": plan, "run": run, "checkpoint": checkpoint}[name](Path(temporary))
