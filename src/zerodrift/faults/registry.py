"""Every fault that can be planted, by the name that is typed: CAUSE:VARIANT, or CAUSE for its first variant.

    zerodrift audit … --inject semantic/bos:doubled

The order is the order of planting, innermost first, so that several faults can be planted at once: what changes the
model comes before what changes updates, and that before what changes requests and answers.
"""

import difflib
from collections.abc import Mapping, Sequence

from zerodrift.backends.base import Backend
from zerodrift.core.errors import InvalidValue
from zerodrift.faults.after_update import AFTER_UPDATE_FAULTS
from zerodrift.faults.delivery import DELIVERY_FAULTS
from zerodrift.faults.fault import Fault
from zerodrift.faults.other_model import OTHER_MODEL_FAULTS
from zerodrift.faults.position import POSITION_FAULTS
from zerodrift.faults.precision import PRECISION_FAULTS
from zerodrift.faults.prefix_cache import CACHE_FAULTS
from zerodrift.faults.prompt import PROMPT_FAULTS
from zerodrift.faults.reporting import REPORTING_FAULTS
from zerodrift.faults.sampling import SAMPLING_FAULTS
from zerodrift.faults.streaming import STREAMING_FAULTS
from zerodrift.faults.trainer import TRAINER_FAULTS

FAULTS: Mapping[str, Fault] = {
    fault.spec: fault
    for fault in (
        *PRECISION_FAULTS,
        *POSITION_FAULTS,
        *OTHER_MODEL_FAULTS,
        *AFTER_UPDATE_FAULTS,
        *CACHE_FAULTS,
        *DELIVERY_FAULTS,
        *SAMPLING_FAULTS,
        *PROMPT_FAULTS,
        *REPORTING_FAULTS,
        *STREAMING_FAULTS,
        *TRAINER_FAULTS,
    )
}


def resolve(spec: str) -> Fault:
    """The fault that `spec` names."""
    if spec in FAULTS:
        return FAULTS[spec]
    variants = [fault for fault in FAULTS.values() if fault.cause == spec]
    if variants:
        return variants[0]
    raise InvalidValue(f"there is no fault {spec!r}{_nearest(spec)}")


def inject_all(engine: Backend, specs: Sequence[str]) -> Backend:
    """`engine` with all of these faults, planted from the inside out whatever the order they are named in."""
    order = list(FAULTS)
    for fault in sorted(map(resolve, specs), key=lambda fault: order.index(fault.spec)):
        engine = fault.inject(engine)
    return engine


def _nearest(spec: str) -> str:
    """The nearest name, and all variants where the cause is known."""
    cause = spec.partition(":")[0]
    variants = [name for name, fault in FAULTS.items() if fault.cause == cause]
    if variants:
        return f"; {cause} has the variants {', '.join(variants)}"
    causes = list(dict.fromkeys(fault.cause for fault in FAULTS.values()))
    near = difflib.get_close_matches(cause, causes, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; `zerodrift audit --inject list` lists them"
