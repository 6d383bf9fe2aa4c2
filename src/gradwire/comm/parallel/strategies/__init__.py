"""The strategies: one file each, found by name; other packages offer theirs as ``gradwire.strategies``."""
