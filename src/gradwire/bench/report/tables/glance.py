"""An experiment at a glance: a line for each method with a verdict, the one claim that seeds support, and the doubts.

A perplexity is compared with that of the same optimizer in every step, so what a change of the optimizer gains is not
called a gain of compression: how the optimizers compare is a sentence apart.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from gradwire.base.errors import BadInput, listed
from gradwire.base.files import read_json
from gradwire.base.units import UNSHAPED, amount, spoken
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import ADAMW, BF16, Result
from gradwire.bench.report.tables.cells import (
    ALL_BYTES_HINT,
    BAD,
    COMPRESSOR,
    METHOD,
    STEP,
    WORSE,
    WORSE_FORM,
    by_method,
    over_links,
    spread_text,
)
from gradwire.bench.report.tables.quality import perplexities
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import MISSING, Column, Table, number, text
from gradwire.bench.statistics.seeds import percent_worse, percents
from gradwire.comm.topology import between_islands, link_rate

COMPRESSES = 1.01  # gradient bytes: a control such as `exchange` sends as many as the baseline
FASTER = 1.05  # a smaller speed-up is called none
NAMED = 4  # names in a sentence
WIDTH, HEIGHT = 80, 24  # of a terminal
NAMES = {ADAMW: "AdamW", "muon": "Muon", "sgd": "SGD"}
BYTES = Column("fewer bytes", "saved", "{:.1f}", " ×", hint=ALL_BYTES_HINT)
PERPLEXITY = WORSE.titled("perplexity", form=WORSE_FORM, mark="ends")
VERDICT = text("verdict", "verdict")
SHORT_BYTES, SHORT_PERPLEXITY = (
    BYTES.titled("bytes", form="÷ {:.1f}", unit=""),
    PERPLEXITY.titled("perplexity, %", unit=""),
)
PATHS = {"all tables": "summary.md", "page": "report.html"}
FIELDS = ("saved", "compression_ratio", "worse_percent", "ends", "reference", "verdict")


class Lost(NamedTuple):
    """Runs without a result that ended alike."""

    status: str
    reason: str
    runs: list[str]

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}: {listed(self.runs, NAMED)}"


def lost(rows: Iterable[Result], *statuses: str) -> list[Lost]:
    """The runs of these statuses, by their reason."""
    runs: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status in statuses:
            runs[row.status, row.reason or "no reason was given"].append(row.run_name)
    return [Lost(*key, names) for key, names in runs.items()]


def lines(results: Results) -> pd.DataFrame:
    """A line for each method, strategy and world size above 1, also of those without a result; see `by_method`."""
    cells = results.cells
    known = pd.DataFrame(columns=[*METHOD, *FIELDS]) if cells is None else by_method(cells[cells["world_size"] > 1])
    present = {*known[METHOD].itertuples(index=False, name=None)}
    ended = {
        (row.strategy, row.world_size, row.compressor): status
        for status in ("failed", "diverged")
        for row in results.rows
        if row.world_size > 1 and row.status == status
    }
    without = [[*key, status] for key, status in ended.items() if key not in present]
    made = pd.concat([known, pd.DataFrame(without, columns=[*METHOD, "verdict"])], ignore_index=True)
    return made.fillna({"reference": MISSING, "ends": ""}).sort_values(METHOD[:2], kind="stable", ignore_index=True)


def links(results: Results) -> list[str]:
    """The links on which several ranks were timed, the fastest first."""
    named = {row.link for row in results.ok if row.world_size > 1 and row.step_time_ms_mean is not None}
    return sorted(named, key=link_rate, reverse=True)


def glance(results: Results) -> Table:
    """The table: bytes, perplexity, the step on each link, and the verdict."""
    made = lines(results)
    places = made[METHOD[:2]].astype({"world_size": "str"}).assign(world_size=lambda of: "W = " + of["world_size"])
    several = [name for name in places if places[name].nunique() > 1]
    made["place"] = [" ".join(["", *of]) for of in places[several].itertuples(index=False)]
    steps = over_links([STEP], links(results), "at {link}")
    columns = [COMPRESSOR.titled("method", mark="place"), BYTES, PERPLEXITY, *steps, VERDICT]
    fails = made["verdict"].isin(BAD).tolist()
    table = Table.of("glance", "Each method at a glance", made.to_dict("records"), columns)
    return replace(table, fails=fails)


class Answer(NamedTuple):
    """The answer to the experiment's question.

    Attributes:
        claim: What several seeds support; empty if they support nothing.
        rest: What else is known of that method, or why there is no claim.
    """

    claim: str
    rest: str

    def __str__(self) -> str:
        return f"{', '.join(part for part in self if part)}."


def answer(results: Results) -> Answer:
    """The savings of the best method that has the baseline's optimizer and keeps the perplexity.

    The best is the fastest on its slowest link, of those that several seeds show to be faster; else that of the fewest
    bytes.
    """
    made = lines(results)
    compressing = made[(made["compression_ratio"].fillna(math.inf) > COMPRESSES) & (made["compressor"] != BASELINE)]
    kept = compressing[compressing["verdict"].isin(("same", "better")) & (compressing["reference"] == BASELINE)]
    if kept.empty:
        counts = compressing["verdict"].value_counts().items()
        words = ", ".join(f"{count} {'with ' * (word == 'one seed')}{word}" for word, count in counts)
        return Answer("", f"No method is shown to keep the perplexity: {words}" if words else "No method was compared")
    speeds = [speed(line, links(results), results.shared) for line in kept.to_dict("records")]
    best = max(range(len(kept)), key=lambda i: (speeds[i].gain if speeds[i].shown else 0, kept["saved"].iloc[i]))
    line, of = kept.iloc[best], speeds[best]
    where = f" under {line['strategy']}" * (made["strategy"].nunique() > 1)
    word = "same" if line["verdict"] == "same" else "better"
    saved = f"{line['compressor']}{where}: {line['saved']:.1f} times fewer bytes, {word} perplexity"
    return Answer(f"{saved}, {of.text}", "") if of.shown else Answer(saved, of.text)


class Speed(NamedTuple):
    """How many times faster than the baseline, in words, and whether several seeds show that it is faster."""

    gain: float
    text: str
    shown: bool


def speed(line: Mapping[Any, Any], of_links: Sequence[str], shared: bool) -> Speed:
    """The speed of a method on the slowest link on which it was timed with the baseline."""
    timed = [link for link in of_links if line[f"{link} speed_up_n"] > 0]
    if not timed:
        return Speed(0, "not timed with the baseline", False)
    gain, low, n = (line[f"{timed[-1]} speed_up{part}"] for part in ("", "_low", "_n"))
    faster = gain >= FASTER
    pace = f"{gain:.1f} times faster" if faster else "no faster"
    doubts = ["one seed"] * (n < 2) + ["seeds spread too far"] * (faster and low <= 1) + ["times shared"] * shared
    doubt = f" ({', '.join(doubts)})" if doubts else ""
    return Speed(gain, f"{pace} {place(timed[-1])}{doubt}", faster and not doubts)


def place(link: str) -> str:
    """Where a step was timed: ``at 20 Mbit/s``."""
    if link == UNSHAPED:
        return "without a slow link"
    return f"at {spoken(link.rpartition('-')[2])}" + (" between islands" if between_islands(link) else "")


def doubts(results: Results) -> str:
    """The conclusions that the runs do not support, and why; empty if there are none."""
    made, unshown = lines(results), []
    for word, why in (
        ("not distinguishable", "seeds spread too far"),
        ("one seed", "one seed"),
        ("not compared", "no seed has it and that of its optimizer in every step"),
    ):
        alike = made.groupby("compressor")["verdict"].nunique() == 1  # under every strategy
        those = made[made["verdict"] == word]
        names = [
            label if alike[label] else f"{label} under {strategy}"
            for label, strategy in zip(those["compressor"], those["strategy"], strict=True)
        ]
        if names:
            unshown.append(f"the perplexity of {listed([*dict.fromkeys(names)], NAMED)} ({why})")
    if once := [place(link) for link in links(results) if (made[f"{link} n"].dropna() < 2).all()]:
        unshown.append(f"the step {', '.join(once)} (one seed)")
    if results.shared:
        unshown.append("step times (other runs may have used the machine)")
    return f"Not shown: {'; '.join(unshown)}." if unshown else ""


def of_optimizers(results: Results) -> list[str]:
    """A sentence for each optimizer but the baseline's: how it compares when it averages every step's gradients.

    It is of the strategy and world size with the most seeds.
    """
    runs = {(*key[:2], of.reference): of for key, of in results.judged.items() if of.reference == key[2]}
    sentences: dict[str, tuple[int, str]] = {}
    for (strategy, world_size, label), of in runs.items():
        base = runs.get((strategy, world_size, BASELINE))
        if base is None or label == BASELINE or world_size == 1:
            continue
        worse = percents([[*percent_worse(perplexities(of.runs), perplexities(base.runs)).values()]])[0]
        optimizer, usual = (next(iter(each.runs.values())).inner for each in (of, base))
        if worse.n > sentences.get(optimizer, (0, ""))[0]:
            ends = spread_text(worse, PERPLEXITY.form) or " (one seed)"
            sentence = (
                f"{NAMES[optimizer]} instead of {NAMES[usual]} in every step, without compression ({label}, "
                f"{strategy}, {world_size} ranks): perplexity {number(worse.mean, PERPLEXITY.form)} %{ends}."
            )
            sentences[optimizer] = worse.n, sentence
    return [sentence for _, sentence in sentences.values()]


def question(results: Results) -> str:
    """The experiment's question: that of its configuration, else one made of what it compares."""
    try:
        given = read_json(results.results_dir / "config.json").get("question")
    except (BadInput, AttributeError):
        given = None
    if given:
        return str(given)
    cells = results.cells
    compress = (
        None
        if cells is None
        else cells[(cells["compression_ratio"] > COMPRESSES) & ~cells["compressor"].isin((BASELINE, BF16))]
    )
    labels = [] if compress is None else [*dict.fromkeys(compress["compressor"])]
    if not labels:
        return results.results_dir.resolve().name
    *others, last = labels
    names = (
        f"{len(labels)} compressors" if len(labels) > NAMED else " and ".join([", ".join(others), last][not others :])
    )
    return f"What {'do' if others else 'does'} {names} save, and at what cost?"


