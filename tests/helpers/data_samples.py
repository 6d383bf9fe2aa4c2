"""Small corpora for the data tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = (
    "the",
    "gradient",
    "of",
    "shards",
    "travels",
    "over a wire,",
    "naïve",
    "日本",
    "code; x = 3.14",
    "and",
    "\n\ttabs",
)


def values(count: int, longest: int = 120) -> list[dict]:
    """Documents of 1 to ``longest`` words; word counts and ids are irregular on purpose."""
    rng = random.Random(count)
    return [
        {"id": f"doc-{i * 7}", "title": f"Title {i}", "text": " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))}
        for i in range(count)
    ]


def write_corpus(path: Path, documents: list[dict]) -> Path:
    path.write_text(json.dumps(documents, ensure_ascii=False), encoding="utf-8")
    return path


def tokenize_words(corpus: Path, output: Path, **settings: object) -> list[str]:
    """The words of a ``gradwire tokenize`` command with small numbers."""
    flags = {"vocab_size": 300, "max_length": 16, "shard_size": 7, "val_fraction": 0.3, **settings}
    words = ["tokenize", "--data_path", str(corpus), "--output_dir", str(output)]
    return words + [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def files_of(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock")  # a process id
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
