"""A running vLLM server: settings as it shows them and as it behaves, never as its version string promises.

Asked, in this order: /v1/models, /version, /server_info (dev mode), /metrics, /openapi.json, and, where allowed, five
completions of one or two tokens. Nothing is changed on the server. What it does not show is unknown.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET

from zerodrift.backends.http import HttpClient, RefusalAdvice
from zerodrift.backends.json_path import look_up
from zerodrift.backends.samples import parse
from zerodrift.backends.vllm_facts import ServerInfo
from zerodrift.core.errors import BadAnswer, EngineError
from zerodrift.doctor import vllm_flags, vllm_settings
from zerodrift.doctor.behaviour import Behaviour
from zerodrift.doctor.setting import Origin, Reading, Setting, Value, unknown
from zerodrift.doctor.tables import VllmName, vllm_names

CONTROL = ("/collective_rpc", "/update_weights", "/pause", "/reset_prefix_cache")
HIDDEN = (
    "Most of its configuration is hidden: start it with VLLM_SERVER_DEV_MODE=1, on a trusted network only, or give "
    "the doctor the command line that started it, in quotes."
)
ADVICE = RefusalAdvice(
    key="put the server's --api-key into a variable and name it: --api-key-env NAME", load="ask again later"
)
NOWHERE = "/no-such-route"
"""vLLM answers 404 here; whoever answers otherwise answers so everywhere."""
_METRIC = "vllm:cache_config_info{"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class Server:
    """One vLLM server. `probe` False leaves out whatever makes it generate."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        probe: bool = True,
        timeout_s: float = 60.0,
        advice: RefusalAdvice = ADVICE,
    ) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self._http = HttpClient(address, api_key=api_key, timeout_s=timeout_s, concurrency=1, advice=advice)
        self._key = api_key is not None
        self._probe = probe
        self.title = f"vLLM server at {self._http.address}"

    def read(self) -> Reading:
        """All that it shows; a server that cannot be reached, or refuses the key, raises. The connection ends."""
        try:
            return self._read()
        finally:
            self._http.close()

    def _read(self) -> Reading:
        card = self._card()
        self.title = f"{self.title}, {self._version()}"
        info = self._info()
        labels = self._labels()
        found = {name: _shown(name, spec, info, labels) for name, spec in vllm_names().items()}
        device = look_up(info.vllm_config, "device_config/device") if info else UNSET
        found["device"] = (
            unknown("device") if device is UNSET else Setting("device", str(device), Origin.SERVER)
        )
        for name, spec in vllm_names().items():
            if spec.only not in (None, found["device"].value):
                del found[name]
        if found["device"].value == "cpu" and info is not None:
            found["cpu_threads"] = _cpu_threads(info)
        found["max_model_len"] = Setting("max_model_len", card.max_model_len, Origin.SERVER)
        found |= self._reachable(info)
        found["generation_defaults"] = unknown("generation_defaults")
        if self._probe:
            found |= Behaviour(self._http, card.id).settings(found)
        # Nobody can see these from outside, and nothing would be said about them.
        for name in ("return_tokens_as_token_ids", "disable_cascade_attn"):
            del found[name]
        return Reading(found, (), HIDDEN if info is None else "")

    def typed(self, name: str, value: Value) -> str | None:
        """What to start it with next time."""
        return vllm_flags.typed(name, value)

    def corrected(self, _changes: Mapping[str, Value]) -> None:
        """The command that started it is not known here."""

    def printed(self) -> str:
        """Nothing: it has no text."""
        return ""

    def _card(self) -> _Card:
        cards = parse(self._http.get("/v1/models"), _Models, "/v1/models").data
        # Adapters are listed behind their base model, which alone says how long a sequence may be.
        card = next((card for card in cards if card.max_model_len is not None), None)
        if card is None:
            raise BadAnswer(f"{self._http.address}/v1/models shows no max_model_len; is this a vLLM server?")
        return card

    def _version(self) -> str:
        found = look_up(self._json("/version"), "version")
        return (
            f"which calls itself vLLM {found}" if isinstance(found, str) else "whose version cannot be seen"
        )

    def _info(self) -> ServerInfo | None:
        try:
            return msgspec.convert(self._json("/server_info?config_format=json"), ServerInfo)
        except msgspec.ValidationError:
            return None

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body, 0 where none comes: a proxy may let /v1 through and nothing else."""
        try:
            reply = self._http.exchange("GET", path)
        except EngineError:
            return 0, b""
        return reply.status, reply.body

    def _json(self, path: str) -> object:
        """The JSON there, if there is any for us."""
        status, body = self._get(path)
        try:
            return msgspec.json.decode(body) if status == 200 else None
        except msgspec.DecodeError:
            return None

    def _labels(self) -> dict[str, str]:
        """The labels of vllm:cache_config_info, which needs no dev mode."""
        status, body = self._get("/metrics")
        lines = body.decode(errors="replace").splitlines() if status == 200 else []
        return dict(_LABEL.findall(next((each for each in lines if each.startswith(_METRIC)), "")))

    def _reachable(self, info: ServerInfo | None) -> dict[str, Setting]:
        """Which doors are open to us, and whether a key is asked for."""
        dev_mode = True if info is not None else self._has_control()
        host = urlsplit(self._http.address).hostname or ""
        return {
            "dev_mode": unknown("dev_mode")
            if dev_mode is None
            else Setting("dev_mode", dev_mode, Origin.MEASURED),
            # From this machine nobody can tell whether others reach the server as well.
            "host": unknown("host") if _is_loopback(host) else Setting("host", host, Origin.MEASURED),
            "api_key": Setting("api_key", self._asks_for_a_key(), Origin.MEASURED),
        }

    def _has_control(self) -> bool | None:
        """Whether a control endpoint is there; None where something in front of the server answers in its place."""
        paths = look_up(self._json("/openapi.json"), "paths")
        listed = isinstance(paths, dict)
        if listed and not paths.keys().isdisjoint(CONTROL):
            return True
        answers = self._get(NOWHERE)[0] == 404
        # A route for POST answers GET with 405, and nothing happens.
        statuses = {self._get(path)[0] for path in CONTROL} if answers else set()
        if 405 in statuses:
            return True
        return False if listed or statuses == {404} else None

    def _asks_for_a_key(self) -> bool:
        """With a key it let us in; does it without?"""
        if not self._key:
            return False
        keyless = HttpClient(self._http.address, timeout_s=self._http.timeout_s, concurrency=1)
        try:
            return keyless.exchange("GET", "/v1/models").status in (401, 403)
        finally:
            keyless.close()


def _is_loopback(host: str) -> bool:
    """All of 127.0.0.0/8, and ::1 however it is written."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _listed(info: ServerInfo) -> dict[str, str] | None:
    """Variables that are not vLLM's own, as its /server_info lists them: all of MKL_ and OMP_ that are set."""
    text = info.system_env.get("env_vars")
    if not isinstance(text, str):
        return None
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _cpu_threads(info: ServerInfo) -> Setting:
    own = {name: value for name, value in info.vllm_env.items() if isinstance(value, str)}
    found = vllm_settings.cpu_threads({**own, **(_listed(info) or {})})
    return msgspec.structs.replace(found, origin=Origin.SERVER) if found.known else found


