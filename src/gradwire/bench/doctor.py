"""The verb ``doctor``: shows what this machine supports and what is missing, and tests ranks on it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from gradwire.base.errors import CheckFailed
from gradwire.base.extras import EXTRAS
from gradwire.base.files import write_json
from gradwire.base.flags import PORT
from gradwire.base.strict import Strict

RANKS, SAMPLES, DIM = 2, 16, 64


class Options(Strict):
    """Flags of ``gradwire doctor``."""

    multi_gpu: bool = Field(
        False, description=f"train and collect {SAMPLES} gradients on {RANKS} ranks, and check devices, port and ids"
    )
    master_port: Annotated[int, PORT] = Field(0, description="port to try; 0 picks a free one")
    as_json: bool = Field(False, alias="json", description="print what was found as JSON")
    launcher: Literal["fork", "spawn", "torchrun"] | None = Field(None, description="how ranks are started")


class Finding(NamedTuple):
    """A capability of this machine, and how to get it if it is missing."""

    name: str
    found: str
    advice: str = ""


def main(options: Options) -> None:
    """Print what was found; with ``--multi_gpu`` train and collect gradients from end to end.

    Raises:
        CheckFailed: If a step fails, with its message.
    """
    all_findings = list(findings())
    if options.as_json:
        print(json.dumps([finding._asdict() for finding in all_findings], indent=2))
        return
    for name, text, _ in all_findings:
        print(f"{name:<12} {text}")
    if missing := [finding for finding in all_findings if finding.advice]:
        print("\noptional, not found")
        for name, _, advice in missing:
            print(f"  {name:<12} {advice}")
    if options.multi_gpu:
        multi_gpu(options)


def findings() -> Iterator[Finding]:
    """Yield all findings in the order of output."""
    import torch
    import torch.distributed as dist

    from gradwire import __version__
    from gradwire.bench.launch import links
    from gradwire.comm.collectives.world import detect_gpus

    yield Finding("gradwire", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("processors", f"{len(os.sched_getaffinity(0))}, {memory:.1f} GiB of memory")
    gpus = [torch.cuda.get_device_name(index) for index in range(detect_gpus())]
    driver = "no NVIDIA GPU is in use: see `nvidia-smi`, CUDA_VISIBLE_DEVICES and whether torch has CUDA."
    yield Finding("GPUs", f"{len(gpus)}: {', '.join(dict.fromkeys(gpus))}" if gpus else "no", "" if gpus else driver)
    yield Finding("driver", output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "no")
    usable = {"nccl": dist.is_nccl_available() and bool(gpus), "gloo": dist.is_gloo_available()}
    yield Finding("backends", ", ".join(name for name, there in usable.items() if there) or "none")
    offer = links.probe()
    if offer.options is None:
        yield Finding("links", f"no: {offer.reason}", "the tools named above, and root or user namespaces.")
    else:
        yield Finding("links", "any rate by tc tbf" + (", any delay by netem" if offer.delay else ", without delay"))
    lacking = [extra for extra, packages in EXTRAS.items() if not all(map(find_spec, packages))]
    command = f"`pip install 'gradwire[{','.join(lacking)}]'`." if lacking else ""
    yield Finding("extras", ", ".join(extra for extra in EXTRAS if extra not in lacking) or "no", command)
    for name, version, advice in (
        ("containers", ("apptainer", "--version"), "Apptainer: `containers/get-apptainer` as root."),
        ("Slurm", ("sinfo", "--noheader", "--format=%R: %D nodes"), "a cluster's login node (docs/clusters.md)."),
    ):
        text = output_of(*version)
        yield Finding(name, text or "no", "" if text else advice)


def output_of(*command: str) -> str:
    """Return the lines that a command prints, each once, joined by commas; empty if it fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(dict.fromkeys(done.stdout.splitlines()))


def multi_gpu(options: Options) -> None:
    """Train a small model on two ranks with a generated corpus, and collect gradients.

    Raises:
        CheckFailed: If a step fails.
    """
    launch = ["launch", "--world_size", str(RANKS), "--master_port", str(options.master_port)]
    launch += ["--launcher", options.launcher] if options.launcher else []
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        corpus, run, rows = (f"{folder}/{name}" for name in ("corpus.json", "run", "rows"))
        texts = [f"document number {number} says {number * number} and no more" for number in range(SAMPLES + 4)]
        write_json(Path(corpus), [{"id": f"doc{n}", "title": f"{n}", "text": text} for n, text in enumerate(texts)])
        shared = f"--data_path {corpus} --cache_dir {folder}/tokens --max_length 64"
        train = f"train {shared} --output_dir {run} --model micro --vocab_size 290 --batch_size 2 --steps 2"
        train += " --warmup_steps 0 --lr_warmup_steps 1 --no-profile"
        collect = f"grads collect {shared} --model_dir {run}/final_model --output_path {rows} --dim {DIM}"
        collect += f" --max_samples {SAMPLES} --save_interval 3"
        step(f"train a model on {RANKS} ranks", [*launch, "--", *train.split()])
        step(f"collect {SAMPLES} gradients on {RANKS} ranks", [*launch, "--", *collect.split()])
        step("merge their rows", f"grads aggregate --base_path {rows} --dim {DIM}".split())
        step("check every row's sample", f"grads validate --output_dir {rows} --recompute 4".split())


def step(title: str, words: list[str]) -> None:
    """Run a verb and print whether it succeeds.

    Raises:
        CheckFailed: If it does not.
    """
    done = subprocess.run([sys.executable, "-m", "gradwire", *words], capture_output=True, text=True)
    print(f"{'failed' if done.returncode else 'ok':<12} {title}", flush=True)
    if done.returncode:
        raise CheckFailed(f"{title}: {done.stderr.strip()}")
