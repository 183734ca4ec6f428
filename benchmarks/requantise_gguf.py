"""A GGUF file's 4-bit tensors as Q4_0, the format for which llama.cpp has its fastest CPU kernels; everything else is copied.

uv run --with gguf python benchmarks/requantise_gguf.py FILE.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

FROM = (GGMLQuantizationType.Q4_1,)


def requantise(source: Path, out: Path) -> int:
    """Write `out` and return how many tensors changed. Raises OSError if a file can't be read or written."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    changed = 0
    for tensor in reader.tensors:
        if tensor.tensor_type in FROM:
            wide = quants.dequantize(tensor.data, tensor.tensor_type)
            target = GGMLQuantizationType.Q4_0
            writer.add_tensor(tensor.name, quants.quantize(wide, target), raw_dtype=target)
            changed += 1
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"{requantise(Path(sys.argv[1]), Path(sys.argv[2]))} tensors are Q4_0 now")
