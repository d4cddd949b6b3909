"""Weights by HTTP: an exact engine takes updates from a trainer elsewhere, one at a time, whole or not at all.

    POST   /updates                the manifest, and which version is expected to be current
    PUT    /updates/ID/TENSOR      the bytes of one tensor, with their sha256
    POST   /updates/ID/prepare     verify, and put on the disk
    POST   /updates/ID/publish     serve it
    DELETE /updates/ID             forget it
    DELETE /updates                end what a trainer that is gone left: served where that was decided, else forgotten
    POST   /rollback               the version before, where this one is expected
    GET    /version                what serves now

Every call carries the token, which is made and kept as a receipt key is (`sync/key.py`). A call that is refused says so with
the code of the error that the engine raised, and the caller raises that error again. Nothing is read beyond the length that
was promised; put TLS in front where the network is not yours.
"""

import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import torch

from zerodrift.core import errors
from zerodrift.core.errors import (
    DigestMismatch,
    EngineError,
    EngineUnreachable,
    InvalidValue,
    OutOfOrder,
    ZerodriftError,
)
from zerodrift.core.version import WeightVersion
from zerodrift.engine.updates import Updates, WeightUpdate
from zerodrift.sync.decisions import Decisions
from zerodrift.weights.manifest import TensorRecord
from zerodrift.weights.session import Stage
from zerodrift.weights.update import MOST_MANIFEST_BYTES, UpdateManifest, decode_update, encode_update

EXPECTED, DIGEST, KV = "X-Expected-Version", "X-Sha256", "X-KV"
MOST_WORDS = 4096
IDLE_S = 60.0
"""A peer that says nothing for so long is gone; its update stays open, and `updates.abort()` ends it."""
Call = Callable[[str, str, bytes, Mapping[str, str]], bytes]
"""Verb, path, content and headers of one call; what was answered."""
_ROUTE = re.compile(r"/updates/([0-9a-f]{64})(?:/(.+))?")
_ADDRESS = re.compile(r"[\w.\-\[\]:]+:\d{1,5}", re.ASCII)
_BY_CODE = {
    each.code: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, ZerodriftError)
}


class _Refusal(msgspec.Struct):
    code: str
    message: str


