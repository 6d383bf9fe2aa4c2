"""Reading ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items; a thread reads the next one while the caller uses this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="gradwire-prefetch") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item
