"""An experiment's file as the workflow reads it: strict, merged with the file that it extends, and checked in full."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import read_yaml
from gradwire.bench.config import Dataset, Experiment, experiment
from gradwire.lm.models import presets

EXTENDS = "extends"  # the key of the file that an experiment differs from in little


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a configuration file, merged over the file that its ``extends`` names.

    Args:
        path: A YAML file, or a JSON file if its name ends in ``.json``.
        extended_by: The files that extend this one, outermost first.

    Raises:
        BadInput: If a file cannot be read or is not a mapping; if it extends itself, or another without its own name;
            if an empty mapping is to replace one with keys.
    """
    path = Path(path)
    if not path.exists():
        raise BadInput(f"there is no file {path}: `gradwire init` writes one.")
    given = read_yaml(path)
    if not isinstance(given, Mapping):
        raise BadInput(f"{path}: expected a mapping with name, compressors and grid.")
    if misspelt := get_close_matches(EXTENDS, set(map(str, given)) - {EXTENDS}, cutoff=0.75):
        raise BadInput(f"{path}: {unknown('key', misspelt[0], [*Experiment.model_fields, EXTENDS])}")
    base = given.get(EXTENDS)
    if base is None:
        return dict(given)
    if not isinstance(base, str):
        raise BadInput(f"{path}: {EXTENDS} takes the path of a file, relative to this one.")
    if "name" not in given:
        raise BadInput(f"{path}: give it another name; that of {base} is the folder of that experiment's results.")
    chain = (*extended_by, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise BadInput(f"{path}: {EXTENDS}: {base} extends this file itself.")
    return merged(read(path.parent / base, chain), {key: given[key] for key in given if key != EXTENDS}, str(path))


def merged(base: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Merge two configurations: mappings key by key; any other value, such as a list, replaces the base's.

    Raises:
        BadInput: If an empty mapping is to replace one with keys.
    """
    result = dict(base)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        if both and result[key] and not value:
            raise BadInput(f"{where}: {key}: {{}} changes nothing, as mappings are merged; null removes a section.")
        result[key] = merged(result[key], value, f"{where}: {key}") if both else value
    return result


def check(mapping: Mapping[str, Any]) -> Experiment:
    """The experiment that a configuration describes, with every cell, the grid, the model and the tokenizer checked.

    Raises:
        BadInput: With the first problems found, each with its place in the file and the nearest valid name.
    """
    made = experiment(mapping)
    presets.options(made.model_text)
    if made.dataset.tokenizer != "bpe":
        check_tokenizer(made.dataset.tokenizer)
    if isinstance(made.model, dict):
        check_model(made.model, made.dataset)
    return made


def check_tokenizer(choice: str) -> None:
    """Check that a tokenizer's folder can be read.

    Raises:
        BadInput: If it cannot.
    """
    if not Path(choice).is_dir():
        raise BadInput(
            f"dataset.tokenizer: there is no folder {choice!r}; give bpe, which trains one, or a tokenizer's folder."
        )
    from gradwire.lm.data.tokenizer import backend_of

    backend_of(Path(choice))


def check_model(options: Mapping[str, Any], dataset: Dataset) -> None:
    """Check that inline options make a model, without weights.

    Raises:
        BadInput: If they do not.
    """
    from gradwire.lm.models import architecture  # imports transformers, so only if necessary

    sizes = {key: value for key, value in options.items() if key != "vocab_size"}  # the vocabulary is not made yet
    architecture.on_meta(architecture.configuration(sizes, dataset.vocab_size, dataset.max_length))
