"""What linear response says about a difference. Torch-free."""

import msgspec

from zerodrift.records.evidence import LocatedEvidence


class Localisation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether Δ follows something inside the model, and whether that is all of it."""

    r2: float
    """Share of Δ² that the best knobs predict in sequences they were not chosen on."""
    null: float
    """The largest share by chance."""
    follows: bool
    """Δ follows `knobs`, which rounding never does."""
    knobs: tuple[LocatedEvidence, ...] = ()
    to_floor: bool = False
    """With the knobs turned for real, the reference has the engine's numbers to within rounding."""
    share: float = 0.0
    """Of Σ|Δ|, that goes away with them."""
    rounding: float = 0.0
    """Rank correlation of Δ with what rounding the weights does, where that is more than chance; 0 where it is not."""
    missing: tuple[str, ...] = ()
    """What this model has no part for, or none that is known."""

    @property
    def located(self) -> tuple[LocatedEvidence, ...]:
        """Where the difference sits; empty where that is not proven."""
        return self.knobs if self.follows and self.to_floor else ()

    @property
    def message(self) -> str:
        """In words."""
        knobs = " and ".join(each.message for each in self.knobs)
        if self.located:
            return f"located: {knobs}; turned so in the reference, it explains {self.share:.1%} of Δ"
        # A part that was turned for real and explains all of Δ needs no other to be asked.
        unasked = f"; not asked: {', '.join(self.missing)}" if self.missing else ""
        if self.follows:
            return (
                f"not rounding, which follows no part of the model: Δ follows {knobs}, and that is {self.share:.0%} of it"
                f"{unasked}"
            )
        return (
            f"no part of the model that was turned a little explains it (R² {max(self.r2, 0.0):.2f}){unasked}"
        )
