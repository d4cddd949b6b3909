"""Every fault that can be planted, by the name that is typed: CAUSE:VARIANT, or CAUSE for its first variant.

    zerodrift audit … --inject semantic/bos:doubled

What each does and needs is said in faults.yaml. Its order is the order of planting, innermost first, so that several can
be planted at once: what changes the model comes before what changes updates, and that before requests and answers.
"""

import difflib
from collections.abc import Mapping
from importlib.resources import files

import msgspec

from zerodrift.config.document import parse
from zerodrift.core.errors import InvalidValue
from zerodrift.faults.after_update import AFTER_UPDATE_FAULTS
from zerodrift.faults.attention import ATTENTION_FAULTS
from zerodrift.faults.chunked_prefill import CHUNK_FAULTS
from zerodrift.faults.delivery import DELIVERY_FAULTS
from zerodrift.faults.fault import Fault, Need
from zerodrift.faults.kept_kv import KEPT_KV_FAULTS
from zerodrift.faults.packed_prefill import PACKED_FAULTS
from zerodrift.faults.position import POSITION_FAULTS
from zerodrift.faults.precision import PRECISION_FAULTS
from zerodrift.faults.prefix_cache import CACHE_FAULTS
from zerodrift.faults.prompt import PROMPT_FAULTS
from zerodrift.faults.reporting import REPORTING_FAULTS
from zerodrift.faults.sampling import SAMPLING_FAULTS
from zerodrift.faults.streaming import STREAMING_FAULTS
from zerodrift.faults.trainer import TRAINER_FAULTS
from zerodrift.faults.wrapper import Plant

_PLANTS: Mapping[str, Plant] = {
    **PRECISION_FAULTS,
    **POSITION_FAULTS,
    **ATTENTION_FAULTS,
    **AFTER_UPDATE_FAULTS,
    **KEPT_KV_FAULTS,
    **CACHE_FAULTS,
    **CHUNK_FAULTS,
    **PACKED_FAULTS,
    **DELIVERY_FAULTS,
    **SAMPLING_FAULTS,
    **PROMPT_FAULTS,
    **REPORTING_FAULTS,
    **STREAMING_FAULTS,
    **TRAINER_FAULTS,
}


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    does: str
    needs: tuple[str, ...] = ()


def _read() -> dict[str, Fault]:
    text = (files("zerodrift.faults") / "faults.yaml").read_text(encoding="utf-8")
    listed = msgspec.convert(parse(text, "faults.yaml"), dict[str, _Said])
    assert listed.keys() == _PLANTS.keys(), f"said or planted alone: {listed.keys() ^ _PLANTS.keys()}"
    return {
        spec: Fault(
            cause=spec.partition(":")[0],
            variant=spec.partition(":")[2],
            message=said.does,
            plant=_PLANTS[spec],
            needs=tuple(Need[name.upper().replace("-", "_")] for name in said.needs),
        )
        for spec, said in listed.items()
    }


FAULTS: Mapping[str, Fault] = _read()


def resolve(spec: str) -> Fault:
    """The fault that `spec` names."""
    if spec in FAULTS:
        return FAULTS[spec]
    variants = [fault for fault in FAULTS.values() if fault.cause == spec]
    if variants:
        return variants[0]
    raise InvalidValue(f"there is no fault {spec!r}{_nearest(spec)}")


def _nearest(spec: str) -> str:
    """The nearest name, and all variants where the cause is known."""
    cause = spec.partition(":")[0]
    variants = [name for name, fault in FAULTS.items() if fault.cause == cause]
    if variants:
        return f"; {cause} has the variants {', '.join(variants)}"
    causes = list(dict.fromkeys(fault.cause for fault in FAULTS.values()))
    near = difflib.get_close_matches(cause, causes, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `zerodrift audit --inject list` lists them"
