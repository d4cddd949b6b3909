"""New weights to several engines in two phases: all have them verified before one of them serves them.

    publisher = WeightPublisher(model, [InProcess(updates), ServerTarget(backend, exchange, checkpoint, name="b")], takers)
    receipts = publisher.publish("step 7")

Engines that can go back are published to first, and brought back where any of them fails: all or none of them serve the new
version. A server that cannot is sent to last; from the moment of sending no rollout of it is accepted, and none until a
receipt is confirmed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from zerodrift.core.errors import InvalidValue, VersionConflict, ZerodriftError
from zerodrift.core.version import WeightVersion
from zerodrift.sync.decisions import Decisions
from zerodrift.sync.gloo import GlooPeers
from zerodrift.sync.ranks import Ranks
from zerodrift.sync.receipt import Receipt
from zerodrift.sync.take import ReceiptTaker
from zerodrift.sync.target import WeightTarget
from zerodrift.weights.gathered import WholeState, gather_along, whole_state
from zerodrift.weights.listing import manifest_of
from zerodrift.weights.of_model import beside_checkpoint
from zerodrift.weights.update import UpdateManifest


def _unsharded(model: Any, state: WholeState) -> Any:
    """A model that one rank can call by itself, for the canaries."""
    dtype = next(iter(state.tensors.values())).dtype
    whole = AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()
    whole.load_state_dict(state.tensors | {name: state.tensors[first] for name, first in state.tied.items()})
    return whole


class WeightPublisher:
    """The trainer's side of every engine that generates for it."""

    def __init__(
        self,
        model: Any,
        targets: Sequence[WeightTarget],
        takers: Sequence[ReceiptTaker] = (),
        decisions: Decisions | None = None,
    ) -> None:
        """`takers`: who takes receipts of which replicas afterwards, each started with the weights that serve now.
        `decisions`: where engines in other processes look whether an update is made; a decision is never taken back."""
        self._ranks = Ranks(model)
        if not self._ranks.sends:
            if targets or takers:
                raise InvalidValue(
                    f"rank {self._ranks.rank} of a sharded model has targets or takers; rank {self._ranks.first} sends for all: "
                    "give them there, and WeightPublisher(model, []) on the others"
                )
            targets = takers = ()
        names = [target.name for target in targets]
        if (self._ranks.sends and not targets) or len({*names}) < len(names):
            raise InvalidValue(f"targets are called {names}; name at least one, each by a name of its own")
        if unguarded := [
            each.name
            for each in targets
            if not each.goes_back
            and not isinstance(each, GlooPeers)
            and each.name not in {taker.place[0] for taker in takers}
        ]:
            raise InvalidValue(
                f"{unguarded[0]} cannot go back to the version before, and no receipt would be taken of it; give a "
                "ReceiptTaker whose replica has its name"
            )
        if decisions is None and any(isinstance(each, GlooPeers) for each in targets):
            raise InvalidValue(
                "GlooPeers look in `decisions` whether an update is made when they lose the trainer, and there are none; give "
                "Decisions(directory), the one that serve_gloo has"
            )
        self._model, self._takers, self._decisions = model, tuple(takers), decisions
        self._owing: list[WeightTarget] = []
        # Stable, so that servers come last and else in the order given.
        self._targets = sorted(targets, key=lambda target: not target.goes_back)

    def publish(self, label: str, *, parent: WeightVersion | None = None) -> tuple[Receipt, ...]:
        """Every target serves the model's weights as `label`; or those that can go back are where they were.

        Every rank of a sharded model calls this: the first sends what all have gathered, and where it fails all raise.
        """
        receipts, error = tuple[Receipt, ...](), None
        try:
            if self._ranks.sends:
                receipts = self._send(whole_state(self._model), label, parent)
            else:
                gather_along(self._model)
        except BaseException as raised:  # whatever it is, the others must hear of it
            error = raised
        failed = self._ranks.any(error is not None)
        if error is not None:
            raise error
        if failed:
            raise VersionConflict(
                f"rank {self._ranks.first} could not publish {label!r}, and its error says why; publish again on all ranks"
            )
        return receipts

    def _send(self, state: WholeState, label: str, parent: WeightVersion | None) -> tuple[Receipt, ...]:
        for taker in self._takers:
            taker.require_started()
        self._serve_all(self._owing)  # of an update that was decided before this one
        tensors, tied = state
        weights = manifest_of(tensors, beside_checkpoint(self._model))
        update = UpdateManifest(version=label, parent=parent, weights=weights, tied=tied)
        self._prepare(update, tensors)
        self._decide(update)
        self._hold(update.weight_version)
        self._serve()
        scored = _unsharded(self._model, state) if self._takers and self._ranks.size > 1 else self._model
        return tuple(taker.take(scored, label) for taker in self._takers)

    def _prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        for number, target in enumerate(self._targets):
            try:
                target.prepare(update, tensors)
            except BaseException:
                self._each(self._targets[: number + 1], "abort")
                raise

    def _decide(self, update: UpdateManifest) -> None:
        if self._decisions is not None and not self._decisions.decide(update.identity, made=True):
            self._each(self._targets, "abort")
            raise VersionConflict(
                f"an engine that had {update.version!r} prepared lost the trainer, and decided against it; publish it "
                "once more under another label"
            )

    def _hold(self, version: WeightVersion) -> None:
        """What is sent and not measured gives no rollouts, also where this process ends in between."""
        for taker in self._takers:
            taker.hold(version)

    def _serve(self) -> None:
        if self._decisions is not None:
            self._serve_all(self._targets)
            return
        for number, target in enumerate(self._targets):
            try:
                target.publish()
            except BaseException as error:
                left = self._each([each for each in self._targets[:number] if each.goes_back], "roll_back")
                # One that was asked and did not answer may serve it: there, to abort is to go back.
                asked = self._each([target], "abort")
                self._each(self._targets[number + 1 :], "abort")
                if left := [*left, *(asked if target.goes_back else ())]:
                    raise ZerodriftError(
                        f"{'; '.join(left)}: it may serve a version that others do not; ask it for its version"
                    ) from error
                raise

    def _serve_all(self, targets: Sequence[WeightTarget]) -> None:
        """What was decided holds: one that fails does not keep the others from it, and is told of in the end."""
        failed: list[tuple[WeightTarget, Exception]] = []
        for target in targets:
            try:
                target.publish()
            except (ZerodriftError, OSError) as error:
                failed.append((target, error))
        # Who cannot go back fails stop, or makes it up by itself.
        self._owing = [target for target, _ in failed if target.goes_back]
        if failed:
            raise failed[0][1]

    @staticmethod
    def _each(targets: Sequence[WeightTarget], verb: str) -> list[str]:
        """All of them, whatever one of them says; returns who could not, and why."""
        failed = []
        for target in targets:
            try:
                getattr(target, verb)()
            except (ZerodriftError, OSError) as error:
                failed.append(f"{target.name} could not be brought back ({error})")
        return failed
