"""The verb ``doctor``: shows what this machine supports and what is missing, and tests ranks on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gradwire.base.errors import BadInput, CheckFailed, GradwireError
from gradwire.base.flags import PORT
from gradwire.base.machine import installed
from gradwire.bench.launch.ranks import FORK, LAUNCHERS

RANKS, SAMPLES, DIM = 2, 16, 64


class Finding(NamedTuple):
    """What was checked, what was found, and how to install it if it is missing."""

    name: str
    found: str
    advice: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument(
        "--multi_gpu",
        action="store_true",
        help=f"collect the gradients of {SAMPLES} samples on {RANKS} ranks, and check devices, port and sample ids",
    )
    parser.add_argument("--master_port", type=PORT, default=0, help="port to try; 0 picks a free one")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--launcher", choices=(FORK, *LAUNCHERS), help="how ranks are started")


def main(args: argparse.Namespace) -> None:
    """Print what was found; with ``--multi_gpu`` collect gradients from end to end.

    Raises:
        CheckFailed: If a step fails, with its message.
    """
    found = list(findings())
    if args.json:
        print(json.dumps([{"name": name, "found": text, "advice": advice} for name, text, advice in found], indent=2))
        return
    for name, text, _ in found:
        print(f"{name:<12} {text}")
    if missing := [finding for finding in found if finding.advice]:
        print("\noptional, not found")
        for name, _, advice in missing:
            print(f"  {name:<12} {advice}")
    if args.multi_gpu:
        multi_gpu(args)


def findings() -> Iterator[Finding]:
    """Yield all findings in the order of output."""
    import torch

    from gradwire import __version__

    yield Finding("gradwire", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Finding("processors", f"{len(os.sched_getaffinity(0))}, {memory:.1f} GiB of memory")
    yield gpus()
    yield driver()
    yield backends()
    yield shaped_links()
    yield workflow()
    yield containers()
    yield slurm()


def gpus() -> Finding:
    """The GPUs that torch can use."""
    import torch

    from gradwire.comm.collectives.world import detect_gpus

    names = [torch.cuda.get_device_name(index) for index in range(detect_gpus())]
    if names:
        return Finding("GPUs", f"{len(names)}: " + ", ".join(dict.fromkeys(names)))
    if not Path("/proc/driver/nvidia").is_dir():
        return Finding(
            "GPUs", "no: no NVIDIA driver", "a machine with an NVIDIA GPU; everything also runs on the CPU, slower."
        )
    if torch.version.cuda is None:
        return Finding("GPUs", f"no: torch {torch.__version__} is built without CUDA", "`pip install torch` with CUDA.")
    return Finding("GPUs", "no: torch finds none", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES.")


def driver() -> Finding:
    """The NVIDIA driver, by ``nvidia-smi``."""
    versions = _says("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if versions:
        return Finding("driver", ", ".join(dict.fromkeys(versions.split(", "))))
    if Path("/proc/driver/nvidia").is_dir():
        return Finding("driver", "no: nvidia-smi is missing or fails", "NVIDIA's tools; in a container, `--nv`.")
    return Finding("driver", "no: no NVIDIA driver")


def backends() -> Finding:
    """The usable collective backends, the default first."""
    import torch.distributed as dist

    from gradwire.comm.collectives.world import detect_gpus

    usable = {"nccl": dist.is_nccl_available() and detect_gpus() > 0, "gloo": dist.is_gloo_available()}
    return Finding("backends", ", ".join(name for name, there in usable.items() if there) or "none")


def shaped_links() -> Finding:
    """Whether ranks can be connected by links of a given rate."""
    from gradwire.bench.launch import links

    offer = links.probe()
    if offer.way is None:
        return Finding("links", f"no: {offer.reason}", "the tools named above, and root or user namespaces.")
    return Finding("links", "any rate by tc tbf" + (", any delay by netem" if offer.delay else ", without delay"))


def workflow() -> Finding:
    """Whether Snakemake is installed."""
    if (version := installed("snakemake")) is None:
        return Finding("workflow", "no: Snakemake is not installed", "`pip install 'gradwire[bench]'`.")
    return Finding("workflow", f"Snakemake {version}")


def containers() -> Finding:
    """Apptainer, and the images of this checkout's recipe and locks."""
    from gradwire.bench.image import CONTAINERS, VARIANTS, check_apptainer, image_file

    try:
        check_apptainer()
    except BadInput as error:
        return Finding("containers", "no: Apptainer is not installed", str(error).partition(". ")[2])
    apptainer = _says("apptainer", "--version")
    if not CONTAINERS.is_dir():
        return Finding("containers", f"{apptainer}, no checkout", "images are built in a checkout of gradwire.")
    built = [variant for variant in VARIANTS if image_file(variant).is_file()]
    return Finding(
        "containers",
        f"{apptainer}; images built: {', '.join(built) or 'none'}",
        "" if built else "`make image`, or `make image VARIANT=cuda`.",
    )


