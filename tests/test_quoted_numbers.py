"""Each number of README's comparison, docs/findings.md and docs/explanation/scale.md is that of a record or a table.

`readme`, `quality`, `links`, `sharded` and `scale` list the pages' phrases. A phrase has a placeholder for each of its
numbers, and a source for each placeholder: `perplexity` and `field` read records, `cell` a table, and `scale` what the
simulated cluster assumes and writes. Every phrase with its numbers must be in the page, and apart from the phrases the
page has no number. `NAMES` are digits that measure nothing.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pytest
from scipy.stats import spearmanr

from gradwire.bench.statistics.description import CELLS
from gradwire.bench.statistics.seeds import TOLERANCE

ROOT = Path(__file__).parents[1]
NAMES = re.compile(
    r"GPT-2|FSDP2|float32|bf16|int8|x86-64|1-bit Adam|[48][ -]bits?|4-bit|8 and 4 bits|perplexity of 40"
    r"|\d+ [MG]bit/s|5th step|`beta2` of 0\.999"
    r"|7 billion|arXiv:[\d.]+, 2025|table 4|H[12]00"
)
NUMBER = re.compile(r"\d[\d.,]*|\b(one|two|three|four|five) seeds?\b")
WORDS = ("no seeds", "one seed", "two seeds", "three seeds", "four seeds")


# Sources


@cache
def records(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def runs(name: str, label: str, ranks: int) -> dict[int, dict[str, Any]]:
    """The records of a label by seed."""
    return {
        record["seed"]: record
        for record in records(name)
        if record["compressor"] == label and record["world_size"] == ranks
    }


def field(key: str, label: str, name: str = "quality", ranks: int = 2) -> float:
    """A field of a label's first run."""
    records_by_seed = runs(name, label, ranks)
    return records_by_seed[min(records_by_seed)][key]


def perplexity(label: str, name: str = "quality", ranks: int = 2) -> dict[int, float]:
    """Perplexity by seed."""
    return {seed: record["val_ppl"] for seed, record in runs(name, label, ranks).items()}


