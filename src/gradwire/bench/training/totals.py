"""Statistics of a run for its record, from the rows of its steps.

``rows`` are those of all ranks; an `Outcome` is rank 0's.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

import numpy as np

from gradwire.base.files import digest
from gradwire.bench.config import Run
from gradwire.bench.training import link_classes
from gradwire.bench.training.counters import COUNTED
from gradwire.bench.training.outcome import Outcome, Row
from gradwire.bench.training.privacy import ADJACENCY
from gradwire.bench.training.sampling import COLUMNS
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.collectives.world import World
from gradwire.comm.topology import between_islands


def times(rows: list[Row]) -> Row:
    """Statistics of step times, without warm-up and profiled steps; a step's time is its slowest rank's."""
    slowest: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for row in rows:
        if not row["warmup"] and not row["profiled"]:
            slowest[row["step"]] = max(slowest.get(row["step"], 0.0), row["step_ms"])
            tokens[row["step"]] = tokens.get(row["step"], 0) + row["tokens"]
    measured = np.array(list(slowest.values()))
    if not measured.size:
        fields = ("step_time_ms_mean", "step_time_ms_p50", "step_time_ms_p90", "step_time_ms_p95", "tokens_per_s")
        return dict.fromkeys(fields) | {"measured_steps": 0}
    p50, p90, p95 = np.percentile(measured, (50, 90, 95))
    return {
        "measured_steps": len(measured),
        "step_time_ms_mean": float(measured.mean()),
        "step_time_ms_p50": float(p50),
        "step_time_ms_p90": float(p90),
        "step_time_ms_p95": float(p95),
        "tokens_per_s": float(sum(tokens.values()) / (measured.sum() / 1000)),
    }


def traffic(settings: Settings, world: World, outcome: Outcome, rows: list[Row]) -> Row:
    """Bytes of gradient reduction over all ranks and optimizer steps, warm-up included.

    Raw bytes are those of a bandwidth-optimal float32 collective of the same kind; sent bytes are those passed to
    collectives. Without a reducer both are closed forms, and sent includes the framework's padding; `trace` measures
    the profiled steps.

    Args:
        settings: The run.
        world: The process group.
        outcome: Rank 0's measurements.
        rows: All ranks' rows.
    """
    if settings.cell.hooked:
        raw, sent, agreement = (sum(row[f"bytes_{what}"] for row in rows) for what in ("raw", "sent", "agreement"))
        steps = [row["bytes_closed_form"] for row in outcome.rows]
        closed, source = None if None in steps else sum(steps), "metered"
        steady = ratio(after_dense_steps(outcome, rows))
    else:
        raw, sent = (
            len(outcome.rows) * parallel.traffic_unhooked(numel, settings.strategy, world.world_size, settings.islands)
            for numel in (outcome.numel, outcome.reduced_numel)
        )
        agreement, source, closed = 0, "closed_form", sent
        steady = raw / sent if sent else None
    if settings.strategy == "hsdp":
        raw, sent, closed = link_classes.gradients(settings, outcome, rows).both
        steady = link_classes.gradients(settings, outcome, after_dense_steps(outcome, rows)).both.ratio
    index = sum(row["bytes_index"] for row in rows) if settings.cell.hooked else None
    overall = raw / sent if sent else None
    return {
        "bytes_raw_total": raw,
        "bytes_compressed_total": sent,
        "bytes_closed_form_total": closed,
        "bytes_agreement_total": agreement,
        "index_bytes": index,
        "index_share": index / sent if index is not None and sent else None,
        "bytes_by_op": by_op(rows) if settings.cell.hooked else None,
        "bytes_source": source,
        "compression_ratio": overall,
        "compression_ratio_steady": steady,
        "compression_ratio_bf16": None if overall is None else overall / 2,
    }


def codec(settings: Settings, rows: list[Row]) -> Row:
    """Codec statistics of the reducer; all null without a reducer and at world size 1.

    ``extra_collectives`` counts one rank's over the whole run; their time is per measured step, averaged over ranks.
    ``density`` covers what sparsifiers encoded on all ranks, in both phases. ``residual_norm`` is the root mean square
    over ranks at the last step. ``fallbacks`` counts encodings on all ranks; ``fallback_fraction`` is their share of
    the elements passed to the compressor, null if there were none.

    Args:
        settings: The run.
        rows: All ranks' rows.
    """
    fields = (
        *("extra_collectives", "extra_collective_time_ms", "padding_bytes", "density", "sparsity", "residual_norm"),
        *("exempt_fraction", "fallbacks", "fallback_fraction"),
    )
    if not settings.cell.hooked or not sum(row["bytes_raw"] for row in rows):
        return dict.fromkeys(fields)
    times = [row["extra_ms"] for row in rows if not row["warmup"] and not row["profiled"]]
    total = {name: sum(row[name] for row in rows) for name in COUNTED}
    chosen, among, encoded = (total[f"{which}_elements"] for which in ("chosen", "sparse", "encoded"))
    norms = [row["residual_norm"] for row in rows if row["step"] == rows[-1]["step"]]
    values = (
        sum(row["extra_collectives"] for row in rows if row["rank"] == 0),
        fmean(times) if times and None not in times else None,
        sum(row["bytes_padding"] for row in rows),
        chosen / among if among else None,
        1 - chosen / among if among else None,
        None if None in norms else math.sqrt(fmean(norm * norm for norm in norms)),
        total["exempt_elements"] / total["elements"],
        total["fallbacks"],
        total["fallback_elements"] / encoded if encoded else None,
    )
    return dict(zip(fields, values, strict=True))


def compression_error(outcome: Outcome) -> Row:
    """Means over the sampled steps after the dense ones; null if no step was sampled."""
    steady = [row for row in outcome.rows if row["step"] >= outcome.dense_steps]
    found = {name: [row[name] for row in steady if row[name] is not None] for name in COLUMNS}
    return {name: fmean(values) if values else None for name, values in found.items()}


def private(settings: Settings, outcome: Outcome) -> Row:
    """The privacy budget spent; all null without private training, and ε null without a guarantee.

    ``noise_multiplier`` is that of the sum over ranks; ε is computed from ``noise_multiplier_accounted``. The step in
    which a run diverged has no row but counts, because it may have changed the weights.
    """
    fields = (
        "epsilon",
        "delta",
        "noise_multiplier",
        "noise_multiplier_accounted",
        "clipped_fraction",
        "sampling",
        "adjacency",
        "accountant",
    )
    training, guarantee = settings.training, outcome.guarantee
    if guarantee is None:
        return dict.fromkeys(fields)
    samples, clipped = (sum(row[name] for row in outcome.rows) for name in ("samples", "clipped_samples"))
    values = (
        guarantee.epsilon(len(outcome.rows) + (outcome.diverged is not None)),
        guarantee.delta,
        training.dp_noise_multiplier,
        guarantee.multiplier,
        clipped / samples if samples else None,
        training.dp_sampling,
        ADJACENCY,
        guarantee.accountant,
    )
    return dict(zip(fields, values, strict=True))


def by_op(rows: list[Row]) -> dict[str, int]:
    """Bytes of gradient reduction per collective."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["bytes_by_op"])
    return dict(total)