def slurm() -> Finding:
    """Slurm's client, Snakemake's plugin for it, and whether a cluster responds."""
    if shutil.which("sbatch") is None:
        return Finding("Slurm", "no: no sbatch", "a cluster's login node (docs/clusters.md).")
    if installed("snakemake-executor-plugin-slurm") is None:
        return Finding("Slurm", "no: Snakemake's plugin is not installed", "`pip install 'gradwire[bench]'`.")
    partitions = _says("sinfo", "--noheader", "--format=%R: %D nodes")
    if not partitions:
        return Finding(
            "Slurm", "no: sbatch is installed, but no cluster responds", "a cluster's login node (docs/clusters.md)."
        )
    return Finding("Slurm", partitions)


def _says(*command: str) -> str:
    """A command's output on one line; empty if it fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ", ".join(done.stdout.split("\n")).strip(", ")


def multi_gpu(args: argparse.Namespace) -> None:
    """Collect gradients on two ranks with a generated corpus and model.

    Raises:
        CheckFailed: If a step fails.
    """
    from gradwire.comm.collectives.world import detect_gpus

    if detect_gpus() < RANKS:
        print(f"{detect_gpus()} GPUs for {RANKS} ranks: ranks share devices and use gloo")
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        run = Path(folder) / "run"
        collect = ["grads", "collect", "--model_dir", f"{folder}/final_model", "--data_path", f"{folder}/shards"]
        collect += ["--output_path", str(run), "--dim", str(DIM), "--max_samples", str(SAMPLES), "--save_interval", "3"]
        launch = ["launch", "--world_size", str(RANKS), *(["--launcher", args.launcher] if args.launcher else [])]
        launch += ["--master_port", str(args.master_port), "--"]

        def verb(words: list[str]) -> None:
            _, module, own = args.parse(words)
            module.main(own)

        step("create a model and data", lambda: make(Path(folder)))
        step(f"collect {SAMPLES} gradients on {RANKS} ranks", lambda: verb([*launch, *collect]))
        step("merge their rows", lambda: verb(["grads", "aggregate", "--base_path", str(run), "--dim", str(DIM)]))
        step(
            "check every row's sample",
            lambda: verb(["grads", "validate", "--output_dir", str(run), "--recompute", "4"]),
        )


def step(title: str, work: Callable[[], None]) -> None:
    """Run a step and print the result.

    Raises:
        CheckFailed: If it fails.
    """
    try:
        work()
    except GradwireError as error:
        print(f"failed       {title}")
        raise CheckFailed(f"{title}: {error}") from error
    print(f"ok           {title}")


def make(folder: Path) -> None:
    """Create a small corpus with its shards, and an untrained model."""
    from gradwire.base.files import write_json
    from gradwire.lm.data.tokenization import tokenize
    from gradwire.lm.data.tokenizer import load
    from gradwire.lm.models import causal
    from gradwire.lm.models import folder as models

    texts = [f"document number {number} says {number * number} and no more" for number in range(SAMPLES + 4)]
    write_json(
        folder / "corpus.json", [{"id": f"doc{n}", "title": f"{n}", "text": text} for n, text in enumerate(texts)]
    )
    tokenize(
        folder / "corpus.json",
        folder,
        tokenizer="bpe",
        vocab_size=290,
        max_length=64,
        shard_size=8,
        val_fraction=0.2,
        dataset="doctor",
    )
    model = causal.build("tiny", load(folder / "tokenizer").vocab_size, 64, seed=0)
    models.save(model.state_dict(), model.config, folder / "tokenizer", folder / "final_model", {})
