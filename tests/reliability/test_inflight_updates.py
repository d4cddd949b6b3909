"""Updates under load: every token is replayed by the weights that its output names."""

from collections.abc import Callable
from types import ModuleType

import msgspec
import pytest

from zerodrift.core.errors import BitsDiffer

Script = Callable[[str], ModuleType]


def updated(script: Script, kv: str, updates: int) -> None:
    inflight = script("reliability/inflight_updates")
    told, engine = inflight.run(updates, kv)
    assert told.over_several > 0, "no update fell among requests that run: nothing is shown"
    assert inflight.replayed(told, engine) == len(told.outputs)
    mixed = next(output for output in told.outputs if len(output.versions) > 1)
    # The control: one bit of one number is seen.
    wrong = (mixed.logprobs[0] - 1e-6, *mixed.logprobs[1:])
    with pytest.raises(BitsDiffer):
        inflight.replayed(told._replace(outputs=[msgspec.structs.replace(mixed, logprobs=wrong)]), engine)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_updates_under_load(script: Script, kv: str) -> None:
    updated(script, kv, 8)


@pytest.mark.long
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_thousand_updates_under_load(script: Script, kv: str) -> None:
    updated(script, kv, 1000)