def size(results: Results) -> str:
    """How the runs ended, and the numbers of seeds and ranks."""
    ended = Counter(row.status for row in results.rows)
    left_out = ended.pop("skipped", 0)
    runs, bad = ended.total(), [f"{ended[status]} {status}" for status in ("failed", "diverged") if ended[status]]
    succeeded = f"all {runs} runs succeeded" if runs > 1 else "the run succeeded"
    outcome = [succeeded] if runs and not bad else [amount(runs, "run"), *bad]
    seeds, worlds = ({getattr(row, name) for row in results.rows} for name in ("seed", "world_size"))
    counts = [amount(len(seeds), "seed"), amount(max(worlds), "rank")]
    return ", ".join([*outcome, *[f"{left_out} left out"] * bool(left_out), *counts])


def terminal(results: Results) -> str:
    """The experiment on one screen: what failed, the question, the answer, the table, what is not shown, the paths."""
    head = f"{question(results)} ({size(results)})"
    ended = lost(results.rows, "failed", "diverged")
    failed = [wrapped(str(of), 2) for of in ended[:2]] + [f"and {amount(len(ended) - 2, 'more reason')}"] * (
        len(ended) > 2
    )
    above = ["\n".join(failed)] * bool(failed) + [f"{wrapped(head, 2)}\n{wrapped(str(answer(results)), 2)}"]
    paths = [f"{name}: {results.results_dir / file}" for name, file in PATHS.items()]
    unshown = doubts(results)
    below = [*([wrapped(unshown, 3)] if unshown else []), "\n".join(paths)]
    free = HEIGHT - "\n\n".join([*above, *below]).count("\n") - 3  # with an empty line, and one for the prompt
    table = [screen(results, free)] if len(lines(results)) else []  # no line for one rank alone
    return "\n\n".join([*above, *table, *below])


