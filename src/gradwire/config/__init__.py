"""The experiment as typed data: the data set, the training settings, the compressor cells and the grid over them.

The same classes check ``config.yaml``, fill in its defaults, give ``gradwire train`` its flags and generate the JSON
schema for editors (``workflow/schemas/config.schema.json``). torch is imported only to check a
compressor's own options.
"""

from gradwire.communication import CommOptimizer, Communication
from gradwire.compressors.parameter_encoding import ParamCompress
from gradwire.config.cell import FLAGS, Cell, Reduction, check_private
from gradwire.config.dataset import Dataset
from gradwire.config.file import Experiment, Targets, experiment, json_schema, load
from gradwire.config.flags import add_flags, from_flags, to_flags
from gradwire.config.grid import Gradients, Grid, Run
from gradwire.config.strict import checked
from gradwire.config.training import Training
from gradwire.config.values import (
    BASELINE,
    SCHEMA_VERSION,
    AdamVariant,
    GradMethod,
    GradType,
    Precision,
    Projection,
    RowType,
    RowUnit,
    SampleLoss,
    Split,
    Strategy,
)

__all__ = [
    "BASELINE",
    "FLAGS",
    "SCHEMA_VERSION",
    "AdamVariant",
    "Cell",
    "CommOptimizer",
    "Communication",
    "Dataset",
    "Experiment",
    "GradMethod",
    "GradType",
    "Gradients",
    "Grid",
    "ParamCompress",
    "Precision",
    "Projection",
    "Reduction",
    "RowType",
    "RowUnit",
    "Run",
    "SampleLoss",
    "Split",
    "Strategy",
    "Targets",
    "Training",
    "add_flags",
    "check_private",
    "checked",
    "experiment",
    "from_flags",
    "json_schema",
    "load",
    "to_flags",
]
