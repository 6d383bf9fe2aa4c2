"""Statistics of a run for its record, from the rows of its steps; fields that do not apply are left out.

``rows`` are those of all ranks; an `Outcome` is rank 0's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from gradwire.base.files import digest
from gradwire.bench.config import Run
from gradwire.bench.steps import weights
from gradwire.bench.training.build import Outcome
from gradwire.bench.training.measure import COLUMNS, COUNTED, Row
from gradwire.bench.training.objective import ADJACENCY
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.closed_forms import raw_bytes, unhooked_by_link
from gradwire.comm.collectives.world import World
from gradwire.comm.topology import between_islands


def times(rows: list[Row]) -> Row:
    """Statistics of step times, without warm-up and profiled steps; a step's time is its slowest rank's.

    In means a kind of steps has the share that it has of the run. They are null for simulated ranks.
    """
    slowest: dict[int, float] = {}
    tokens: dict[int, int] = {}
    kinds = {row["step"]: row["kind"] for row in rows}
    for row in rows:
        if not row["warmup"] and not row["profiled"] and row["step_ms"] is not None:
            slowest[row["step"]] = max(slowest.get(row["step"], 0.0), row["step_ms"])
            tokens[row["step"]] = tokens.get(row["step"], 0) + row["tokens"]
    measured = np.array(list(slowest.values()))
    percentiles = {name: float(np.percentile(measured, int(name[1:]))) for name in ("p50", "p90", "p95") if slowest}
    share = weights([kinds[step] for step in slowest], [*kinds.values()]) if slowest else []
    mean = float(measured @ share) if slowest else None
    return {
        "measured_steps": len(slowest),
        "step_time_ms_mean": mean,
        **{f"step_time_ms_{name}": percentiles.get(name) for name in ("p50", "p90", "p95")},
        "tokens_per_s": 1000 * float(np.array([*tokens.values()]) @ share) / mean if mean else None,
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
    hooked, later = settings.cell.hooked, after_dense_steps(outcome, rows)
    if settings.strategy == "hsdp":
        total, steady = (gradients_by_link(settings, outcome, steps).both for steps in (rows, later))
    elif hooked:
        closed = known_sum([row["bytes_closed_form"] for row in rows])
        total = Bytes(total_of(rows, "bytes_raw"), total_of(rows, "bytes_sent"), closed)
        steady = Bytes(total_of(later, "bytes_raw"), total_of(later, "bytes_sent"), None)
    else:
        kind = parallel.strategy_class(settings.strategy).kind
        raw, sent = (
            len(outcome.rows) * raw_bytes(kind, numel, world.world_size)
            for numel in (outcome.numel, outcome.reduced_numel)
        )
        total = steady = Bytes(raw, sent, sent)
    index = total_of(rows, "bytes_index") if hooked else None
    return {
        "bytes_raw_total": total.raw,
        "bytes_compressed_total": total.sent,
        "bytes_closed_form_total": total.closed_form,
        "bytes_agreement_total": total_of(rows, "bytes_agreement") if hooked else 0,
        "index_bytes": index,
        "index_share": index / total.sent if index is not None and total.sent else None,
        "bytes_by_op": by_op(rows) if hooked else None,
        "bytes_source": "metered" if hooked else "closed_form",
        "compression_ratio": total.ratio,
        "compression_ratio_steady": steady.ratio,
        "compression_ratio_bf16": None if total.ratio is None else total.ratio / 2,
    }


def codec(settings: Settings, rows: list[Row]) -> Row:
    """Codec statistics of the reducer; none without a reducer and at world size 1.

    ``extra_collectives`` counts one rank's over the whole run; their time is per measured step, averaged over ranks.
    ``density`` covers what sparsifiers encoded on all ranks, in both phases. ``residual_norm`` is the root mean square
    over ranks at the last step. ``fallbacks`` counts encodings on all ranks; ``fallback_fraction`` is their share of
    the elements passed to the compressor, null if there were none.

    Args:
        settings: The run.
        rows: All ranks' rows.
    """
    if not settings.cell.hooked or not total_of(rows, "bytes_raw"):
        return {}
    times = [row["extra_ms"] for row in rows if not row["warmup"] and not row["profiled"]]
    total = {name: total_of(rows, name) for name in COUNTED}
    chosen, among, encoded = (total[f"{which}_elements"] for which in ("chosen", "sparse", "encoded"))
    norms = [row.get("residual_norm") for row in rows if row["step"] == rows[-1]["step"]]
    return {
        "extra_collectives": sum(row["extra_collectives"] for row in rows if row["rank"] == 0),
        "extra_collective_time_ms": fmean(times) if times and None not in times else None,
        "padding_bytes": total_of(rows, "bytes_padding"),
        "density": chosen / among if among else None,
        "sparsity": 1 - chosen / among if among else None,
        "residual_norm": None if None in norms else math.sqrt(fmean(norm * norm for norm in norms if norm is not None)),
        "exempt_fraction": total["exempt_elements"] / total["elements"],
        "fallbacks": total["fallbacks"],
        "fallback_fraction": total["fallback_elements"] / encoded if encoded else None,
    }


def compression_error(outcome: Outcome) -> Row:
    """Means over the sampled steps after the dense ones; null if no step was sampled."""
    steady = after_dense_steps(outcome, outcome.rows)
    sampled = {name: [row[name] for row in steady if row.get(name) is not None] for name in COLUMNS}
    return {name: fmean(values) if values else None for name, values in sampled.items()}


def private(settings: Settings, outcome: Outcome) -> Row:
    """The privacy budget spent in private training; ε is null without a guarantee.

    ``noise_multiplier`` is that of the sum over ranks; ε is computed from ``noise_multiplier_accounted``. The step in
    which a run diverged has no row but counts, because it may have changed the weights.
    """
    training, guarantee = settings.training, outcome.guarantee
    if guarantee is None:
        return {}
    spent = guarantee.spent(len(outcome.rows) + (outcome.diverged is not None))
    samples, clipped = (total_of(outcome.rows, name) for name in ("samples", "clipped_samples"))
    return {
        "epsilon": spent.epsilon,
        "delta": guarantee.delta,
        "noise_multiplier": training.dp_noise_multiplier,
        "noise_multiplier_accounted": guarantee.multiplier,
        "clipped_fraction": clipped / samples if samples else None,
        "sampling": training.dp_sampling,
        "adjacency": ADJACENCY,
        "accountant": spent.accountant,
        "epsilon_prv": spent.prv,
        "epsilon_rdp": spent.rdp,
    }


def by_op(rows: list[Row]) -> dict[str, int]:
    """Bytes of gradient reduction per collective."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["bytes_by_op"])
    return dict(total)