def by_seed(measured: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Percent above the run of ``base`` with the same seed."""
    seeds = sorted(measured.keys() & base.keys())
    assert seeds, "no seed in common"
    return [100 * (measured[seed] / base[seed] - 1) for seed in seeds]


def above(measured: Mapping[int, float], base: Mapping[int, float]) -> float:
    """Percent above ``base``: the mean of the logarithms of the seeds' ratios."""
    return 100 * (exp(mean(log(1 + percent / 100) for percent in by_seed(measured, base))) - 1)


def below(measured: Mapping[int, float], base: Mapping[int, float]) -> float:
    return -above(measured, base)


def seeds(measured: Mapping[int, float], base: Mapping[int, float]) -> str:
    return WORDS[len(by_seed(measured, base))]


def correlation(here: str, there: str, labels: Sequence[str]) -> float:
    """The rank correlation of the labels' differences from `none`."""
    orders = [[above(perplexity(label, name), perplexity("none", name)) for label in labels] for name in (here, there)]
    return float(spearmanr(*orders).statistic)


@cache
def rows(page: str) -> list[dict[str, str]]:
    """The rows of a page's tables, with their section; the name of a repeated column follows that of the one before."""
    table: list[dict[str, str]] = []
    headers: list[str] = []
    section = ""
    for line in (ROOT / "benchmarks" / page).read_text(encoding="utf-8").splitlines():
        section = line.lstrip("# ") if line.startswith("#") else section
        fields = [each.strip() for each in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not fields:
            headers = []
        elif not headers:
            headers = [
                f"{before}, {name}" if fields.count(name) > 1 else name
                for before, name in zip(["", *fields], fields, strict=False)
            ]
        elif not set(line) <= set("|:- "):
            table.append({"section": section, **dict(zip(headers, fields, strict=True))})
    return table


def cells(page: str, column: str, *row: str) -> list[float]:
    """The numbers of a field; ``row`` has what only its row has: its section, fields, or fields as COLUMN=FIELD."""
    named = [(each, {*each.values(), *map("=".join, each.items())}) for each in rows(page) if column in each]
    (text,) = [each[column] for each, names in named if names.issuperset(row)]
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d.,]*\d|-?\d", text.replace("−", "-"))]


def cell(page: str, column: str, *row: str) -> float:
    """The first number of a field."""
    return cells(page, column, *row)[0]


def speed(method: str, link: str) -> float:
    """A step's speed over that of float32 on a link."""
    return cell("peers.md", f"{link}: ms, × float32", method)


# Phrases


class Quote(NamedTuple):
    """A phrase of a page, and the numbers of its placeholders."""

    phrase: str
    numbers: tuple[float | str, ...]

    def __str__(self) -> str:
        return re.sub(r"[+-](0\.0+)(?!\d)", r"\1", self.phrase.format(*self.numbers))


def quote(phrase: str, *numbers: float | str) -> Quote:
    return Quote(phrase, numbers)


def difference(measured: Mapping[int, float], base: Mapping[int, float]) -> tuple[float, float, float]:
    """Percent above ``base``: the mean and the range of the seeds."""
    each = by_seed(measured, base)
    return above(measured, base), min(each), max(each)


def speeds(method: str) -> tuple[float, float]:
    """The last two columns of README's table."""
    return speed(method, "20 Mbit/s"), speed(method, "1 Gbit/s")


def readme() -> list[Quote]:
    """The comparison of README."""
    adamw, muon, rounds = perplexity("none"), perplexity("muon"), perplexity("muon-5-onebit")
    grown = ("muon-grow-onebit-replay", "many-ranks-long", 8)

    def row(method: str, label: str, timed: str, *more: float) -> Quote:
        measured = difference(perplexity(label), adamw)
        last = "| {:+.1f} % ({:+.1f} … {:+.1f}) | {:.2f} × | {:.2f} × |"
        return quote(f"| {method} {last}", field("compression_ratio", label), *more, *measured, *speeds(timed))

    return [
        row("`bf16`, native | {:.1f} ×", "bf16-native", "bf16, algorithm native"),
        row("`int8` | {:.1f} ×", "int8", "int8"),
        row("`int8`, 4 bits | {:.1f} ×", "int4", "int8, 4 bits"),
        row(
            "`gw.OneBitAdam` | {:.1f} ×, {:.1f} × after its warm-up",
            "onebit_adam",
            "OneBitAdam",
            field("compression_ratio_steady", "onebit_adam"),
        ),
        row("`gw.DiLoCo`, one bit in every 5th step | {:.0f} ×", "diloco-5-onebit", "DiLoCo onebit, H = 5"),
        quote("GPT-2 with {:.1f} M parameters", field("parameters", "none") / 1e6),
        quote("after {} steps", field("steps", "none")),
        quote("the mean of {} (bf16: {})", seeds(rounds, muon), seeds(perplexity("bf16-native"), adamw)),
        quote("Muon in every step ends {:.1f} % below AdamW", below(muon, adamw)),
        quote(
            "Muon inside sends {:.0f} times fewer bytes and ends {:.1f} % ({:.1f} … {:.1f}) above",
            field("compression_ratio", "muon-5-onebit"),
            *difference(rounds, muon),
        ),
        quote(
            "{:.0f} times fewer cost [{:.1f} %] of Muon's own perplexity",
            field("compression_ratio", *grown),
            above(perplexity(*grown), perplexity("muon", *grown[1:])),
        ),
    ]


METHODS = ("muon", "muon-5-onebit", "int4", "diloco-5-onebit", "onebit_adam")


def quality() -> list[Quote]:
    """The first finding."""
    adamw, muon = perplexity("none"), perplexity("muon")
    int8, int4, onebit_adam = (by_seed(perplexity(label), adamw) for label in ("int8", "int4", "onebit_adam"))
    usual = [above(perplexity(label), adamw) for label in ("topk-ef", "signsgd-ef", "powersgd")]
    small, llama_small = "quality-small", "quality-llama-small"
    sizes = (*METHODS, "topk-ef")
    replay = ("many-ranks-local", 8)
    many, long = ("many-ranks", 8), ("many-ranks-long", 8)
    rounds = by_seed(perplexity("muon-5-onebit-replay", *many), perplexity("muon", *many))
    topk = by_seed(perplexity("muon-topk-0.14", *many), perplexity("muon", *many))
    grown = perplexity("muon-grow-onebit-replay", *long), perplexity("muon", *long)
    large = [("none", "diloco-5-onebit", name) for name in ("vocabulary", small, llama_small)]
    vocabulary = [above(perplexity(label, name), perplexity(base, name)) for base, label, name in large]
    memory = [below(perplexity("none-beta2", name), perplexity("none", name)) for *_, name in large]
    frozen = [
        above(perplexity("onebit_adam", name), perplexity("none", name))
        for name in ("quality", "quality-llama", small, llama_small)
    ]
    return [
        quote("A GPT-2 model with {:.1f} M parameters", field("parameters", "none") / 1e6),
        quote("after {} steps", field("steps", "none")),
        quote("the band is {:.0f} %", TOLERANCE),
        quote(
            "DDP on two ranks, {} (bf16: {}),",
            seeds(perplexity("muon-5-onebit"), muon),
            seeds(perplexity("bf16-native"), adamw),
        ),
        quote(
            "send {:.1f} and {:.1f} times fewer bytes",
            field("compression_ratio", "int8"),
            field("compression_ratio", "int4"),
        ),
        quote("end within {:.2f} % and {:.1f} %", max(map(abs, int8)), max(map(abs, int4))),
        quote(
            "sends {:.1f} times fewer after its warm-up and ends between {:.1f} % below and {:.1f} % above",
            field("compression_ratio_steady", "onebit_adam"),
            -min(onebit_adam),
            max(onebit_adam),
        ),
        quote(
            "error feedback end {:.0f} to {:.0f} % above ({})",
            min(usual),
            max(usual),
            seeds(perplexity("powersgd"), adamw),
        ),
        quote(
            "send {:.1f} times fewer: {:.1f} % above with AdamW inside, {:.1f} % with Muon",
            field("compression_ratio", "diloco-5-onebit"),
            above(perplexity("diloco-5-onebit"), adamw),
            above(perplexity("muon-5-onebit"), muon),
        ),
        quote("Means over {}", seeds(perplexity("diloco-5-onebit"), adamw)),
        quote("Muon in every step ends {:.1f} % below AdamW", below(muon, adamw)),
        quote(
            "another text (rank correlation {:.2f}, {})",
            correlation("quality-llama", "quality", (*METHODS, "diloco-10-onebit", "sparseloco")),
            seeds(perplexity("muon", "quality-llama"), perplexity("none", "quality-llama")),
        ),
        quote(
            "eight times as large ({:.2f}, {})",
            correlation(small, "quality", sizes),
            seeds(perplexity("muon", small), perplexity("none", small)),
        ),
        quote(
            "a Llama of that size ({:.2f}, {})",
            correlation(llama_small, "quality", sizes),
            seeds(perplexity("muon", llama_small), perplexity("none", llama_small)),
        ),
        quote(
            "end {:.0f} % above with AdamW and {:.0f} % with Muon ({})",
            above(perplexity("diloco-5-onebit", "ranks", 8), perplexity("none", "ranks", 8)),
            above(perplexity("muon-5-onebit", "ranks", 8), perplexity("muon", "ranks", 8)),
            seeds(perplexity("muon-5-onebit", "ranks", 8), perplexity("muon", "ranks", 8)),
        ),
        quote(
            "which send {:.0f} times fewer bytes, {:.0f} % and {:.0f} % ({})",
            field("compression_ratio", "muon-5-onebit-replay", *replay),
            above(perplexity("diloco-5-onebit-replay", *replay), adamw),
            above(perplexity("muon-5-onebit-replay", *replay), muon),
            seeds(perplexity("muon-5-onebit-replay", *replay), muon),
        ),
        quote("Muon's end {:.0f} and {:.0f} % above early in training ({})", *rounds, WORDS[len(rounds)]),
        quote(
            "and {:.1f} % below later ({})",
            below(perplexity("muon-5-onebit-replay", *long), grown[1]),
            seeds(perplexity("muon-5-onebit-replay", *long), grown[1]),
        ),
        quote(
            "send {:.0f} times fewer bytes and end {:.1f} % above ({})",
            field("compression_ratio", "muon-grow-onebit-replay", *long),
            above(*grown),
            seeds(*grown),
        ),
        quote(
            "sends {:.0f} times fewer bytes and ends {:.0f} and {:.0f} % above ({})",
            field("compression_ratio", "muon-topk-0.14", *many),
            *topk,
            WORDS[len(topk)],
        ),
        quote("local updates of AdamW end {:.0f} to {:.0f} % above", min(vocabulary), max(vocabulary)),
        quote("float32 itself ends {:.0f} to {:.0f} % lower", min(memory), max(memory)),
        quote("between {:.1f} % below and {:.1f} % above", -min(frozen), max(frozen)),
    ]


def links() -> list[Quote]:
    """The second finding."""
    million = "8 million parameters, 1 Gbit/s"
    again = cells("peers.md", "1 Gbit/s: ms, × float32", "float32 again")
    once, everywhere = "muon-10-onebit", "diloco-10-onebit"
    return [
        quote(
            "is {:.1f} times faster with 8 bits, {:.1f} times with 1-bit Adam, and {:.1f} times with five local steps",
            *(speed(method, "100 Mbit/s") for method in ("int8", "OneBitAdam", "DiLoCo onebit, H = 5")),
        ),
        quote(
            "8 bits and 1-bit Adam have {:.2f} and {:.2f} times float32's speed, where float32 again has"
            " {:.2f} to {:.2f}",
            speed("int8", "1 Gbit/s"),
            speed("OneBitAdam", "1 Gbit/s"),
            *again[1:],
        ),
        quote(
            "with eight million parameters they had {:.2f} and {:.2f}",
            cell("overlap.md", "× float32", million, "int8", "overlapped"),
            cell("overlap.md", "× float32", million, "onebit_adam", "overlapped"),
        ),
        quote("8 bits have {:.2f} of float32's speed", cell("peers.md", "no link: ms, × float32", "int8")),
        quote(
            "{:.0f} times sooner than Muon with 4 bits in every step",
            cell("time-to-loss.md", "bf16-native, s", "2mbit", "muon-int4")
            / cell("time-to-loss.md", "bf16-native, s", "2mbit", once),
        ),
        quote(
            "{:.0f} times sooner than bf16 in every step",
            cell("time-to-loss.md", "40, s", "2mbit", "bf16-native")
            / cell("time-to-loss.md", "40, s", "2mbit", everywhere),
        ),
    ]


def sharded() -> list[Quote]:
    """The third finding, and the bytes at the interfaces."""
    both = ("gradients=`int8`", "parameters=`int8`")
    four = ("gradients=`int8`, 4 bits", "parameters=`int4-diff`")
    with_feedback = ("`int8`, 4 bits, error feedback", "`int4-diff`")
    islands, cables = "perplexity, seeds 0 to 3", "× faster than flat `none`"
    bits, rounds = "`int8`, 4 bits, block 64, error feedback", "`diloco`, H = 5, `onebit`"
    muon = {
        name: dict(enumerate(cells("fsdp.md", islands, name)))
        for name in (f"{rounds}, Muon inside", "Muon in float32 (seed 0)")
    }
    unexplained = [
        abs(float(each["rest"].removesuffix(" %"))) for each in rows("links.md") if each["link"] == "100mbit"
    ]
    return [
        quote(
            "reduce its bytes {:.1f} times and make a step at 100 Mbit/s {:.1f} times faster",
            cell("fsdp.md", "fewer in all", *both),
            cell("fsdp.md", "× faster", *both),
        ),
        quote(
            "reduce them {:.1f} times and make it {:.1f} times faster; with error feedback perplexity ends {:.1f} %",
            cell("fsdp.md", "fewer in all", *four),
            cell("fsdp.md", "× faster", *four),
            cell("fsdp.md", "against float32", *with_feedback),
        ),
        quote(
            "make a step {:.1f} times faster at float32's perplexity ({:.2f} % above)",
            cell("fsdp.md", cables, bits),
            cell("fsdp.md", "against float32", bits),
        ),
        quote(
            "local updates {:.1f} times, {:.0f} % above AdamW with AdamW inside and {:.1f} % above Muon with Muon ({})",
            cell("fsdp.md", cables, rounds),
            cell("fsdp.md", "against float32", f"{rounds}, AdamW inside"),
            above(*muon.values()),
            seeds(*muon.values()),
        ),
        quote("within {:.1f} % ([links])", max(unexplained)),
    ]


def scale() -> list[Quote]:
    """The simulated cluster: what its file has, and what it assumes."""
    sys.path.append(str(ROOT / "benchmarks"))
    here = importlib.import_module("scale")
    made = json.loads((ROOT / "benchmarks/scale.json").read_text(encoding="utf-8"))
    ratios = sorted(
        made["needed"][number][place] / float(row[level])
        for number, row in enumerate(here.PUBLISHED)
        for place, level in enumerate(here.LEVELS)
    )
    off = [abs(run["simulated"] / run["recorded"] - 1) for run in made["losses"].values()]
    late = [100 * (made["stragglers"][steps] - 1) for steps in ("1", "30")]

    def errors(source: str) -> Quote:
        cells, *simulated = made["errors"][source]
        return quote(f"| {source} | {{}} | {{:.0f}} % | {{:.0f}} % |", cells, *(100 * error for error in simulated))

    def goodputs(place: str) -> list[float]:
        kinds = ("rounds", "checkpoints")
        return [100 * made["goodput"][f"{kind}: {place}"][here.HOURS.index(100)] for kind in kinds]

    return [
        *(errors(source) for source in made["errors"]),
        quote("end within {:.0f} % of their recorded time", 100 * max(off)),
        quote("is within {:.0f} % of the fastest", 100 * (here.CLOSE - 1)),
        quote("is (at most {} steps in a round)", max(CELLS[label]["H"] for label in here.ROUNDS)),
        quote("of {:,} machines the slowest takes {:.0f} % longer", here.RANKS[-1], late[0]),
        quote("and {:.0f} % over {} steps", late[1], 30),
        quote(
            "between {:.1f} and {:.1f} times theirs, {:.2f} times in the median",
            *ratios[:: len(ratios) - 1],
            median(ratios),
        ),
        quote("in {} hours, {} machines", 100, here.PLACES["512 machines, 10 Gbit/s"][0]),
        quote(
            "keep {:.0f} % of their computation in rounds, and {:.0f} % from checkpoints",
            *goodputs("512 machines, 10 Gbit/s"),
        ),
        quote(
            "{} sites keep {:.0f} and {:.0f} %",
            here.PLACES["64 sites, 500 Mbit/s"][0],
            *goodputs("64 sites, 500 Mbit/s"),
        ),
        quote(
            "{:.0f} GB takes {:.0f} minutes",
            here.STATE * here.SEVEN.numel / 1e9,
            8 * here.STATE * here.SEVEN.numel / 500e6 / 60,
        ),
        quote("An H100 at {:.0f} % of its bf16 peak computes {:,} tokens", 100 * here.FLOPS / 989e12, here.TOKENS),
        quote("latency of {:.0f} ms, faster ones {:.0f} µs", 1e3 * here.SITE, 1e6 * here.RACK),
        quote("has {} Tbit/s and {:.0f} µs", here.NVLINK.removesuffix("tbit"), 1e6 * here.INSIDE),
        quote("with a spread of {:.0f} %", 100 * here.SIGMA),
        quote("noticed after {:.0f} s and is back after {:.0f} minutes", here.HEARTBEAT, here.AWAY / 60),
        quote("A checkpoint takes {:.0f} s", here.CHECKPOINT),
        quote("a state has {} bytes per parameter", here.STATE),
    ]


# The pages

COMPARISON = re.compile(r"^\| method .*?(?=^## )", re.MULTILINE | re.DOTALL)  # of README


def plain(text: str) -> str:
    """A page's text in one line, without numbers of list items, targets of links and attributes of pictures."""
    text = re.sub(r'^\d\. |(?<=\])\([^)]*\)|(width|src)="[^"]*"', "", text, flags=re.MULTILINE)
    return " ".join(text.replace("−", "-").split())


def strays(text: str, quotes: Sequence[Quote]) -> list[str]:
    """Quotes that a text lacks, and its numbers that no quote has."""
    lacking = [str(each) for each in quotes if str(each) not in text]
    for each in quotes:
        text = text.replace(str(each), "", 1)
    rest = NAMES.sub("", text)
    return [*lacking, *(rest[max(0, number.start() - 40) : number.end() + 20] for number in NUMBER.finditer(rest))]


PAGES = {
    "README.md": readme,
    "docs/findings.md": lambda: [*quality(), *links(), *sharded()],
    "docs/explanation/scale.md": scale,
}


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_that_of_a_record_or_a_table(page):
    text, quotes = (ROOT / page).read_text(encoding="utf-8"), PAGES[page]()
    if page == "README.md":
        comparison = COMPARISON.search(text)
        assert comparison, "README.md has no table of methods"
        text = comparison[0]
    assert [each.phrase for each in quotes if re.search(r"\d", NAMES.sub("", re.sub(r"{.*?}", "", each.phrase)))] == []
    assert strays(plain(text), quotes) == []


def test_a_stale_and_a_new_number_are_found():
    quotes = [quote("is {:.1f} times faster with 8 bits", 3.07), quote("({})", "two seeds")]
    assert strays("A step is 3.1 times faster with 8 bits (two seeds), GPT-2", quotes) == []
    assert strays("A step is 3.3 times faster with 8 bits (two seeds)", quotes)[0] == str(quotes[0])
    assert len(strays("A step is 3.1 times faster with 8 bits (two seeds), or 5 (one seed)", quotes)) == 2