def _variable(name: str, spec: VllmName, info: ServerInfo) -> Setting:
    if spec.env in info.vllm_env:
        return Setting(name, bool(info.vllm_env[spec.env]), Origin.SERVER)
    listed = _listed(info)
    if listed is None or spec.env is None or spec.env.startswith("VLLM_"):
        return unknown(name)
    text = listed.get(spec.env)
    return Setting(name, spec.default if text is None else vllm_settings.variable(spec, text), Origin.SERVER)


def _shown(name: str, spec: VllmName, info: ServerInfo | None, labels: Mapping[str, str]) -> Setting:
    if info is not None and spec.env is not None:
        return _variable(name, spec, info)
    if info is not None and spec.server is not None:
        if (value := look_up(info.vllm_config, spec.server)) is not UNSET:
            return Setting(name, _plain(name, spec, value), Origin.SERVER)
        if spec.key is not None and look_up(info.vllm_config, spec.server.rpartition("/")[0]) is not UNSET:
            return Setting(name, spec.default, Origin.SERVER)  # an override that is not there
    if spec.metric is not None and spec.metric in labels:
        text = labels[spec.metric]
        return Setting(name, text == "True" if spec.kind == "switch" else text, Origin.SERVER)
    return unknown(name)


def _plain(name: str, spec: VllmName, value: Any) -> Value:
    match spec.kind:
        case "presence":
            return None if value in (None, [], {}) else "on"
        case "switch":
            return bool(value)
        case "names":
            return vllm_settings.named(name, spec, value) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return value if value is None or isinstance(value, bool | int | float) else str(value)