def parameter_traffic(settings: Settings, outcome: Outcome, rows: list[Row]) -> Row:
    """Bytes of FSDP's parameter all-gathers over all ranks and optimizer steps, in float32 and as sent.

    The framework's own gathers are float32, in closed form. Replicas gather nothing, so there are none. Muon's gathers
    of momenta are in bf16 and count in both.
    """
    raw = known_sum([row["bytes_parameters_raw"] for row in outcome.rows])  # over all ranks
    if raw is None:
        return {}
    sent = total_of(rows, "bytes_parameters") if settings.cell.param_compress != "none" else raw
    momenta = total_of(rows, "bytes_momenta")
    return {"bytes_parameters_raw_total": raw + momenta, "bytes_parameters_total": sent + momenta}


def interface_traffic(run: Run, rows: list[Row]) -> Row:
    """Bytes that the interfaces of the ranks, or of the islands, transmitted in all optimizer steps.

    Both are null without a link. The ranks of an island share an interface, which its first rank reads.
    """
    between = between_islands(run.link)
    ranks = run.world_size // run.islands if between else 1
    read = [row["bytes_interface"] for row in rows if row["rank"] % ranks == 0]
    total = known_sum(read) if read else None
    return {
        "bytes_interface_total": None if between else total,
        "bytes_interface_between_total": total if between else None,
    }


