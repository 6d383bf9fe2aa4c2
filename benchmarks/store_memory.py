"""Peak memory, processor seconds and disk of each command of a gradient store, over numbers of rows.

    python benchmarks/store_memory.py FOLDER [ROWS ...] [--discard_parts]

FOLDER gets 100,000 documents of log-normal lengths, an untrained model of 25,056 parameters, and a store per number of
rows, of 8,192 columns. Each command is a process, on one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from multiprocessing import Process
from pathlib import Path

from gradwire.base.files import write_json

DIM, WORDS = 8192, ["gradient", "sample", "wire", "rank", "shard", "token", "id", "row", "byte", "sum"]


def prepare(folder: Path) -> None:
    """Write the shards and the model."""
    from gradwire.lm.data.tokenize import tokenize
    from gradwire.lm.data.tokenizer import load
    from gradwire.lm.models import causal

    draw = random.Random(0)
    lengths = [max(2, min(60, int(draw.lognormvariate(2, 0.8)))) for _ in range(100_000)]
    documents = [
        {"id": f"d{number}", "title": WORDS[number % 10], "text": " ".join(draw.choices(WORDS, k=length))}
        for number, length in enumerate(lengths)
    ]
    write_json(folder / "corpus.json", documents)
    options = {"vocab_size": 290, "max_length": 64, "shard_size": 4096, "val_fraction": 0.0001, "dataset": "words"}
    tokenize(folder / "corpus.json", folder / "data", tokenizer="bpe", **options)
    model = causal.build("micro", load(folder / "data/tokenizer").vocab_size, 64, seed=3)
    causal.save(model.state_dict(), model.config, folder / "data/tokenizer", folder / "model", {"steps": 0})


def measured(words: list[str]) -> tuple[float, float]:
    """Run a command; return its peak resident memory in MB, and its processor seconds."""
    entry = [sys.executable, "-c", "from gradwire.cli import entry; entry()", "grads", *words]
    child = os.posix_spawn(entry[0], entry, {**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"{' '.join(words)} failed")
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def main(folder: Path, counts: list[int], discard: list[str]) -> None:
    """Print a line for each command and number of rows."""
    if not (folder / "model").is_dir():
        preparing = Process(
            target=prepare, args=(folder,)
        )  # a command's peak would begin with the memory of this process
        preparing.start()
        preparing.join()
    model, shards = str(folder / "model"), str(folder / "data/shards")
    for count in counts:
        run, dim = str(folder / f"rows-{count}{'-discarded' if discard else ''}"), str(DIM)
        data = ["--model_dir", model, "--data_path", shards, "--max_samples", str(count), "--device", "cpu"]
        for words in (
            ["collect", *data, "--output_path", run, "--dim", dim, *discard],
            ["aggregate", "--base_path", run, "--dim", dim, *discard],
            ["validate", "--output_dir", run],
            ["query", "--store", f"{run}/dim{dim}", "--sample_id", "d7"],
            ["query", "--store", f"{run}/dim{dim}", "--prompt", "gradient of a wire", "--device", "cpu"],
        ):
            memory, seconds = measured(words)
            disk = sum(file.stat().st_blocks * 512 for file in Path(run).rglob("*") if file.is_file())
            share = disk / (4 * DIM * count)
            name = " ".join([words[0], *(word for word in words if word in ("--sample_id", "--prompt"))])
            print(f"| {count:,} | {name} | {memory:.0f} | {seconds:.1f} | {share:.3f} |", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--discard_parts", action="store_true")
    args = parser.parse_args()
    main(args.folder, args.rows, ["--discard_parts"] * args.discard_parts)
