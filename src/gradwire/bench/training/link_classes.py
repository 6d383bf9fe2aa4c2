"""Bytes of gradients by class of link: inside islands and between them (strategy ``hsdp``)."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.bench.training.outcome import Outcome, Row
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel


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
    """Bytes of gradients by class of link."""

    inside: Bytes
    between: Bytes

    @property
    def both(self) -> Bytes:
        """Their sums."""
        forms = [each.closed_form for each in self]
        return Bytes(sum(each.raw for each in self), sum(each.sent for each in self), known_sum(forms))


def gradients(settings: Settings, outcome: Outcome, rows: list[Row]) -> Gradients:
    """The bytes of some optimizer steps.

    A reducer counts its own. Those of the framework are closed forms that include its padding, as for other strategies.

    Args:
        settings: The run.
        outcome: Rank 0's measurements.
        rows: All ranks' rows of these steps.
    """
    steps, world = len({row["step"] for row in rows}), 1 + max((row["rank"] for row in rows), default=0)
    raw, sent = (
        parallel.unhooked_by_link(numel, world, settings.islands) for numel in (outcome.numel, outcome.reduced_numel)
    )
    inside, between = (Bytes(steps * one, steps * two, steps * two) for one, two in zip(raw, sent, strict=True))
    if not settings.cell.hooked:
        return Gradients(inside, between)
    ranks = world // settings.islands
    if settings.cell.inside is not None:  # a closed form is over one island's ranks: take it from its first rank
        own = [(row["rank"] % ranks == 0, Bytes(**row["inside"])) for row in rows]
        inside = Bytes(
            sum(each.raw for _, each in own),
            sum(each.sent for _, each in own),
            known_sum([each.closed_form for first, each in own if first]),
        )
    both = Bytes(
        sum(row["bytes_raw"] for row in rows),
        sum(row["bytes_sent"] for row in rows),
        known_sum([row["bytes_closed_form"] for row in rows if row["rank"] < ranks]),  # of every shard
    )
    return Gradients(inside, difference(both, inside, rows, ranks) if settings.cell.inside is not None else both)


def difference(both: Bytes, inside: Bytes, rows: list[Row], ranks: int) -> Bytes:
    """What a reducer on two levels sent between islands."""
    forms = [row["inside"]["closed_form"] for row in rows if row["rank"] < ranks]
    part = known_sum(forms)
    form = None if part is None or both.closed_form is None else both.closed_form - part
    return Bytes(both.raw - inside.raw, both.sent - inside.sent, form)


def known_sum(values: list[int | None]) -> int | None:
    """The sum; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def fields(settings: Settings, outcome: Outcome, rows: list[Row], parameters: Row) -> Row:
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
    inside, between = gradients(settings, outcome, rows)
    later = gradients(settings, outcome, [row for row in rows if row["step"] >= outcome.dense_steps])
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
