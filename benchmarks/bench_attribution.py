"""Gradient rows compared with bergson, and EK-FAC's scores with kronfluence: the tables of peers in ``attribution.md``.

    python benchmarks/bench_attribution.py FOLDER [--rounds 3] [--python INTERPRETER]

FOLDER has ``corpus.json`` and ``data/``, made by the first commands of that page. It gets two Llamas, what the tools
write, and an environment with the peers on gradwire's torch and transformers; ``--python`` names the interpreter of one
that has them. Each tool runs in its own process, on one thread, by turns, until all have as many measurements as
rounds were asked for; a call goes on where an earlier one ended. Wall time is not measured, since it depends on what
else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from gradwire.attribution.store import row_file
from gradwire.base.files import read_object, write_json
from gradwire.lm.data.shards import Shards

PEERS = ("bergson==2.5.0", "kronfluence==1.0.1")
NEEDED = (  # of what they require, all that gradwire's environment lacks and these runs import
    *("docstring_parser", "einconv", "einops", "graphviz", "jaxtyping", "ml_dtypes", "natsort", "optree", "petname"),
    *("simple_parsing", "torchopt", "wadler_lindig"),
)
LINEAR, SIDE, DIM = "*_proj", 12, 4032  # 28 modules of 12 x 12 columns in bergson, 63 x 64 columns for all in gradwire
SAMPLES, TRAIN, QUERIES, EXACT, SUBSETS = 1000, 265, 31, 24, 64
LLAMA = {
    "architecture": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 352,
    "tie_word_embeddings": True,
}
GRADWIRE = (sys.executable, "-c", "from gradwire.cli import entry; entry()")
LDS = Path(__file__).with_name("attribution") / "lds.py"
BERGSON = "from bergson.__main__ import main; main()"
TO_DATASET = """
import json, sys
from datasets import Dataset
Dataset.from_dict({"input_ids": json.load(open(sys.argv[1]))}).save_to_disk(sys.argv[2])
"""
GRADIENTS = """
import json, sys
import numpy as np
from bergson.data import load_gradients
sizes = json.load(open(sys.argv[1] + "/info.json"))["grad_sizes"]
np.savez(sys.argv[2], rows=np.array(load_gradients(sys.argv[1])), names=[*sizes], sizes=[*sizes.values()])
"""
KRONFLUENCE = """
import json, sys
from pathlib import Path
import numpy as np, torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from kronfluence.utils.dataset import DataLoaderKwargs
from transformers import AutoModelForCausalLM

model_dir, data, output = map(Path, sys.argv[1:])

def losses(batch, model):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none").view(labels.shape)
    return (each.sum(1) / (labels != -100).sum(1)).sum()

class Language(Task):
    def compute_train_loss(self, batch, model, sample=False):
        assert not sample
        return losses(batch, model)

    def compute_measurement(self, batch, model):
        return losses(batch, model)

    def get_influence_tracked_modules(self):
        return [name for name, _ in model.named_modules() if name.endswith("_proj")]

    def get_attention_mask(self, batch):
        return batch["attention_mask"]

def collate(samples):
    labels = pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}

train, queries = (json.loads((data / f"{name}.json").read_text()) for name in ("train", "queries"))
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
task = Language()
model = prepare_model(model, task)
analyzer = Analyzer("language", model, task, cpu=True, disable_tqdm=True, output_dir=str(output))
analyzer.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=collate))
analyzer.fit_all_factors("ekfac", train, 16, factor_args=FactorArguments(use_empirical_fisher=True))
arguments = ScoreArguments(damping_factor=None)  # 0.1 of the mean curvature
analyzer.compute_pairwise_scores("scores", "ekfac", queries, train, 16, 16, score_args=arguments)
np.save(output / "matrix.npy", analyzer.load_pairwise_scores("scores")["all_modules"].T.numpy())
"""


def measured(output: Path, *commands: Sequence[object]) -> tuple[float, float, float]:
    """Run commands that write into ``output``, which is emptied before.

    Returns:
        Their processor seconds, the peak of the resident memory in MB, and the MB on the disk.
    """
    shutil.rmtree(output, ignore_errors=True)
    seconds, memory, log = 0.0, 0.0, output.parent / "log.txt"
    for command in commands:
        with log.open("wb") as stream:
            words = [*map(str, command)]
            process = subprocess.Popen(words, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"})
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(words)[:300]} failed:\n{log.read_text()[-3000:]}")
        seconds += usage.ru_utime + usage.ru_stime
        memory = max(memory, usage.ru_maxrss / 1024)
    return seconds, memory, sum(file.stat().st_blocks * 512 for file in output.rglob("*") if file.is_file()) / 1e6


def installed(folder: Path) -> str:
    """Return the interpreter of an environment with the peers, which sees gradwire's packages."""
    python = folder / "bin/python"
    if not python.is_file():
        venv.create(folder, with_pip=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "gradwire.pth").write_text(sysconfig.get_paths()["purelib"])
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PEERS, *NEEDED], check=True)
    return str(python)


