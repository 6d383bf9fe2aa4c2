"""Speed and memory of `gradwire tokenize`: ``python benchmarks/bench_tokenize.py [--mb 50] [--files [N]]``.

Speed: from a corpus file, or with ``--files`` a folder of text files of N documents each, to tokens, compared with
`datasets` (load_dataset + map, batched) with the same tokenizer, one process each, runs interleaved. gradwire's time
includes checking the corpus, splitting, cutting, checksums and the unigram model, of files also their encodings and the
corpus file that `gradwire download` makes of them; "map alone" excludes the conversion to Arrow.
Memory: peak resident set of the whole verb, including training of the tokenizer, on a small and a large corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

VOCAB_SIZE, MAX_LENGTH = 2048, 128


def generate(source: Path, output: Path, megabytes: float) -> None:
    """A corpus of the given size: documents drawn from ``source``, lines shuffled, new ids."""
    from gradwire.lm.data import corpus

    rng = random.Random(0)
    found = list(corpus.documents(source))

    def drawn():
        for number in range(10**9):
            document = rng.choice(found)
            lines = document.body.splitlines(keepends=True)
            rng.shuffle(lines)
            yield corpus.Document(f"{document.id}-{number}", document.title, "".join(lines))

    corpus.write(output, drawn(), int(megabytes * 1e6))


def write_files(source: Path, output: Path, each: int) -> Path:
    """The documents of a corpus as text files with ``each`` of them, at most 1,000 in a folder."""
    from gradwire.lm.data import corpus

    bodies = (document.body for document in corpus.documents(source))
    for number, some in enumerate(iter(lambda: list(islice(bodies, each)), [])):
        file = output / str(number // 1000) / f"{number % 1000}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(some), encoding="utf-8")
    return output


def gradwire_child(given: str, tokenizer: str, folder: str) -> dict:
    """Tokenize; return seconds, without imports."""
    from gradwire.lm.data import corpus, sources
    from gradwire.lm.data.tokenization import tokenize

    start, file = time.perf_counter(), Path(given)
    if file.is_dir():
        stream = sources.build("text", {"data_path": file}).open()
        file = Path(folder) / "corpus.json"
        corpus.write(file, corpus.distinct(stream.documents, stream.where), None)
    tokenize(
        file,
        Path(folder),
        tokenizer=tokenizer,
        vocab_size=VOCAB_SIZE,
        max_length=MAX_LENGTH,
        shard_size=4096,
        val_fraction=0.1,
        dataset="bench",
    )
    return {"all": time.perf_counter() - start}


def datasets_child(given: str, tokenizer: str, folder: str) -> dict:
    """Load the corpus and map the tokenizer over it; return seconds of both and of the map, without imports."""
    import datasets

    from gradwire.lm.data.tokenizer import load

    datasets.disable_progress_bars()
    encode_batch = load(Path(tokenizer)).encode_batch

    def encode(batch):
        titles = batch.get("title", [""] * len(batch["text"]))
        texts = [f"{title}\n{text}" for title, text in zip(titles, batch["text"], strict=True)]
        return {"input_ids": encode_batch(texts)}

    start = time.perf_counter()
    files = Path(given).is_dir()
    kind = (
        {"path": "text", "data_files": f"{given}/**/*.txt", "sample_by": "document"}
        if files
        else {"path": "json", "data_files": given}
    )
    table = datasets.load_dataset(**kind, split="train", cache_dir=folder)
    loaded = time.perf_counter()
    table.map(encode, batched=True, remove_columns=table.column_names)
    end = time.perf_counter()
    return {"all": end - start, "map": end - loaded}


CHILDREN = {"gradwire": gradwire_child, "datasets": datasets_child}


def measure(child: str, corpus: Path, tokenizer: str) -> dict:
    """Run a child in a process and a folder of its own; return its seconds and its peak resident set in MB."""
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        command = [sys.executable, __file__, "--child", child, str(corpus), tokenizer, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{child} failed with {process.returncode}")
        return {**json.loads(output.splitlines()[-1]), "rss_mb": usage.ru_maxrss * 1024 / 1e6}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=50, help="size of the timed corpus, in MB")
    parser.add_argument("--large_mb", type=float, default=500, help="size of the large corpus for peak memory, in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--files",
        type=int,
        nargs="?",
        const=1,
        metavar="N",
        help="time a folder of text files, N documents in each (default: 1), instead of a JSON file",
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, *rest = args.child
        print(json.dumps(CHILDREN[name](*rest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        gradwire = [sys.executable, "-m", "gradwire"]
        subprocess.run([*gradwire, "download", "--output", str(root / "pydocs.json")], check=True)
        words = ["--data_path", str(root / "pydocs.json"), "--output_dir", folder, "--tokenizer_only"]
        subprocess.run([*gradwire, "tokenize", *words], check=True)
        generate(root / "pydocs.json", root / "timed.json", args.mb)
        timed = write_files(root / "timed.json", root / "files", args.files) if args.files else root / "timed.json"
        runs = {name: [] for name in CHILDREN}
        for _ in range(args.rounds):
            for name, results in runs.items():
                results.append(measure(name, timed, str(root / "tokenizer")))
        files = sum(path.is_file() for path in timed.rglob("*"))
        of, rounds = f" in {files:,} text files" if files else "", f"{args.rounds} interleaved rounds"
        print(f"\nspeed, {args.mb:g} MB{of}, {rounds}, {os.cpu_count()} cores (median, [min, max])")
        for name, part in (("gradwire", "all"), ("datasets", "map"), ("datasets", "all")):
            rates = sorted(args.mb / result[part] for result in runs[name])
            label = {"gradwire all": "gradwire tokenize", "datasets map": "datasets.map alone"}.get(
                f"{name} {part}", "datasets: load + map"
            )
            print(f"  {label:<22} {statistics.median(rates):6.2f} MB/s  [{rates[0]:.2f}, {rates[-1]:.2f}]")

        print("\npeak resident set of `gradwire tokenize --tokenizer bpe`")
        peaks = []
        for megabytes in (args.large_mb / 25, args.large_mb):
            generate(root / "pydocs.json", root / "sized.json", megabytes)
            result = measure("gradwire", root / "sized.json", "bpe")
            peaks.append(result["rss_mb"])
            print(f"  {megabytes:5g} MB corpus  {result['rss_mb']:6.0f} MB  ({result['all']:.1f} s)")
        print(f"  growth           {peaks[1] - peaks[0]:6.0f} MB")


if __name__ == "__main__":
    main()
