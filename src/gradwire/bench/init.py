"""The command ``init``: writes a configuration with every field, its default and its meaning."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from gradwire.base.errors import BadInput
from gradwire.base.files import parse_yaml, write_text
from gradwire.base.flags import output_file
from gradwire.base.strict import Strict
from gradwire.bench.config import Dataset, Experiment, Gradients, Training, experiment
from gradwire.lm.data.sources import meaning
from gradwire.lm.data.sources import options as options_of_sources

HEAD = """\
# An experiment. Run it with
#     gradwire run {file}
# Every field with its default; fields without a default, or off by default, are commented out.
name: {name} # {meaning_of_name}
model: tiny # {model}
dataset:
{dataset}
training:
{training}
# Each label is a cell: a method of `gradwire compressors` (default: the label), its options, and the reducer's.
compressors:
  none: {{}} # the framework's own float32 reduction: the baseline
  int8: {{}}
  # topk10: {{method: topk, density: 0.1, error_feedback: true}}
# One product, or a list of products whose union is run.
grid:
  strategies: [fsdp2] # naive, bucket, ddp, fsdp1, fsdp2, hsdp (with islands: [2])
  world_sizes: [2] # ranks
  seeds: [0, 1, 2] # one seed has no range
  links: [none] # or rates, such as 100mbit
  compressors: all
# Per-sample gradients of some runs:
# gradients:
#   compressors: [none]
{gradients}
"""


class Options(Strict):
    """Flags of ``gradwire init``."""

    output: Annotated[Path, output_file] = Field(Path("experiment.yaml"), description="the file to write")
    name: str = Field("experiment", description="the experiment's name: its folder under results/")


def main(options: Options) -> None:
    """Write the file and print the next command.

    Raises:
        BadInput: If the file exists, or the name is invalid.
    """
    if options.output.exists():
        raise BadInput(f"{options.output} already exists; give another --output.")
    text = template(options.name, options.output)
    check(text)
    write_text(options.output, text)
    print(f"{options.output}: every field with its default. Next: gradwire run {options.output}")


def check(text: str) -> None:
    """Check that ``text`` is a valid experiment.

    Raises:
        BadInput: If it is not.
    """
    experiment(parse_yaml(text))


def template(name: str, file: Path) -> str:
    """The configuration text of an experiment with this name."""
    fields = Experiment.model_fields
    return HEAD.format(
        file=file,
        name=json.dumps(name),
        meaning_of_name=fields["name"].description,
        model=fields["model"].description,
        dataset=indent(f"{commented(Dataset)}\n{source_options()}", "  "),
        training=indent(commented(Training), "  "),
        gradients=indent(commented(Gradients), "#   ", lambda line: True).replace("#   # ", "#   "),
    )


def commented(model: type[BaseModel]) -> str:
    """One line per field with a description: its default, meaning and choices."""
    lines = []
    for name, field in model.model_fields.items():
        if field.description is None:
            continue
        default = field.get_default(call_default_factory=True)
        value = "" if default is None else f" {_yaml(default)}"
        lines.append(f"{'# ' if default is None else ''}{name}:{value} # {field.description}{_choices(field)}")
    return "\n".join(lines)


def source_options() -> str:
    """One line per option of a source, switched off."""
    return "\n".join(f"# {name}: # {meaning(fields)}" for name, fields in options_of_sources().items())


def _yaml(value: Any) -> str:
    """A value in YAML 1.1, where a float such as 1e-05 without a point is text."""
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _choices(field: FieldInfo) -> str:
    """The choices of a literal, as text."""
    values: Any = get_args(field.annotation) if get_origin(field.annotation) is not None else ()
    named = [value for value in values if isinstance(value, str)]
    return f" ({', '.join(named)})" if named else ""