def total_of(rows: list[Row], name: str) -> Any:
    """The sum of a column."""
    return sum(row[name] for row in rows)


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


class Bytes(NamedTuple):
    """Bytes of gradient reduction over all ranks.

    Attributes:
        raw: As float32, by bandwidth-optimal collectives of the same kind.
        sent: As sent.
        closed_form: ``sent`` by its formula; None if it depends on the data.
    """

    raw: int
    sent: int
    closed_form: int | None

    @property
    def ratio(self) -> float | None:
        """``raw`` over ``sent``; None if nothing was sent."""
        return self.raw / self.sent if self.sent else None


class Gradients(NamedTuple):
    """Bytes of gradients by class of link: inside islands and between them (strategy ``hsdp``)."""

    inside: Bytes
    between: Bytes

    @property
    def both(self) -> Bytes:
        """Their sums."""
        inside, between = self
        form = known_sum([inside.closed_form, between.closed_form])
        return Bytes(inside.raw + between.raw, inside.sent + between.sent, form)


def gradients_by_link(settings: Settings, outcome: Outcome, rows: list[Row]) -> Gradients:
    """The bytes of some optimizer steps.

    A reducer counts its own. Those of the framework are closed forms that include its padding, as for other strategies.

    Args:
        settings: The run.
        outcome: Rank 0's measurements.
        rows: All ranks' rows of these steps.
    """
    steps, world = len({row["step"] for row in rows}), 1 + max((row["rank"] for row in rows), default=0)
    raw, sent = (unhooked_by_link(numel, world, settings.islands) for numel in (outcome.numel, outcome.reduced_numel))
    inside, between = (
        Bytes(steps * raw_of, steps * sent_of, steps * sent_of) for raw_of, sent_of in zip(raw, sent, strict=True)
    )
    if not settings.cell.hooked:
        return Gradients(inside, between)
    closed = known_sum([row["bytes_closed_form"] for row in rows])
    both = Bytes(total_of(rows, "bytes_raw"), total_of(rows, "bytes_sent"), closed)
    if settings.cell.inside is None:
        return Gradients(inside, both)
    parts = [Bytes(**row["inside"]) for row in rows]
    closed_inside = known_sum([part.closed_form for part in parts])
    inside = Bytes(sum(part.raw for part in parts), sum(part.sent for part in parts), closed_inside)
    form = None if closed_inside is None or both.closed_form is None else both.closed_form - closed_inside
    return Gradients(inside, Bytes(both.raw - inside.raw, both.sent - inside.sent, form))


def known_sum(values: Sequence[int | None]) -> int | None:
    """The sum; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def link_classes(settings: Settings, outcome: Outcome, rows: list[Row], parameters: Row) -> Row:
    """The record's fields by class of link; none for a strategy without islands.

    Those inside islands include FSDP's all-gathers of parameters.

    Args:
        settings: The run.
        outcome: Rank 0's measurements.
        rows: All ranks' rows.
        parameters: The record's fields of parameters.
    """
    if settings.strategy != "hsdp":
        return {}
    inside, between = gradients_by_link(settings, outcome, rows)
    later = gradients_by_link(settings, outcome, after_dense_steps(outcome, rows))
    raw, sent = (parameters[f"bytes_parameters{which}_total"] for which in ("_raw", ""))
    return {
        "bytes_inside_raw_total": inside.raw + raw,
        "bytes_inside_total": inside.sent + sent,
        "bytes_inside_closed_form_total": known_sum([inside.closed_form, sent]),
        "bytes_between_raw_total": between.raw,
        "bytes_between_total": between.sent,
        "bytes_between_closed_form_total": between.closed_form,
        "compression_ratio_between": between.ratio,
        "compression_ratio_between_steady": later.between.ratio,
    }
