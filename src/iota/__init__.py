"""IOTA: pretrain one language model across machines that nobody owns together (arXiv 2507.17766)."""

__version__ = "0.1.0"
PROTOCOL = 1