def prepare(folder: Path, python: str) -> None:
    """Make an untrained Llama for rows, a trained one for scores with the losses that judge them, and the tokens."""
    corpus, rows, data = folder / "corpus.json", folder / "rows/shards", folder / "data/shards"
    sizes = ("--vocab_size", 4096, "--max_length", 128, "--val_fraction", 0.1)
    measured(rows.parent, (*GRADWIRE, "tokenize", "--data_path", corpus, "--output_dir", rows.parent, *sizes))
    training = ("--model", "llama-small", "--strategy", "ddp", "--steps", 1, "--warmup_steps", 0, "--no-profile")
    run = folder / "untrained"
    measured(run, (*GRADWIRE, "train", "--data_path", rows, "--output_dir", run, *training))
    recipe = ("--model", json.dumps(LLAMA), "--steps", 60, "--batch_size", 16, "--seed", 1, "--methods", "dot")
    asked = ("--queries", QUERIES, "--subsets", SUBSETS, "--output_dir", folder / "trained")
    subprocess.run([*map(str, (sys.executable, LDS, "--data_path", data, *recipe, *asked))], check=True)
    for model in (run / "final_model", folder / "trained/model"):
        lengthened(model)
    for name, shards, split, count in (
        ("rows", rows, "train", SAMPLES),
        ("train", data, "train", TRAIN),
        ("queries", data, "val", QUERIES),
    ):
        samples = Shards(shards, split)
        ids = [samples[position].input_ids.tolist() for position in range(count)]
        print(f"{name}: {count} samples of {sum(map(len, ids)) / count:.1f} tokens", file=sys.stderr)
        (folder / f"{name}.json").write_text(json.dumps(ids))
        subprocess.run([python, "-c", TO_DATASET, folder / f"{name}.json", folder / f"{name}.hf"], check=True)


def lengthened(model: Path) -> None:
    """Copy a model as one that reads 2,048 tokens: bergson takes no more in a batch than in a sample."""
    copy = model.with_name(f"{model.name}-long")
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))


def of_bergson(python: str, model: Path, data: Path, output: Path, side: int, split: str = "train") -> list[object]:
    """Return the command that collects bergson's rows."""
    options = ("--projection_dim", side, "--loss_reduction", "mean", "--token_batch_size", 2048, "--split", split)
    return [python, "-c", BERGSON, "build", output, "--overwrite", "--model", model, "--dataset", data, *options]


def collecting(folder: Path, output: Path, *modules: str) -> list[list[object]]:
    """Return the commands that collect gradwire's rows."""
    data = ("--model_dir", folder / "untrained/final_model", "--data_path", folder / "rows/shards", "--device", "cpu")
    options = ("--max_samples", SAMPLES, "--dim", DIM, "--projection", "factored", *modules)
    return [
        [*GRADWIRE, "grads", "collect", *data, "--output_path", output, "--discard_parts", *options],
        [*GRADWIRE, "grads", "aggregate", "--base_path", output, "--dim", DIM, "--discard_parts"],
    ]


def scoring(folder: Path, output: Path, *modules: str) -> list[list[object]]:
    """Return the commands that compute gradwire's scores under EK-FAC."""
    model, shards, factors = folder / "trained/model", folder / "data/shards", output / "factors"
    data = ("--model_dir", model, "--data_path", shards, *modules, "--device", "cpu", "--batch_size", 16)
    asked = ("--query_path", shards, "--query_split", "val", "--queries", QUERIES, "--metric", "dot")
    curved = ("--grad_type", "ekfac", "--optimizer_dir", factors, "--output_dir", output / "scores")
    return [
        [*GRADWIRE, "grads", "factors", *data, "--output_dir", factors],
        [*GRADWIRE, "grads", "score", *data, *asked, *curved],
    ]


def show(title: str, folder: Path, tools: Sequence[str]) -> None:
    """Print the medians of all rounds; the last tool is the peer."""
    usages = {tool: measurements(folder, tool) for tool in tools}
    peer = statistics.median(seconds for seconds, _, _ in usages[tools[-1]])
    print(f"\n| {title} | processor s | of each round | ÷ peer | peak MB | disk MB |\n|:--|--:|:--|--:|--:|--:|")
    for tool, rounds in usages.items():
        seconds, memory, disk = (statistics.median(values) for values in zip(*rounds, strict=True))
        each = ", ".join(f"{usage[0]:.1f}" for usage in rounds)
        print(f"| {tool} | {seconds:.1f} | {each} | {seconds / peer:.2f} | {memory:.0f} | {disk:.1f} |", flush=True)


