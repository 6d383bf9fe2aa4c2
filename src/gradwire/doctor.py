"""The verb ``doctor``: what this machine offers, and whether several ranks can collect gradients on it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from gradwire.errors import CheckFailed, GradwireError

RANKS, SAMPLES, DIM = 2, 16, 64


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument(
        "--multi_gpu",
        action="store_true",
        help=f"collect {SAMPLES} samples' gradients on {RANKS} ranks, and check devices, port and pairing",
    )
    parser.add_argument("--master_port", type=int, default=0, help="the port to try; 0 takes a free one")
    parser.add_argument("--launcher", choices=("torchrun", "spawn"), default="torchrun", help="how ranks are started")


def main(args: argparse.Namespace) -> None:
    """Print what is there; with ``--multi_gpu`` run a collection from end to end.

    Raises:
        CheckFailed: If a step of it does not work, with what it said.
    """
    for name, found in machine().items():
        print(f"{name:<12} {found}")
    if args.multi_gpu:
        multi_gpu(args)


def machine() -> dict[str, str]:
    """Versions and devices."""
    import torch

    from gradwire import __version__
    from gradwire.collectives.world import detect_gpus
    from gradwire.launch import links

    gpus = detect_gpus()
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    offer = links.probe()
    return {
        "gradwire": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "processors": str(len(os.sched_getaffinity(0))),
        "GPUs": ", ".join(names) or "none",
        "backend": "nccl" if gpus else "gloo",
        "torchrun": shutil.which("torchrun") or "not found: use --launcher spawn",
        "links": "yes" if offer.way is not None else f"no: {offer.reason}",
    }


def multi_gpu(args: argparse.Namespace) -> None:
    """Two ranks on a corpus and a model made up here.

    Raises:
        CheckFailed: If a step does not work.
    """
    from gradwire.collectives.world import detect_gpus

    if detect_gpus() < RANKS:
        print(f"{detect_gpus()} GPUs for {RANKS} ranks: they share what there is, over gloo")
    with tempfile.TemporaryDirectory(prefix="gradwire-doctor-") as folder:
        run = Path(folder) / "run"
        collect = ["grads", "collect", "--model_dir", f"{folder}/final_model", "--data_path", f"{folder}/shards"]
        collect += ["--output_path", str(run), "--dim", str(DIM), "--max_samples", str(SAMPLES), "--save_interval", "3"]
        launch = ["launch", "--world_size", str(RANKS), "--launcher", args.launcher]
        launch += ["--master_port", str(args.master_port), "--"]

        def verb(words: list[str]) -> None:
            _, module, own = args.parse(words)
            module.main(own)

        step("a model and its data", lambda: make(Path(folder)))
        step(f"{RANKS} ranks collect {SAMPLES} gradients", lambda: verb([*launch, *collect]))
        step("their rows are merged", lambda: verb(["grads", "aggregate", "--base_path", str(run), "--dim", str(DIM)]))
        step(
            "every row is its sample's",
            lambda: verb(["grads", "validate", "--output_dir", str(run), "--recompute", "4"]),
        )


def step(told: str, work: Callable[[], None]) -> None:
    """Do a step and say how it went.

    Raises:
        CheckFailed: If it failed.
    """
    try:
        work()
    except GradwireError as error:
        print(f"failed       {told}")
        raise CheckFailed(f"{told}: {error}") from error
    print(f"ok           {told}")


def make(folder: Path) -> None:
    """A small corpus with its shards, and an untrained model."""
    from gradwire.data.tokenization import tokenize
    from gradwire.data.tokenizer import load
    from gradwire.files import write_json
    from gradwire.models import folder as models
    from gradwire.models import gpt2

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
    model = gpt2.build("tiny", load(folder / "tokenizer").vocab_size, 64, seed=0)
    models.save(model.state_dict(), model.config, folder / "tokenizer", folder / "final_model", {})