class WeightServer:
    """The engine's side: calls become steps of `Updates`, one at a time."""

    def __init__(
        self,
        updates: Updates,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        decisions: Decisions | None = None,
    ) -> None:
        """Listens at once; `address` says where. `decisions`: the publisher's, to be asked where it is gone."""
        self._updates, self._token, self._decisions = updates, token, decisions
        self._mutex = threading.Lock()
        self._open: tuple[UpdateManifest, WeightUpdate] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_S

            def log_message(self, *_: object) -> None:
                """Nothing: headers hold the token."""

            def handle_call(self) -> None:
                server.answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = handle_call

        self._http = ThreadingHTTPServer((host, port), Handler)
        self._http.daemon_threads = True
        self.address = f"{host}:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="zerodrift-weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more calls; the engine serves on."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, call: Any) -> None:
        """One call."""
        try:
            self._require_token(call.headers.get("Authorization", ""))
            # Before the mutex: a trainer that is stopped in the middle of a tensor would keep it for as long.
            body = self._body(call)
            with self._mutex:
                status, content = HTTPStatus.OK, self._done(call, body)
        except ZerodriftError as error:
            status = HTTPStatus.CONFLICT
            content = msgspec.json.encode(_Refusal(error.code, str(error)[:MOST_WORDS]))
            # What was not read would be taken for the next call.
            call.close_connection = True
        call.send_response(status)
        call.send_header("Content-Length", str(len(content)))
        call.end_headers()
        call.wfile.write(content)

    def _require_token(self, given: str) -> None:
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token.hex()}".encode()):
            raise EngineError(
                "the call carries no token, or another one; give the key that the server was given"
            )

    def _body(self, call: Any) -> bytes:
        """What came with a call that brings something, and no more than it may bring."""
        if (call.command, call.path) == ("POST", "/updates"):
            return _read(call, MOST_MANIFEST_BYTES)
        if call.command == "PUT" and (route := _ROUTE.fullmatch(call.path)) is not None:
            with self._mutex:
                update, _ = self._under_way(route[1])
            return _read(call, _record(update, unquote(route[2] or "")).nbytes)
        return b""

    def _done(self, call: Any, body: bytes) -> bytes:
        verb, path = call.command, call.path
        if (verb, path) == ("GET", "/version"):
            return msgspec.json.encode(self._updates.current)
        if (verb, path) == ("POST", "/updates"):
            return self._begin(body, call.headers.get(EXPECTED, ""))
        if (verb, path) == ("POST", "/rollback"):
            return msgspec.json.encode(self._updates.rollback(unquote(call.headers.get(EXPECTED, ""))))
        if (verb, path) == ("DELETE", "/updates"):
            return self._end_foreign()
        if (route := _ROUTE.fullmatch(path)) is None:
            raise OutOfOrder(f"{verb} {path[:200]} is no call; see zerodrift.sync.http")
        if verb == "PUT":
            self._push(call, body, route[1], unquote(route[2] or ""))
            return b"{}"
        return self._step(call, verb, route[1], unquote(route[2] or ""))

    def _begin(self, content: bytes, expected: str) -> bytes:
        update = decode_update(content, "the manifest")
        if self._open is not None and self._open[1].stage not in (Stage.PUBLISHED, Stage.ABORTED):
            raise OutOfOrder(
                f"the update to {self._open[0].version!r} is under way; where its trainer is gone, "
                "HttpTarget.take_over() ends it as was decided"
            )
        self._open = (update, self._updates.begin(update, unquote(expected)))
        return b"{}"

    def _end_foreign(self) -> bytes:
        """As was decided; where nothing was, it is decided here that it is not made, and its trainer hears so if it lives."""
        if self._open is not None and self._open[1].stage not in (Stage.PUBLISHED, Stage.ABORTED):
            update, under_way = self._open
            made = self._decisions is not None and self._decisions.decide(update.identity, made=False)
            if made and under_way.stage is Stage.COMMITTED:
                under_way.publish()
            else:
                under_way.abort()
        return msgspec.json.encode(self._updates.current)

    def _under_way(self, identity: str) -> tuple[UpdateManifest, WeightUpdate]:
        if self._open is None or self._open[0].identity != identity:
            raise OutOfOrder(
                f"the update {identity[:16]}… is not under way; POST its manifest to /updates first"
            )
        return self._open

    def _step(self, call: Any, verb: str, identity: str, rest: str) -> bytes:
        _, under_way = self._under_way(identity)
        if (verb, rest) == ("POST", "prepare"):
            under_way.verify()
            under_way.commit()
        elif (verb, rest) == ("POST", "publish"):
            return msgspec.json.encode(under_way.publish(call.headers.get(KV, "recompute")))
        elif (verb, rest) == ("DELETE", ""):
            under_way.abort()
        else:
            raise OutOfOrder(f"{verb} {rest[:80]!r} is no step of an update")
        return b"{}"

    def _push(self, call: Any, content: bytes, identity: str, name: str) -> None:
        update, under_way = self._under_way(identity)
        record = _record(update, name)
        if len(content) != record.nbytes or hashlib.sha256(content).hexdigest() != call.headers.get(DIGEST):
            raise DigestMismatch(
                f"{len(content)} bytes of {name} came, and not those that were sent; send it again"
            )
        tensor = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
        )
        under_way.push(name, tensor.view(getattr(torch, record.dtype)).reshape(record.shape))


def _record(update: UpdateManifest, name: str) -> TensorRecord:
    record = next((each for each in update.weights.tensors if each.name == name), None)
    if record is None:
        raise OutOfOrder(f"{name[:80]!r} is not in the manifest of {update.version!r}")
    return record


def _read(call: Any, most: int) -> bytes:
    length = call.headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > most:
        raise OutOfOrder(f"a call has Content-Length {length[:40]!r}; {most} bytes at most are read")
    content: bytes = call.rfile.read(int(length))
    return content


