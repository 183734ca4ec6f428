"""States of token prefixes on disk, one safetensors file per block or checkpoint."""