def measurements(folder: Path, tool: str) -> list[list[float]]:
    """Return what `measured` returned for a tool, by round."""
    file = folder / f"{tool}.json"
    return json.loads(file.read_text()) if file.is_file() else []


def compare_gradients(folder: Path, python: str) -> None:
    """Print how whole gradients of both tools differ."""
    run, peer = folder / "exact", folder / "exact-bergson"
    measured(peer, of_bergson(python, folder / "trained/model-long", folder / "train.hf", peer, 0, f"train[:{EXACT}]"))
    subprocess.run([python, "-c", GRADIENTS, peer, folder / "exact.npz"], check=True)
    theirs = np.load(folder / "exact.npz")
    names, sizes = theirs["names"].tolist(), theirs["sizes"]
    parts = dict(zip(names, np.split(theirs["rows"].astype(np.float64), np.cumsum(sizes)[:-1], 1), strict=True))
    data = ("--model_dir", folder / "trained/model", "--data_path", folder / "data/shards", "--modules", LINEAR)
    whole = ("--projection", "none", "--dim", sizes.sum(), "--max_samples", EXACT, "--output_path", run)
    measured(run, [*GRADWIRE, "grads", "collect", *data, *whole])
    ours = row_file.RowFile(run / f"rank_0/dim{sizes.sum()}" / "all_orig.pt").read(0, EXACT).astype(np.float64)
    rows = np.concatenate([parts[name] for name in sorted(names, key=position_in(folder / "trained/model"))], 1)
    deviations = np.linalg.norm(rows - ours, axis=1) / np.linalg.norm(ours, axis=1)
    print(f"\nlargest deviation of {EXACT} whole gradients from bergson's: {deviations.max():.1e}")


def position_in(model: Path) -> Callable[[str], int]:
    """Return a function that finds a module's position in a model by its name, or by the end of it."""
    from gradwire.lm.models import causal

    names = [name for name, _ in causal.load(model).named_modules()]
    return lambda wanted: next(place for place, name in enumerate(names) if f".{name}".endswith(f".{wanted}"))


def compare_scores(folder: Path, tools: Sequence[str]) -> None:
    """Print how scores correlate with kronfluence's, and what each predicts of trainings on subsets."""
    subsets = [read_object(folder / f"trained/subsets/{number}.json") for number in range(SUBSETS)]
    losses = np.array([subset["losses"] for subset in subsets])
    members = np.array([np.isin(np.arange(TRAIN), subset["members"]) for subset in subsets], np.float64)
    matrices = {tool: np.load(next((folder / tool).rglob("matrix.npy"))).astype(np.float64) for tool in tools}
    print(f"\n| scores | Pearson's correlation with {tools[-1]} | LDS |\n|:--|--:|--:|")
    for tool, matrix in matrices.items():
        equal = np.corrcoef(matrix.ravel(), matrices[tools[-1]].ravel())[0, 1]
        sums = members @ matrix
        score = np.mean([spearmanr(sums[:, query], -losses[:, query]).statistic for query in range(QUERIES)])
        print(f"| {tool} | {equal:.6f} | {score:.3f} |")


def main() -> None:
    """Prepare and measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="interpreter with the peers")
    given = parser.parse_args()
    folder = given.folder.absolute()
    python = given.python or installed(folder / "peers")
    if not (folder / "queries.hf").is_dir():
        prepare(folder, python)
    same, every, bergson = rows = ("rows, same modules", "rows, all parameters", "rows, bergson 2.5.0")
    same_scores, every_score, kronfluence = scores = (
        "EK-FAC, same modules",
        "EK-FAC, all parameters",
        "EK-FAC, kronfluence 1.0.1",
    )
    long, model = folder / "untrained/final_model-long", folder / "trained/model"
    commands = {
        same: collecting(folder, folder / same, "--modules", LINEAR),
        every: collecting(folder, folder / every),
        bergson: [of_bergson(python, long, folder / "rows.hf", folder / bergson, SIDE)],
        same_scores: scoring(folder, folder / same_scores, "--modules", LINEAR),
        every_score: scoring(folder, folder / every_score),
        kronfluence: [[python, "-c", KRONFLUENCE, model, folder, folder / kronfluence]],
    }
    for number in range(given.rounds):
        for tool, words in commands.items():
            if len(done := measurements(folder, tool)) <= number:
                write_json(folder / f"{tool}.json", [*done, measured(folder / tool, *words)])
    show(f"rows of {SAMPLES:,} samples, {DIM:,} columns", folder, rows)
    show(f"EK-FAC, {TRAIN} samples, {QUERIES} queries", folder, scores)
    compare_gradients(folder, python)
    compare_scores(folder, scores)


if __name__ == "__main__":
    main()