class HttpTarget:
    """The trainer's side of one `WeightServer`."""

    goes_back = True

    def __init__(
        self, address: str, token: bytes, *, name: str, kv: str = "recompute", timeout_s: float = 600.0
    ) -> None:
        """`address` is HOST:PORT, where an engine listens: what it serves now is what the first update follows."""
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise InvalidValue(
                f"{name} is at {str(address)[:80]!r}; give HOST:PORT, as WeightServer.address has it"
            )
        self.name, self._address, self._kv, self._timeout = name, address, kv, timeout_s
        self._headers = {"Authorization": f"Bearer {token.hex()}"}
        self._prepared: UpdateManifest | None = None
        """What may be under way there: until the engine has said otherwise it is taken to be."""
        self._asked = False
        """Whether the engine was told to publish it."""
        self._published: str | None = None
        self._follows: WeightVersion | None = None
        """What served before that."""
        with self._connected() as call:
            self._may_serve: tuple[WeightVersion, ...] = (self._current(call),)
            """By what this target knows; two where an answer was lost. Whoever else published since is not overwritten."""

    def take_over(self) -> WeightVersion:
        """For a trainer that is started where another was killed: end what that left under way, and say what serves now."""
        with self._connected() as call:
            serves = msgspec.json.decode(call("DELETE", "/updates", b"", {}), type=WeightVersion)
        self._prepared, self._asked, self._may_serve = None, False, (serves,)
        return serves

    def prepare(self, update: UpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """On the engine's disk when this returns."""
        self._forget()  # left by an `abort` that was lost, it would be in the way
        with self._connected() as call:
            current = self._current(call)
            expected = current if current in self._may_serve else self._may_serve[-1]
            try:
                call("POST", "/updates", encode_update(update), {EXPECTED: quote(expected.label)})
            except EngineUnreachable:
                self._prepared = update  # it may have come, and only the answer be lost
                raise
            self._prepared, self._follows, self._may_serve = update, expected, (expected,)
            for record in update.weights.tensors:
                content = _content(tensors[record.name])
                sums = {DIGEST: hashlib.sha256(content).hexdigest()}
                call("PUT", f"/updates/{update.identity}/{quote(record.name, safe='')}", content, sums)
            call("POST", f"/updates/{update.identity}/prepare", b"", {})

    def publish(self) -> None:
        """Served when this returns. Where no answer comes the engine is asked what it serves; where it cannot be, or serves the
        old version, this raises, and `abort` ends it either way."""
        if (update := self._prepared) is None:
            raise OutOfOrder(f"{self.name} has no update to publish; prepare one first")
        self._asked, self._published = True, update.version
        self._may_serve = (*self._may_serve, update.weight_version)
        with self._connected() as call:
            try:
                call("POST", f"/updates/{update.identity}/publish", b"", {KV: self._kv})
            except (EngineUnreachable, OutOfOrder):  # the second: it was published when it was asked before
                if self._current(call) != update.weight_version:
                    raise
        self._prepared, self._asked, self._may_serve = None, False, (update.weight_version,)

    def abort(self) -> None:
        """The old version serves on, or again: a call to publish of which nothing was heard may have come."""
        update, asked = self._prepared, self._asked
        # First, so that a call that is still on its way is refused when it comes.
        if update is None or self._forget() or not asked:
            return
        with self._connected() as call:
            served = self._current(call) == update.weight_version
        if served:
            self.roll_back()

    def roll_back(self) -> None:
        """Of what this target was published last."""
        if self._published is None:
            raise OutOfOrder(f"{self.name} was published nothing by this publisher")
        with self._connected() as call:
            if self._follows is not None:
                self._may_serve = (*self._may_serve, self._follows)
            try:
                said = call("POST", "/rollback", b"", {EXPECTED: quote(self._published)})
                serves = msgspec.json.decode(said, type=WeightVersion)
            except EngineUnreachable:
                if (serves := self._current(call)).label == self._published:
                    raise
            self._may_serve = (serves,)

    def _forget(self) -> bool:
        """Have the engine forget what may be under way; False where it was not: never begun, or over already."""
        if (update := self._prepared) is None:
            return False
        with self._connected() as call:
            try:
                call("DELETE", f"/updates/{update.identity}", b"", {})
                forgot = True
            except OutOfOrder:
                forgot = False
        self._prepared, self._asked = None, False
        return forgot

    @staticmethod
    def _current(call: Call) -> WeightVersion:
        return msgspec.json.decode(call("GET", "/version", b"", {}), type=WeightVersion)

    @contextmanager
    def _connected(self) -> Iterator[Call]:
        connection = HTTPConnection(self._address, timeout=self._timeout)

        def call(verb: str, path: str, content: bytes, headers: Mapping[str, str]) -> bytes:
            try:
                connection.request(verb, path, content, {**self._headers, **headers})
                answer = connection.getresponse()
                said = answer.read()
            except (OSError, HTTPException) as error:
                connection.close()  # half a call would be in the way of the next
                raise EngineUnreachable(
                    f"{self.name} at {self._address} did not answer {verb} {path[:40]}: {error}"
                ) from error
            if answer.status != HTTPStatus.OK:
                raise _error(said, self.name)
            return said

        try:
            yield call
        finally:
            connection.close()


def _error(said: bytes, name: str) -> ZerodriftError:
    try:
        refusal = msgspec.json.decode(said, type=_Refusal)
    except msgspec.MsgspecError:
        return EngineError(f"{name} answered {said[:200]!r}; is it a zerodrift.sync.http.WeightServer?")
    return _BY_CODE.get(refusal.code, EngineError)(f"{name}: {refusal.message}")


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
