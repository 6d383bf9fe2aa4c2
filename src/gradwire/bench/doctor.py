"""The command ``doctor``: shows what this machine supports and what is missing, and tests ranks on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from gradwire.base.errors import CheckFailed
from gradwire.base.extras import EXTRAS
from gradwire.base.files import write_json
from gradwire.base.flags import PORT
from gradwire.base.strict import Strict

RANKS, SAMPLES, DIM = 2, 8, 64  # ranks without several GPUs; samples of each rank; columns of a row


class Options(Strict):
    """Flags of ``gradwire doctor``."""

    multi_gpu: bool = Field(
        False,
        description=f"train and collect gradients on a rank per GPU, at least {RANKS}, and check devices, port and ids",
    )
    master_port: Annotated[int, PORT] = Field(0, description="port to try; 0 picks a free one")


class Capability(NamedTuple):
    """A capability of this machine, and how to get it if it is missing."""

    name: str
    text: str
    advice: str = ""


def main(options: Options) -> None:
    """Print what this machine supports; with ``--multi_gpu`` train and collect gradients from end to end.

    Raises:
        CheckFailed: If a step fails, with its message.
    """
    known = list(capabilities())
    for name, text, _ in known:
        print(f"{name:<12} {text}")
    if any(advice for *_, advice in known):
        print("\noptional, not found")
    for name, _, advice in known:
        if advice:
            print(f"  {name:<12} {advice}")
    if options.multi_gpu:
        from gradwire.comm.collectives.world import detect_gpus

        multi_gpu(detect_gpus(), options.master_port)


def capabilities() -> Iterator[Capability]:
    """Yield all capabilities in the order of output."""
    import torch

    from gradwire import __version__
    from gradwire.bench.launch import links
    from gradwire.comm.collectives.world import detect_gpus

    yield Capability("gradwire", __version__)
    yield Capability("python", f"{platform.python_version()} ({sys.executable})")
    yield Capability("torch", torch.__version__)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Capability("processors", f"{len(os.sched_getaffinity(0))}, {memory:.1f} GiB of memory")
    gpus = [torch.cuda.get_device_name(index) for index in range(detect_gpus())]
    driver = "no NVIDIA GPU is in use: see `nvidia-smi`, CUDA_VISIBLE_DEVICES and whether torch has CUDA."
    yield Capability("GPUs", f"{len(gpus)}: {', '.join(dict.fromkeys(gpus))}" if gpus else "no", "" if gpus else driver)
    reason = links.probe().reason
    advice = "the tools named above, and root or user namespaces."
    yield Capability("links", f"no: {reason}" if reason else "any rate by tc tbf", advice if reason else "")
    lacking = [extra for extra, packages in EXTRAS.items() if not all(map(find_spec, packages))]
    command = f"`pip install 'gradwire[{','.join(lacking)}]'`." if lacking else ""
    yield Capability("extras", ", ".join(extra for extra in EXTRAS if extra not in lacking) or "no", command)
    for name, version, advice in (
        ("containers", ("apptainer", "--version"), "Apptainer: `containers/get-apptainer` as root."),
        ("Slurm", ("sinfo", "--noheader", "--format=%R: %D nodes"), "a cluster's login node (docs/clusters.md)."),
    ):
        text = output_of(*version)
        yield Capability(name, text or "no", "" if text else advice)


def output_of(*command: str) -> str:
    """Return the lines that a command prints, each once, joined by commas; empty if it fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(dict.fromkeys(done.stdout.splitlines()))


def multi_gpu(gpus: int, port: int) -> None:
    """Train a small model with a generated corpus on a rank per GPU, and collect gradients.

    There are at least two ranks: they share a single GPU by gloo, and run on the CPU without one.

    Raises:
        CheckFailed: If a step fails.
    """
    ranks = max(RANKS, gpus)
    samples = SAMPLES * ranks
    backend = "gloo" if gpus < ranks else "auto"
    launch = ["launch", "--world_size", str(ranks), "--master_port", str(port)]
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        corpus, run, rows = (f"{folder}/{name}" for name in ("corpus.json", "run", "rows"))
        numbers = range(samples + samples // 4)
        texts = [f"document number {number} says {number * number} and no more" for number in numbers]
        write_json(Path(corpus), [{"id": f"doc{n}", "title": f"{n}", "text": text} for n, text in enumerate(texts)])
        shared = f"--data_path {corpus} --cache_dir {folder}/tokens --max_length 64 --backend {backend}"
        train = f"train {shared} --output_dir {run} --model micro --vocab_size 290 --batch_size 2 --steps 2"
        train += " --warmup_steps 0 --lr_warmup_steps 1 --no-profile"
        collect = f"grads collect {shared} --model_dir {run}/final_model --output_path {rows} --dim {DIM}"
        collect += f" --max_samples {samples} --save_interval 3"
        step(f"train a model on {ranks} ranks", [*launch, "--", *train.split()])
        step(f"collect {samples} gradients on {ranks} ranks", [*launch, "--", *collect.split()])
        step("merge their rows", f"grads aggregate --base_path {rows} --dim {DIM}".split())
        step("check every row's sample", f"grads validate --output_dir {rows} --recompute 4".split())


def step(title: str, words: list[str]) -> None:
    """Run a command and print whether it succeeds.

    Raises:
        CheckFailed: If it does not.
    """
    done = subprocess.run([sys.executable, "-m", "gradwire", *words], capture_output=True, text=True)
    print(f"{'failed' if done.returncode else 'ok':<12} {title}", flush=True)
    if done.returncode:
        raise CheckFailed(f"{title}: {done.stderr.strip()}")
