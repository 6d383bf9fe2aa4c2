"""Parts of a model that belong to its process group: copies of the model are without them."""

from __future__ import annotations

import warnings
from typing import Any


# Why: docs/decisions.md, "A copy of a model has no compressor".
class Attached:
    """A part of a model that is None in a copy of the model, and in one that was pickled as a whole."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy, such as an average of the weights, is not trained."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Be None after it is loaded, with a warning."""
        return detached, ()


def detached() -> None:
    """Warn that a model is loaded without what it was saved with."""
    warnings.warn(
        "the model was saved with a compressor or an optimizer that communicates, and is loaded without: call "
        "gradwire.compress_gradients, or build the optimizer, again. A state_dict has the model and no more.",
        stacklevel=2,
    )
