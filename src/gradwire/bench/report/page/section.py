"""A section of the page, and the captions of all: heading, short form, what it shows and how that was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench.config import BASELINE
from gradwire.bench.report.page.curves import WINDOWS
from gradwire.bench.report.page.style import Drawing
from gradwire.bench.report.rows.checks import Gate
from gradwire.bench.report.rows.record import BF16, Result
from gradwire.bench.report.tables.headline import Finding
from gradwire.bench.report.tables.table import SPREAD, Table
from gradwire.bench.statistics.seeds import LEAST

Content = dict[str, Any] | str  # the fields of a section, or why it is empty


@dataclass
class Section:
    """A part of the page.

    Args:
        key: Its id, and the start of its file names.
        title: Its heading.
        short: The heading in the list of sections.
        lead: What it shows and how it was computed.
        absent: Why the section is empty, if it is.
        properties: Terms and their values.
        gates: Checks.
        failures: Runs without a result.
        plots: Figures to draw.
        tables: Tables; the first is shown, the others are folded.
        notes: Further notes.
        findings: Which compressor wins in which regime.
    """

    key: str
    title: str
    short: str
    lead: str = ""
    absent: str = ""
    properties: Sequence[tuple[str, str]] = ()
    gates: Sequence[Gate] = ()
    failures: Sequence[Result] = ()
    plots: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    findings: Sequence[Finding] = ()


def section(key: str, content: Content, **values: Any) -> Section:
    """Make a section with its captions; ``values`` are formatted into them."""
    title, short, lead = CAPTIONS[key]
    if isinstance(content, str):
        return Section(key, title, short, absent=content)
    return Section(key, title.format(**values), short, lead.format(**values), **content)


CAPTIONS = {
    "headline": ("In short", "In short", ""),
    "validity": (
        "What was run, and whether it is valid",
        "Validity",
        "Checks come before numbers: a cell that fails one is marked in the table and cannot head it.",
    ),
    "cells": (
        "All cells",
        "Cells",
        f"One row per cell, means over n seeds; {SPREAD}. Sorted by strategy, world "
        "size and link; within these, cells that pass the quality gate come first, and fast ones first. Perplexity "
        f"and step time are compared seed by seed with {BASELINE} (fp32, the framework's own reduction) and {BF16}, "
        "speed on the same link and like machines only. “×” is how many times smaller or shorter: above 1 is better.",
    ),
    "pareto": (
        "Quality against cost",
        "Pareto",
        f"Perplexity above that of {BASELINE}, over the gradient bytes that a rank sends in a step, and over the "
        f"step's time. Bars are ranges of seeds, from {LEAST} seeds on 95 % intervals of the mean; small dots are "
        "single seeds. Filled markers lie on the "
        "front: no other cell is both cheaper and better. The dashed line is the quality gate, 1 %. Bytes do not "
        "depend on the link, and are drawn for one.",
    ),
    "targets": (
        "Time to a target perplexity",
        "Time to target",
        "Steps, seconds and gradient bytes until the first evaluation with a perplexity as low as the target, medians "
        "over seeds; ∞: more than half of the seeds never reach it. A label as the target means its final "
        "perplexity with the same seed. Seconds leave evaluations out. Cells whose perplexity is from another "
        "experiment take the steps of its seeds, each as long as their own typical step. Curves join the targets and "
        "the end of the runs, for the baselines and the labels on the front; m is communication over computation of "
        f"{BASELINE}. Figures need two links.",
    ),
    "loss": (
        "Loss over steps and over time",
        "Loss",
        f"Training loss, the mean over seeds, in at most {WINDOWS} windows of steps; the band reaches from the lowest "
        "seed to the highest. Losses over steps do not depend on the link, and are drawn for one. Seconds are those "
        "of the steps, the slowest rank's each; evaluations are left out, and the first step, which compiles, counts "
        "at most as long as the median of the others. Validation losses are drawn where runs evaluated several times.",
    ),
    "step-time": (
        "Where a step's time goes",
        "Step time",
        "The mean profiled step of all ranks and seeds, from the profiler's traces. The parts add up to the step. "
        "Overlapped communication runs during computation, exposed communication does not, and both include waiting "
        "for other ranks; idle is none of all: Python, the autograd engine, data loading.",
    ),
    "scaling": (
        "Scaling over world sizes",
        "Scaling",
        "Tokens per second of all ranks together; dots are single seeds. One rank sends nothing, so lines begin at "
        f"{BASELINE} alone where a label has no run of its own there. The dashed line is {BASELINE} at its smallest "
        "world size, as many times faster as there are more ranks.",
    ),
    "winners": (
        "Which compressor wins where",
        "Winners",
        "Predicted, except at the points, which were measured: the compressor with the shortest step, each by its "
        "fastest way, by the cost model fitted to {cells} cells at W = {world}, with {latency:g} µs per message. A "
        "triangle at the right edge is a measurement without a limit.{off} `gradwire predict` adds intervals.",
    ),
    "gradient-error": (
        "What compression does to the gradient",
        "Gradient error",
        "The delivered gradient against the exact mean of the ranks' gradients, at the sampled steps, and the norm "
        "of the residuals of error feedback: means over seeds, bands from the lowest to the highest.",
    ),
    "stores": (
        "Stores of per-sample gradients",
        "Gradient stores",
        "Results of `gradwire grads validate`: files are complete, and row i of the matrix belongs to sample id i.",
    ),
    "environment": (
        "The environment of every rank",
        "Environment",
        "What each rank recorded at the start of its run. Ranks with equal records share a row.",
    ),
    "compare": (
        "Against {other}",
        "Comparison",
        "Cells that both experiments have, paired by seed. The difference is that of {other} from {name} in percent, "
        f"the mean of the ratios' logarithms over the pairs; {SPREAD}. p is that of a paired t-test on the logarithms "
        "(two-sided), adjusted for the number of cells by Holm's procedure; “sees” is the increase that it finds with "
        "a probability of 80 %, with as many pairs and as much spread. One pair gives no test.",
    ),
}
