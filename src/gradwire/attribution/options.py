"""Options of gradient rows that verbs and the configuration share. Free of heavy imports."""

from typing import Literal

SampleLoss = Literal["mean", "sum"]
GradType = Literal["sgd", "adam", "sign"]  # of an experiment
AdamVariant = Literal["torch", "less"]
Projection = Literal["rademacher", "normal", "sjlt", "srht", "factored", "none"]
RowType = Literal["float32", "float16", "int8", "int4", "onebit"]
RowUnit = Literal["sample", "token", "module"]
GradMethod = Literal["auto", "loop", "vmap", "hooks"]
PROJECTION: Projection = "sjlt"
SAVE_INTERVAL = 64  # rows per file
