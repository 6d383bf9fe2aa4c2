"""The parts' results as one page of Markdown: ``python -m gpu.summary [PART ...]``; exit code 1 if a part failed."""

from __future__ import annotations

import json
import sys

from gpu.part import OUT, Row, failed, short, table, verdict

HIDDEN = ("took_s", "waits", "wrong", "numel")


def main(parts: list[str]) -> int:
    """Print one line for each part, what failed and missed, and every row."""
    lines, bad = [], False
    found: dict[str, Row] = {}
    for part in parts:
        file = OUT / f"{part}.json"
        if not file.exists():
            lines.append({"part": part, "outcome": "wrote nothing"})
            bad = True
            continue
        found[part] = one = json.loads(file.read_text())
        bad |= not one["finished"]
        met = sum(target["met"] for target in one["targets"])
        lines.append(
            {
                "part": part,
                "outcome": "failed" if one["failed"] else "ok" if one["finished"] else "not finished",
                "rows": str(len(one["rows"])),
                "failed": short(one["failed"]),
                "no time for": str(len(one["skipped"])),
                "targets met": f"{met} of {len(one['targets'])}",
                "s": str(one["took_s"]),
            }
        )
    print(table(lines))
    for part, one in found.items():
        print(f"\n## {part}\n")
        print(table([rows_cells(row) for row in one["rows"] if "lines" not in row]))
        if flat := [
            {"elements": row["name"].split()[0], **line} for row in one["rows"] for line in row.get("lines", [])
        ]:
            print("\n" + table([{key: short(value) for key, value in line.items()} for line in flat]))
        if one["targets"]:
            print("\n" + table([verdict(target) for target in one["targets"]]))
        for row in one["rows"]:
            if failed(row):
                print(f"\nFAILED {row['name']}: {row.get('error') or row['wrong']}")
    return int(bad)


def rows_cells(row: Row) -> dict[str, str]:
    """A row as cells."""
    cells = {key: short(value) for key, value in row.items() if key not in HIDDEN and value is not None}
    return {key: value if len(value) < 80 else f"{value[:77]}..." for key, value in cells.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