def wrapped(text: str, lines: int) -> str:
    """A text as a few lines of a terminal."""
    return "\n".join(textwrap.wrap(text, WIDTH, max_lines=lines, placeholder=" …", break_on_hyphens=False))


def screen(results: Results, height: int) -> str:
    """The table for a terminal: a heading for each strategy and world size, and as many links and lines as fit."""
    made, of_links = lines(results), links(results)
    groups = [(key, of.to_dict("records")) for key, of in made.groupby(METHOD[:2], sort=False)]
    sizes = [len(of) for _, of in groups]
    fitting = [m for m in range(1, len(made) + 1) if sum(1 + min(n, m) + (n > m) for n in sizes) < height]
    most = max(fitting, default=1)
    while True:
        steps = over_links([replace(STEP, form="{:,.0f}")], of_links, "{link}")
        columns = [SHORT_BYTES, SHORT_PERPLEXITY, *steps, VERDICT]
        rows = [["method", *(column.title for column in columns)]]
        for (strategy, world), of in groups:
            rows.append([f"{strategy}, W = {world}", *[""] * len(columns)])
            for line in of[:most]:
                entries = [column.entry(line).text.replace(" … ", "…") for column in columns]
                rows.append([f"  {line['compressor']}", *entries])
            if len(of) > most:
                rows.append([f"  and {len(of) - most} more", *[""] * len(columns)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if len(of_links) < 2 or sum(widths) + 2 * len(columns) <= WIDTH:
            break
        del of_links[len(of_links) > 2]  # the fastest of those that are shaped, at last the unshaped
    widths[0] -= max(sum(widths) + 2 * len(columns) - WIDTH, 0)
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(f"<{'>' * (len(columns) - 1)}<", widths, strict=True))
    return "\n".join(form.format(name[: widths[0]], *entries).rstrip() for name, *entries in rows)
