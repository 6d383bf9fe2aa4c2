"""In place of transformers' types, which take longer than all others."""

from typing import Any

def __getattr__(name: str) -> Any: ...
