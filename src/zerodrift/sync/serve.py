"""New weights to a `zerodrift serve`: by its control routes, as a directory that both sides see, whole and verified or never.

    POST /init_weight_transfer_engine → /start_weight_update {"expect"} → /update_weights {"directory"} → /finish_weight_update

It holds what it reads against the trainer's manifest beside it, tries it, and tells the digest of what it serves, which is held
against ours here.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from zerodrift.backends.http import HttpClient
from zerodrift.backends.samples import parse
from zerodrift.core.errors import CapabilityMissing, DigestMismatch, OutOfOrder, VersionConflict
from zerodrift.core.version import WeightVersion
from zerodrift.weights.files import write_update
from zerodrift.weights.update import UpdateManifest

INIT, START, UPDATE, FINISH, SHUTDOWN = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
)
INFO, SETTINGS = "/weight_info", "/server_info?config_format=json"


class _Served(msgspec.Struct):
    """What a call says of the weights that serve."""

    weight_version: str
    digest: str | None = None


class _About(msgspec.Struct):
    numeric: dict[str, str]


class _Settings(msgspec.Struct):
    zerodrift: _About | None = None


class ServeTarget:
    """One server. It serves the old version until `publish`, and goes on with it where anything before that fails."""

    goes_back = False

    def __init__(self, http: HttpClient, exchange: Path, *, name: str) -> None:
        """`exchange`: below the server's --weight-root."""
        self.name, self._http, self._exchange = name, http, exchange
        self._prepared: WeightVersion | None = None
        self._begun = False

    def numeric(self) -> Mapping[str, str]:
        """How it computes, as `exact.fingerprint` names it."""
        found = parse(self._http.get(SETTINGS), _Settings, SETTINGS).zerodrift
        if found is None:
            raise CapabilityMissing(
                f"{self._http.address} is no `zerodrift serve`, and its numbers are not the trainer's bits; for a vLLM set "
                "train.rollouts=vllm"
            )
        return found.numeric

    @property
    def current(self) -> WeightVersion:
        """What it says that it serves."""
        told = parse(self._http.get(INFO), _Served, INFO)
        return WeightVersion(told.weight_version, told.digest)

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read, verified and tried by the server when this returns."""
        self._exchange.mkdir(parents=True, exist_ok=True)
        folder = update.identity[:32]
        write_update(self._exchange, folder, update, tensors)
        if not self._begun:
            # A trainer that was killed may have left an update open, and nobody else would ever end it.
            self._http.post(SHUTDOWN, None)
            self._begun = True
        self._http.post(INIT, {"init_info": {}})
        self._http.post(START, {"expect": self.current.label})
        self._prepared = update.weight_version
        self._http.post(UPDATE, {"update_info": {"directory": str((self._exchange / folder).resolve())}})

    def publish(self) -> None:
        """Between two steps of the engine."""
        if (wanted := self._prepared) is None:
            raise OutOfOrder(f"{self.name} has no update to publish; prepare one first")
        told = parse(self._http.post(FINISH, {"weight_version": wanted.label}), _Served, FINISH)
        self._prepared = None
        _require(WeightVersion(told.weight_version, told.digest), wanted, self.name)
        _require(self.current, wanted, self.name)

    def abort(self) -> None:
        """What was sent is forgotten."""
        if self._prepared is not None:
            self._prepared = None
            self._http.post(SHUTDOWN, None)

    def roll_back(self) -> None:
        """It has no route for that."""
        raise OutOfOrder(
            f"{self.name} goes back by no call; send it the weights of the version before as an update"
        )


def _require(found: WeightVersion, wanted: WeightVersion, name: str) -> None:
    if found.label != wanted.label:
        raise VersionConflict(
            f"{name} was sent {wanted.label!r} and serves {found.label!r}; somebody else updates it"
        )
    if found.digest != wanted.digest:
        raise DigestMismatch(
            f"{name} serves {wanted.label!r} with digest {found.digest}, and {wanted.digest} was sent"
        )
