"""How do new weights get into a running vLLM? Both ways have the server read a directory that it can see.

Its own four-phase protocol, where it runs the transfer engine of our plugin (integrations/vllm_plugin): what is sent
is checked before the model is touched, and vLLM itself publishes the version with the weights. Otherwise the worker
method `reload_weights`, behind which the label is set by a call of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zerodrift.backends import vllm_facts
from zerodrift.backends.http import HttpClient
from zerodrift.core.version import WeightVersion

ENGINE = "zerodrift"
"""What the plugin is called in --weight-transfer-config."""
FLAGS = ("--weight-transfer-config", f'{{"backend": "{ENGINE}"}}')
PHASES = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
RELOAD = "/collective_rpc"
LABEL = "/update_weight_version"


class UpdatePath(NamedTuple):
    """Which of the two a server takes, found by asking it."""

    by_transfer: bool
    reloads: bool
    """`reload_weights` can be called."""
    labelled: bool
    """The label can be set by itself."""

    @property
    def exists(self) -> bool:
        """Weights can be pushed at all."""
        return self.by_transfer or self.reloads

    def push(self, http: HttpClient, directory: Path, version: WeightVersion) -> None:
        """The weights, and their label where the server keeps one. An error leaves the label as it was."""
        if self.by_transfer:
            init, start, update, finish = PHASES
            http.post(init, {"init_info": {}})
            http.post(start, None)
            http.post(update, {"update_info": {"directory": str(directory)}})
            http.post(finish, {"weight_version": version.label})
            return
        http.post(RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        if self.labelled:
            http.post(LABEL, {"new_version": version.label})


def find_path(info: vllm_facts.ServerInfo | None, has_route: Callable[[str], bool]) -> UpdatePath:
    """Ask for routes and for the transfer engine that was configured; never for a version."""
    ours = info is not None and info.transfer_engine == ENGINE
    return UpdatePath(ours and all(map(has_route, PHASES)), has_route(RELOAD), has_route(LABEL))
