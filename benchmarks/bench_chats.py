"""Chats compared with bergson and transformers, token by token: ``python benchmarks/bench_chats.py [--chats 500]``.

Chats of four templates (``tests/helpers/chat_templates.py``) are tokenized by gradwire, ``bergson.data.tokenize`` and
transformers, with a copy of the template that marks what the assistant says. bergson is installed into a new
environment, or ``--python`` names the interpreter of one that has it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import venv
from itertools import pairwise
from pathlib import Path

from transformers import AutoTokenizer

from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenize import tokenize

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from chat_templates import FAMILIES, make_tokenizer, marked, unmarked, write
from data_samples import WORDS

BERGSON = "bergson==2.5.0"
PEER = """
import json, sys
from bergson.config import DataConfig
from bergson.data import tokenize
from transformers import AutoTokenizer
folder, chats = sys.argv[1:]
convos = [json.loads(line)["messages"] for line in open(chats)]
tokenizer = AutoTokenizer.from_pretrained(folder)
made = tokenize({"m": convos}, args=DataConfig(conversation_column="m"), tokenizer=tokenizer)
found = [[ids, [int(label != -100) for label in labels]] for ids, labels in zip(made["input_ids"], made["labels"])]
print(json.dumps(found))
"""


def said(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 12))).strip()


def chat(generator: random.Random) -> list[dict[str, str]]:
    """One to four turns, some with a system's message, some with an answer that the user repeats."""
    messages = [{"role": "system", "content": said(generator)}] if generator.random() < 0.3 else []
    for turn in range(generator.randint(1, 4)):
        repeated = turn and generator.random() < 0.3
        messages.append({"role": "user", "content": messages[-1]["content"] if repeated else said(generator)})
        messages.append({"role": "assistant", "content": said(generator)})
    return messages if generator.random() < 0.9 else [*messages, {"role": "user", "content": messages[-1]["content"]}]


def repeats(messages: list[dict[str, str]]) -> bool:
    """Whether a user's message has the answer before it."""
    return any(
        said["role"] == "assistant" and said["content"] in after["content"] for said, after in pairwise(messages)
    )


def ours(folder: Path, corpus: Path, output: Path) -> list[list[list[int]]]:
    sizes = {"vocab_size": 300, "max_length": 2048, "shard_size": 64, "val_fraction": 0.0, "dataset": "chats"}
    tokenize(corpus, output, tokenizer=str(folder), **sizes)
    samples = Shards(output / "shards", "all")
    return [
        [sample.input_ids.tolist(), sample.is_target.int().tolist()]
        for sample in map(samples.__getitem__, range(len(samples)))
    ]


def by_transformers(folder: Path, template: str, chats: list) -> list[list[list[int]]]:
    tokenizer, read = AutoTokenizer.from_pretrained(folder), []
    tokenizer.chat_template = marked(template)
    for messages in chats:
        out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        read.append([out["input_ids"], out["assistant_masks"]])
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument("--python", type=Path, help="interpreter with bergson")
    given, generator = parser.parse_args(), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        base, python = Path(name), given.python
        if python is None:
            venv.create(base / "peer", with_pip=True)
            python = base / "peer" / "bin" / "python"
            subprocess.run([python, "-m", "pip", "install", "--quiet", BERGSON], check=True)
        chats = [chat(generator) for _ in range(given.chats)]
        corpus = write(base / "chats.jsonl", [{"messages": messages} for messages in chats])
        print("| template | users repeat | chats | tokens | as transformers | targets too | tokens as bergson", end=" ")
        print("| targets | answers | only ours | only bergson's |\n|:--|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for family, dated in FAMILIES.items():
            template = dated.replace('strftime_now("%d %b %Y")', '"26 Jul 2024"')
            folder = base / family / "tokenizer"
            make_tokenizer(folder, unmarked(template))
            mine = ours(folder, corpus, base / family / "data")
            truth = by_transformers(folder, template, chats)
            done = subprocess.run([python, "-c", PEER, folder, corpus], check=True, capture_output=True, text=True)
            theirs = json.loads(done.stdout.splitlines()[-1])
            for again in (False, True):
                chosen = [number for number, messages in enumerate(chats) if repeats(messages) == again]
                rows = [(mine[number], truth[number], theirs[number]) for number in chosen]
                pairs = [pair for here, _, peer in rows for pair in zip(here[1], peer[1], strict=True)]
                counts = (
                    *(len(rows), sum(len(here[0]) for here, _, _ in rows)),
                    *(sum(here[part] == library[part] for here, library, _ in rows) for part in (0, 1)),
                    *(sum(here[0] == peer[0] for here, _, peer in rows), sum(sum(here[1]) for here, _, _ in rows)),
                    sum(message["role"] == "assistant" for number in chosen for message in chats[number]),
                    *(pairs.count(pair) for pair in ((1, 0), (0, 1))),
                )
                shown = " | ".join(f"{count:,}" for count in counts)
                print(f"| {family} | {'yes' if again else 'no'} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
