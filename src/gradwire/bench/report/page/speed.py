"""Where a step's time goes: one bar per compressor, in parts that add up to the profiled step."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from gradwire.bench.report.page.style import COLOURS, NEUTRAL, PAPER, WIDTH, Plot, axes, group_title, legend
from gradwire.bench.report.tables.cells import Group

PARTS = ("compute", "overlapped communication", "exposed communication", "encode", "decode", "parameter codec", "idle")
LOOKS = dict(zip(PARTS, [COLOURS[2], COLOURS[5], COLOURS[0], COLOURS[1], COLOURS[4], COLOURS[3], NEUTRAL], strict=True))
FILLS = dict(zip(PARTS, ["", "---", "///", "\\\\\\", "xxx", "+++", ""], strict=True))


def parts(profile: Mapping[str, float]) -> dict[str, float]:
    """The parts of a ``profile.json``'s mean step in milliseconds.

    Computation during communication counts as overlapped communication, so the parts add up to the step.
    """
    overlap = profile["overlap_ms_per_step"]
    found = [
        profile["compute_ms_per_step"] - overlap,
        overlap,
        profile["exposed_comm_ms"],
        profile["encode_ms_per_step"],
        profile["decode_ms_per_step"],
        profile["parameter_codec_ms_per_step"],
        profile["idle_ms_per_step"],
    ]
    return dict(zip(PARTS, found, strict=True))


def draw(group: Group, times: pd.DataFrame) -> Plot:
    """One group.

    Args:
        group: The group.
        times: Mean milliseconds, a column for each of `PARTS`, by label; the first is drawn at the top.
    """
    longest = max(len(str(label)) for label in times.index)
    figure, ax = axes(
        group_title(*group),
        "ms of the mean profiled step",
        "",
        height=0.27 * len(times),
        left=min(0.25 + 0.075 * longest, WIDTH / 2),
    )
    ax.grid(visible=False, axis="y")
    left = pd.Series(0.0, times.index)
    tips: dict[str, str] = {}
    handles, shown = [], []
    for number, part in enumerate(PARTS):
        values = times[part]
        if not (values > 0).any():
            continue
        bars = ax.barh(
            range(len(times)), values, 0.7, left, color=LOOKS[part], edgecolor=PAPER, hatch=FILLS[part], lw=0.5
        )
        for bar, (label, value) in zip(bars, values.items(), strict=True):
            bar.set_gid(f"bar{number}-{len(tips)}")
            tips[str(bar.get_gid())] = f"{label}: {part} {value:,.1f} ms"
        handles.append(bars)
        shown.append(part)
        left = left + values
    ax.set_yticks(range(len(times)), [str(label) for label in times.index])
    ax.set_ylim(len(times) - 0.5, -0.5)
    legend(figure, handles, shown)
    alt = f"Where a step's time goes, {group_title(*group)}: " + "; ".join(
        f"{label} {total:,.0f} ms" for label, total in left.items()
    )
    return Plot(f"step-time-{group.slug}", alt, figure, tips)
