"""Notes on comparing lines of the table: unlike machines, fallbacks, and losses that should be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gradwire.bench.report.rows.record import Result, hardware


def machine(row: Result) -> str:
    """Describe what a run's times depend on: device, processor, vector instructions, cores, threads and versions."""
    environment = row.environment or {}
    device, processor, cores = hardware(row)
    parts = [
        *dict.fromkeys((row.device, device, processor)),
        environment.get("cpu_capability"),
        f"{cores or '?'} cores",
        f"{environment.get('threads', '?')} threads",
        f"gradwire {environment.get('gradwire', '?')}",
        f"torch {environment.get('packages', {}).get('torch', '?')}",
        environment.get("preloaded"),
    ]
    return ", ".join(str(part) for part in parts if part)


def privacy(row: Result) -> str:
    """Describe a private run's guarantee and its settings; empty for other runs."""
    if row.sampling is None:
        return ""
    bound = "no bound: no noise" if row.epsilon is None else f"ε = {row.epsilon:.3g} at δ = {row.delta:.2g}"
    clipped = "" if row.clipped_fraction is None else f", {100 * row.clipped_fraction:.0f} % of the samples clipped"
    adjacency = f", {row.adjacency} adjacency" if row.adjacency else ""
    accountant = f", by {row.accountant.upper()} accountant" if row.accountant else ""
    return (
        f"{bound} (noise multiplier {row.noise_multiplier:g}, {row.sampling} sampling{adjacency}{clipped}{accountant})"
    )


def machines(ok: Iterable[Result]) -> list[str]:
    """List the cells of each machine; empty if all machines are alike."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for row in ok:
        groups[machine(row)].append(row.run_name)
    if len(groups) < 2:
        return []
    title = "runs of unlike machines: no speed-up is computed between them, and a mean over their seeds mixes them"
    return [title, *(f"{name}: {', '.join(_cells(runs))}" for name, runs in groups.items())]


def mostly_float32(row: Result) -> bool:
    """Whether the compressor encoded less than half of its elements; the run then says little about it."""
    return (row.fallback_fraction or 0) > 0.5


def fallbacks(ok: Iterable[Result]) -> list[str]:
    """Describe how much compressors sent as float32, because encoding would not have made it shorter."""
    cells: defaultdict[str, list[Result]] = defaultdict(list)
    for row in ok:
        if row.fallbacks:
            cells[f"{row.strategy}/{row.compressor}/ws{row.world_size}"].append(row)
    shares = [
        f"{cell} {100 * max(row.fallback_fraction or 0 for row in rows):.2g} % of its elements "
        f"({max(row.fallbacks or 0 for row in rows):,} encodings)"
        for cell, rows in cells.items()
    ]
    return ["sent as float32, because encoding would not have made it shorter: " + "; ".join(shares)] if shares else []


def _cells(runs: Sequence[str]) -> list[str]:
    """Join run names (``…/seed<S>``) that differ only in their seed."""
    seeds: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        cell, _, seed = run.rpartition("/seed")
        seeds[cell].append(seed)
    return [f"{cell} (seed {', '.join(numbers)})" for cell, numbers in seeds.items()]


def losses_over_links(ok: Iterable[Result]) -> list[str]:
    """Check that runs which differ only in their link have equal losses at every step, by their digests."""
    digests: defaultdict[tuple[str, str, int, int], dict[str, str]] = defaultdict(dict)
    for row in ok:
        if row.loss_digest is not None:
            digests[row.strategy, row.compressor, row.world_size, row.seed][row.link] = row.loss_digest
    compared = {run: links for run, links in digests.items() if len(links) > 1}
    differ = [
        f"losses differ between links: {strategy}/{compressor}/ws{world}/seed{seed}: {_unlike(links)}"
        for (strategy, compressor, world, seed), links in compared.items()
        if len(set(links.values())) > 1
    ]
    equal = len(compared) - len(differ)
    return [
        *([f"losses at every step are equal on all links: {equal} of {len(compared)}"] if compared else []),
        *differ,
    ]


def _unlike(links: dict[str, str]) -> str:
    """Group links with equal losses: ``none, 1gbit | 100mbit``."""
    by_digest: defaultdict[str, list[str]] = defaultdict(list)
    for link, digest in links.items():
        by_digest[digest].append(link)
    return " | ".join(", ".join(names) for names in by_digest.values())
