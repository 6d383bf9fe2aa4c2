"""The command ``grads less``: select training data for validation data, as LESS does (Xia et al., 2024, section 4).

At each checkpoint of a warm-up training, the steps that Adam would make for training samples are compared with the
gradients of validation samples. It runs `grads collect`, `grads aggregate` and `grads influence`, and writes the
documents with the highest scores as they were given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from gradwire.attribution.options import Count, PartOptions, Projection, RowStrategy, RowType, number_of
from gradwire.attribution.query.influence import LEARNING_RATE
from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_write, check_sums, read_object, write_json
from gradwire.base.flags import RANKS
from gradwire.base.strict import to_flags
from gradwire.bench.command import Command
from gradwire.lm.data import CHAT_FORMAT, LENGTH, SKIP_INVALID, ChatFormat
from gradwire.lm.models.saved import ADAPTER, METADATA

if TYPE_CHECKING:
    from gradwire.lm.data.document import Document

STATE = "trainer_state.json"  # of a Trainer's checkpoint
RESULT, TOP, VALIDATION, SUBTASKS = "less.json", "top.jsonl", "validation.json", "subtasks.json"


class Options(PartOptions):
    """Flags of ``gradwire grads less``."""

    data_path: Path = Field(description="training data, a corpus file")
    validation: tuple[Path, ...] = Field(min_length=1, description="validation data, a corpus file for each subtask")
    checkpoints: tuple[Path, ...] = Field(
        min_length=1,
        description="checkpoints of Hugging Face's Trainer, or models of `train --keep_model_every`; or their folder",
    )
    model_dir: Path | None = Field(None, description="the model of checkpoints that are LoRA adapters")
    top_k: str = Field("5%", description="documents to select: a number, or a share of all")
    dim: Count = Field(8192, description="columns per row")
    projection: Projection | None = Field(None, description="as in grads collect")
    store: RowType = Field("float32", description="as in grads collect")
    strategy: RowStrategy = Field("ddp", description="as in grads collect")
    max_length: Annotated[int, LENGTH] | None = Field(None, description="tokens per sample (default: the model's)")
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    skip_invalid: bool = Field(False, description=SKIP_INVALID)
    num_gpus: Annotated[int, RANKS] = Field(1, description="number of ranks that collect")
    output_dir: Path = Field(description=f"folder for {TOP}, {RESULT} and the gradients")

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        number_of(self.top_k, 1)
        names = [file.stem for file in self.validation]
        if len({*names}) < len(names):
            raise ValueError("--validation names two files alike, and a subtask has its file's name: rename one")
        return self


class Checkpoint(NamedTuple):
    """A model of the warm-up training.

    Attributes:
        folder: Its folder.
        step: The step that it was saved after.
        learning_rate: The mean learning rate since the checkpoint before.
    """

    folder: Path
    step: int
    learning_rate: float


def output_dir(options: Options) -> Path:
    """Return the folder of the outputs."""
    return options.output_dir


def main(options: Options) -> None:
    """Collect the gradients, score the samples and write the best documents; the next call resumes.

    Raises:
        BadInput: If a file or a checkpoint is invalid.
        GradwireError: If a step fails.
    """
    from gradwire.attribution.query.documents import select
    from gradwire.lm.data.document import plain

    checkpoints = checkpoints_of(options.checkpoints)
    write_validation(options)
    for words in commands(options, checkpoints):
        Command(words).run()
    chosen = select(options.data_path, scores_of(options.output_dir / "influence"), options.top_k)
    with atomic_write(options.output_dir / TOP) as part, part.open("w", encoding="utf-8") as stream:
        for document in chosen.documents:
            stream.write(json.dumps(plain(document.given), ensure_ascii=False) + "\n")
    write_json(
        options.output_dir / RESULT,
        {
            "checkpoints": [{**each._asdict(), "folder": str(each.folder)} for each in checkpoints],
            "validation": [str(file) for file in options.validation],
            "top_k": options.top_k,
            "selected": [document.id for document in chosen.documents],
            "documents": chosen.total,
            "repeated": chosen.repeated,
        },
    )
    repeated = f"; {chosen.repeated} exact duplicates are passed over" if chosen.repeated else ""
    print(f"{len(chosen.documents)} of {chosen.total} documents selected in {options.output_dir / TOP}{repeated}")


def checkpoints_of(given: Sequence[Path]) -> list[Checkpoint]:
    """Read the steps and learning rates of checkpoints, or of those in a folder; return them by step.

    Raises:
        BadInput: If a folder is no checkpoint and has none, or states no learning rate.
    """
    folders = [folder for path in given for folder in ([path] if _is_checkpoint(path) else sorted(path.glob("*-*")))]
    folders = [folder for folder in folders if _is_checkpoint(folder)]
    missing = [path for path in given if not any(folder.is_relative_to(path) for folder in folders)]
    if missing:
        if not missing[0].exists():
            raise BadInput(f"--checkpoints: {missing[0]} does not exist.")
        raise BadInput(
            f"--checkpoints: {missing[0]} is no checkpoint of Trainer ({STATE}) or of `train --keep_model_every` "
            f"({METADATA}), and no folder of them, such as the models/ of a run."
        )
    stated = sorted((_state(folder) | {"folder": folder} for folder in folders), key=lambda state: state["step"])
    edges = [0, *(state["step"] for state in stated)]
    return [
        Checkpoint(state["folder"], state["step"], _rate(state, after))
        for state, after in zip(stated, edges, strict=False)
    ]


def _is_checkpoint(folder: Path) -> bool:
    return (folder / STATE).is_file() or (folder / METADATA).is_file()


def _state(folder: Path) -> dict[str, Any]:
    """The step of a checkpoint, and its learning rate or the rates that were logged until then, by step."""
    if not (folder / STATE).is_file():
        check_sums(folder, (METADATA,))
        state = read_object(folder / METADATA)
        return {"step": state.get("step", 0), "rate": state.get(LEARNING_RATE)}
    state = read_object(folder / STATE)
    logs = [entry for entry in state.get("log_history", []) if isinstance(entry, dict) and LEARNING_RATE in entry]
    return {"step": state.get("global_step", 0), "logged": {entry["step"]: entry[LEARNING_RATE] for entry in logs}}


def _rate(state: dict[str, Any], after: int) -> float:
    """The mean learning rate between a step and a checkpoint.

    Raises:
        BadInput: If none is stated.
    """
    logged = [rate for step, rate in state.get("logged", {}).items() if after < step <= state["step"]]
    rate = state["rate"] if "rate" in state else sum(logged) / len(logged) if logged else None
    if not isinstance(rate, float) or not rate > 0:
        raise BadInput(
            f"{state['folder']} states no learning rate after step {after}: train with `logging_steps` of at most the "
            "steps between two checkpoints, or with `train --keep_model_every`."
        )
    return rate


def write_validation(options: Options) -> None:
    """Write the validation documents into one corpus, with the name of their subtask before their ids, and a table.

    Raises:
        BadInput: If a file is invalid.
    """
    from gradwire.lm.data import corpus
    from gradwire.lm.data.document import Invalid

    subtasks: dict[str, str] = {}

    def documents() -> Iterator[Document]:
        for file in options.validation:
            for document in corpus.documents(file, skipped=Invalid() if options.skip_invalid else None):
                id_ = f"{file.stem}/{document.id}"
                subtasks[id_] = file.stem
                yield replace(document, id=id_)

    corpus.write(options.output_dir / VALIDATION, documents())
    write_json(options.output_dir / SUBTASKS, subtasks)


def commands(options: Options, checkpoints: Sequence[Checkpoint]) -> Iterator[list[str]]:
    """Yield the steps as command lines."""
    folder, dim = options.output_dir, str(options.dim)
    ranks = ["launch", "--world_size", str(options.num_gpus), "--"] if options.num_gpus > 1 else []
    shared = ("dim", "projection", "store", "strategy", "max_length", "chat_format", "skip_invalid", "discard_parts")
    data = {"train": options.data_path, "validation": folder / VALIDATION}
    stores: dict[str, list[str]] = {part: [] for part in data}
    for checkpoint in checkpoints:
        adapter = (checkpoint.folder / ADAPTER).is_file()
        if adapter and options.model_dir is None:
            raise BadInput(f"{checkpoint.folder} is a LoRA adapter: give its model as --model_dir.")
        places = ["--model_dir", str(options.model_dir), "--lora_dir"] if adapter else ["--model_dir"]
        for part, path in data.items():
            collection = str(folder / "grads" / f"{part}-{checkpoint.step}")
            given = [*places, str(checkpoint.folder), "--data_path", str(path), "--output_path", collection]
            step = ["--grad_type", "adam", "--adam_variant", "less"] if part == "train" else []
            yield [*ranks, "grads", "collect", *given, *step, *to_flags(options, *shared)]
            merged = ["--base_path", collection, "--dim", dim, "--num_gpus", str(options.num_gpus)]
            yield ["grads", "aggregate", *merged, *to_flags(options, "discard_parts")]
            stores[part].append(f"{collection}/dim{dim}")
    compared = [word for part, paths in stores.items() for word in (f"--{part}", *paths)]
    rates = [str(checkpoint.learning_rate) for checkpoint in checkpoints]
    grouped = ["--over", "subtask", "--subtasks", str(folder / SUBTASKS)]
    yield ["grads", "influence", *compared, "--weights", *rates, *grouped, "--output_dir", str(folder / "influence")]


def scores_of(folder: Path) -> dict[str, float]:
    """Read the samples' scores that `grads influence` wrote."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "scores.parquet", columns=["sample_id", "score"])
    return dict(zip(table["sample_id"].to_pylist(), table["score"].to_pylist(), strict=True))