def parameter_traffic(settings: Settings, outcome: Outcome, rows: list[Row]) -> Row:
    """Bytes of FSDP's parameter all-gathers over all ranks and optimizer steps, in float32 and as sent.

    The framework's own gathers are float32, in closed form. Replicas gather nothing, so both are null. Muon's gathers
    of momenta are in bf16 and count in both.
    """
    each = [row["bytes_parameters_raw"] for row in outcome.rows]  # over all ranks
    if None in each:
        return dict.fromkeys(("bytes_parameters_raw_total", "bytes_parameters_total"))
    momenta = sum(row["bytes_momenta"] for row in rows)
    counted = settings.cell.param_compress != "none"
    return {
        "bytes_parameters_raw_total": sum(each) + momenta,
        "bytes_parameters_total": (sum(row["bytes_parameters"] for row in rows) if counted else sum(each)) + momenta,
    }


def interface_traffic(run: Run, rows: list[Row]) -> Row:
    """Bytes that the interfaces of the ranks, or of the islands, transmitted in all optimizer steps.

    Both are null without a link. The ranks of an island share an interface, which its first rank reads.
    """
    between = between_islands(run.link)
    ranks = run.world_size // run.islands if between else 1
    each = [row["bytes_interface"] for row in rows if row["rank"] % ranks == 0]
    total = None if not each or None in each else sum(each)
    return {
        "bytes_interface_total": None if between else total,
        "bytes_interface_between_total": total if between else None,
    }


def ratio(rows: list[Row]) -> float | None:
    """Float32 bytes over bytes sent in ``rows``; None if nothing was sent."""
    sent = sum(row["bytes_sent"] for row in rows)
    return sum(row["bytes_raw"] for row in rows) / sent if sent else None


def after_dense_steps(outcome: Outcome, rows: list[Row]) -> list[Row]:
    """The rows of the steps after the dense ones."""
    return [row for row in rows if row["step"] >= outcome.dense_steps]


def quality(outcome: Outcome) -> Row:
    """Losses of the last step and evaluation, null for a diverged run, and a digest of all steps' losses."""
    last = outcome.rows[-1]["loss"] if outcome.rows else None
    return {
        "train_loss": None if outcome.diverged else last,
        "val_loss": outcome.quality.loss if outcome.quality else None,
        "val_ppl": outcome.quality.ppl if outcome.quality else None,
        "quality_from": "train" if outcome.quality else None,
        "loss_digest": digest([row["loss"] for row in outcome.rows]),
    }
