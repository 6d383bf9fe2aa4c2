"""Per-sample gradients: rows tied to the ids of samples, their norms, and queries over them."""

from gradwire.base.extras import require

require(__name__, "pyarrow", "scipy", "tqdm")
