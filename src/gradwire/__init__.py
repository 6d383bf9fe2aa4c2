"""gradwire: what gradients cost on the wire, what compressing them buys, and what it takes away."""

__version__ = "0.1.0"
