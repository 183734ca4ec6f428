"""How keys and values are held: each codec turns `[B, heads, n, dim]` into rows of 32-bit words and attends over those."""

from gnomon.state.codecs.affine import Affine
from gnomon.state.codecs.codec import Codec, Fetched
from gnomon.state.codecs.coding import Coding
from gnomon.state.codecs.turbo import Turbo

__all__ = ["Affine", "Codec", "Coding", "Fetched", "Turbo"]
