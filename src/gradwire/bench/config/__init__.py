"""The experiment as typed data: the data set, the training settings, the compressor cells and the grid over them.

The same classes check ``config.yaml``, fill in its defaults, give ``gradwire train`` its flags and generate the JSON
schema for editors (``workflow/schemas/config.schema.json``). torch is imported only to check a
compressor's own options.
"""

from gradwire.bench.config.cell import FLAGS, Cell, check_private
from gradwire.bench.config.file import Dataset, Experiment, Targets, check, experiment, json_schema, read
from gradwire.bench.config.grid import Gradients, Grid, Run
from gradwire.bench.config.values import BASELINE, SCHEMA_VERSION, Precision, Strategy, Training

__all__ = [
    "BASELINE",
    "FLAGS",
    "SCHEMA_VERSION",
    "Cell",
    "Dataset",
    "Experiment",
    "Gradients",
    "Grid",
    "Precision",
    "Run",
    "Strategy",
    "Targets",
    "Training",
    "check",
    "check_private",
    "experiment",
    "json_schema",
    "read",
]
