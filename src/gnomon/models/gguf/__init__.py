"""GGUF files become ordinary MLX model directories: `convert(gguf, directory)`. Needs numpy and the `gguf` reader, no mlx."""

from gnomon.models.gguf.architectures import ARCHITECTURES as ARCHITECTURES
from gnomon.models.gguf.convert import Converted as Converted
from gnomon.models.gguf.convert import convert as convert
from gnomon.models.gguf.errors import UnsupportedGGUF as UnsupportedGGUF
