"""Gnomon: a local language-model server and toolkit on MLX."""

__version__ = "0.1.0"
