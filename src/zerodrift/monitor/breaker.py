"""OK → WARN → QUARANTINE → HALT, and the way back.

A bad window keeps its batch out of training; so many in a row halt. After a quarantine the next good window finds the
breaker half open: it warns until as many good ones have followed, and a bad one throws it back. Windows in which nobody
could measure the engine are not among them. A halt is left by hand
alone (`half_open`), or by a fall-back that put another engine in place: whatever was wrong is wrong until somebody
has looked, and a restarted process finds it halted.
"""

import msgspec

from zerodrift.monitor.decision import State


class Breaker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it stands; `update` gives the next one."""

    state: State = State.OK
    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    probing: bool = False
    """Half open."""
    halted_before: bool = False
    """Half open after a halt: the next bad window halts again."""

    def update(self, *, bad: bool, warned: bool, windows: int, measured: bool = True) -> "Breaker":
        """After one more window; so many `windows` in a row open it or close it.

        One in which nobody could measure the engine is neither good nor bad: on probation it proves nothing.
        """
        if self.state is State.HALT and not self.probing:
            return self
        if bad:
            return self._bad(windows)
        if not measured and (self.probing or self.state is State.QUARANTINE):
            return msgspec.structs.replace(self, state=State.WARN, probing=True)
        return self._good(windows, warned=warned)

    def _bad(self, windows: int) -> "Breaker":
        # Windows that nobody could measure stand between two bad ones without parting them.
        in_a_row = self.bad_in_a_row + 1
        halts = in_a_row >= windows or self.halted_before
        return Breaker(state=State.HALT if halts else State.QUARANTINE, bad_in_a_row=in_a_row)

    def _good(self, windows: int, *, warned: bool) -> "Breaker":
        probing = self.probing or self.state is State.QUARANTINE
        in_a_row = self.good_in_a_row + 1
        if probing and in_a_row < windows:
            return Breaker(
                state=State.WARN, good_in_a_row=in_a_row, probing=True, halted_before=self.halted_before
            )
        return Breaker(state=State.WARN if warned else State.OK)

    def half_open(self) -> "Breaker":
        """Let windows through on probation."""
        return Breaker(state=State.WARN, probing=True, halted_before=self.state is State.HALT)
