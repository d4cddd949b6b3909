"""Write a GGUF file again with its quantised matrices in another type, to see what an engine makes of that.

    python -m zerodrift.models.requantise IN.gguf OUT.gguf TYPE        (TYPE: Q4_0, Q8_0, F32, …)

Matrices of the type that most have are changed: norms stay in float32, and an embedding that was kept in a finer type
stays in it. F32 undoes all quantisation. Needs the package `gguf`.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
from rich.console import Console

from zerodrift.core.errors import ModelError, ModelNotFound, ZerodriftError

_WRITTEN_BY_WRITER = ("general.architecture", "general.file_type")

_console = Console(stderr=True, highlight=False)


def requantise(source: Path, target: Path, kind: str) -> Counter[str]:
    """Write `target`; returns how many tensors there are of each type. `target` is whole, or it is not there."""
    if not source.is_file():
        raise ModelNotFound(f"there is no file {source}; give a GGUF file")
    if kind not in gguf.GGMLQuantizationType.__members__ or f"MOSTLY_{kind}" not in _file_types():
        raise ModelError(f"{kind!r} is no type of a GGUF file; try Q4_0, Q4_1, Q5_0, Q8_0, F16 or F32")
    try:
        read = gguf.GGUFReader(source)
    except ValueError as error:
        raise ModelError(f"{source} cannot be read as GGUF ({error})") from error
    matrices = Counter(tensor.tensor_type for tensor in read.tensors if len(tensor.shape) > 1)
    [(common, _)] = matrices.most_common(1)
    unfinished = target.with_name(target.name + ".part")
    written = _write(read, unfinished, common, kind)
    unfinished.replace(target)
    return written


def _write(read: Any, path: Path, common: Any, kind: str) -> Counter[str]:
    writer = gguf.GGUFWriter(path, read.fields["general.architecture"].contents())
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name not in _WRITTEN_BY_WRITER:
            nested = field.types[1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], nested)
    writer.add_file_type(_file_types()[f"MOSTLY_{kind}"])
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
    return written


def _file_types() -> dict[str, int]:
    members = gguf.LlamaFileType.__members__
    # Named otherwise, because there it is all of them.
    return {name: int(member) for name, member in members.items()} | {"MOSTLY_F32": int(members["ALL_F32"])}


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 with a message."""
    if len(arguments) != 3:
        _console.print("usage: python -m zerodrift.models.requantise IN.gguf OUT.gguf TYPE", markup=False)
        return 2
    try:
        written = requantise(Path(arguments[0]), Path(arguments[1]), arguments[2])
    except ZerodriftError as error:
        _console.print(f"{error.code}: {error}", markup=False)
        return error.exit_code
    shown = ", ".join(f"{count} of {name}" for name, count in written.items())
    _console.print(f"{arguments[1]}: tensors, {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
