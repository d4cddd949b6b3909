"""Write a GGUF file again with its quantised matrices in another type, to see what an engine makes of that.

    python tests/requantise.py IN.gguf OUT.gguf TYPE        (TYPE: Q4_0, Q8_0, F32, …)

Matrices of the type that most have are changed: norms stay in float32, and an embedding that was kept in a finer type
stays in it. F32 undoes all quantisation. Needs the package `gguf`.
"""

import sys
from collections import Counter
from pathlib import Path

import gguf

WRITTEN_BY_WRITER = ("general.architecture", "general.file_type")


def requantise(source: Path, target: Path, kind: str) -> Counter[str]:
    """Write `target`; returns how many tensors there are of each type."""
    read, unfinished = gguf.GGUFReader(source), target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(unfinished, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name not in WRITTEN_BY_WRITER:
            nested = field.types[1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], nested)
    # Named otherwise, because there it is all of them.
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    matrices = Counter(tensor.tensor_type for tensor in read.tensors if len(tensor.shape) > 1)
    [(common, _)] = matrices.most_common(1)
    wanted, written = gguf.GGMLQuantizationType[kind], Counter[str]()
    for tensor in read.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if stored is common or kind == "F32":
            data = gguf.quants.quantize(gguf.quants.dequantize(data, stored), wanted)
            stored = wanted
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
        written[stored.name] += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)
    return written


if __name__ == "__main__":
    given, wanted = Path(sys.argv[1]), Path(sys.argv[2])
    counted = requantise(given, wanted, sys.argv[3])
    sys.stdout.write(
        f"{wanted}: tensors, {', '.join(f'{count} of {name}' for name, count in counted.items())}\n"
    )
