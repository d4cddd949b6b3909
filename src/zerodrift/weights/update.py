"""What a trainer says about new weights before it sends one of them. Torch-free.

    {"digest": sha256 of the manifest as it stands here, "manifest": {…}}

The bytes are canonical: what decodes and encodes to other bytes (a key given twice, a space) is refused.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from zerodrift.core import require
from zerodrift.core.errors import DigestMismatch, InvalidValue, ModelError, SchemaMismatch
from zerodrift.core.frozen import freeze
from zerodrift.core.version import WeightVersion
from zerodrift.weights.manifest import Manifest, TensorRecord

SCHEMA = "zerodrift.update/1"
MOST_MANIFEST_BYTES = 64 * 2**20
"""A model of 100,000 tensors needs 15 MB."""
MOST_LABEL = 200
_FILE = re.compile(r"[\w.\-]{1,200}\.safetensors", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 4


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file of an update that travels as files."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        """A name and no path, and a digest."""
        if not isinstance(self.name, str) or not _FILE.fullmatch(self.name) or self.name.startswith("."):
            raise InvalidValue(
                f"a weight file is called {str(self.name)[:80]!r}; give a plain name, as model.safetensors"
            )
        require.whole(InvalidValue, f"the size of {self.name}", self.nbytes, "it counts bytes", 8, 2**42)
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise InvalidValue(f"{self.name} has sha256 {str(self.sha256)[:40]!r}; it is 64 hex digits")


class UpdateManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of the weights: what it is called, what it follows, and every tensor of it."""

    schema: str = SCHEMA
    version: str
    """Its label. A label is used once: a second set of weights of that name is a replay or a mix-up."""
    parent: WeightVersion | None = None
    """The version that its trainer published before; None for the first."""
    weights: Manifest
    """`tensors` are sent; `buffers` are those beside a checkpoint, held against the engine's own and never sent."""
    tied: Mapping[str, str] = {}
    """Names that share the memory of another, as `lm_head.weight` that of the embeddings: to the one that is sent."""
    files: tuple[FileRecord, ...] = ()
    """Where the tensors travel as files."""

    def __post_init__(self) -> None:
        """One that can be true."""
        if self.schema != SCHEMA:
            raise SchemaMismatch(f"an update has schema {self.schema!r}, and this version reads {SCHEMA!r}")
        _check_label(self.version)
        require.instance(InvalidValue, "parent", self.parent, WeightVersion | None)
        require.instance(InvalidValue, "weights", self.weights, Manifest)
        if self.parent is not None and self.parent.label == self.version:
            raise InvalidValue(f"version {self.version!r} says that it follows itself")
        if not self.weights.tensors:
            raise InvalidValue(
                f"version {self.version!r} lists no tensor; an update is a whole set of weights"
            )
        freeze(self, "tied")
        _check_ties(self)
        require.each(InvalidValue, "files", self.files, FileRecord)
        names = [file.name for file in self.files]
        if names != sorted(set(names)):
            raise InvalidValue(f"files are {names[:_SHOWN]}; each stands once, sorted by name")

    @property
    def weight_version(self) -> WeightVersion:
        """Label and digest, as engines report them: the digest of the tensors alone."""
        return WeightVersion(self.version, Manifest(self.weights.tensors).digest)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(record.nbytes for record in self.weights.tensors)

    @property
    def identity(self) -> str:
        """sha256 over all that is said of the weights, in whichever files they travel."""
        return msgspec.structs.replace(self, files=()).digest

    @property
    def digest(self) -> str:
        """sha256 over all that is said."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    manifest: UpdateManifest


def encode_update(update: UpdateManifest) -> bytes:
    """As it travels."""
    return msgspec.json.encode(_Sealed(update.digest, update))


def decode_update(content: bytes, where: str) -> UpdateManifest:
    """What `content` says, where it can be believed; `where` is for messages."""
    if len(content) > MOST_MANIFEST_BYTES:
        raise InvalidValue(f"{where} has {len(content)} bytes; {MOST_MANIFEST_BYTES} at most are read")
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{where} is no manifest of an update: {error}") from error
    if msgspec.json.encode(sealed) != content:
        raise InvalidValue(f"{where} is not in canonical form: a key stands twice, or something was added")
    if sealed.digest != sealed.manifest.digest:
        raise DigestMismatch(
            f"{where} says that its digest is {sealed.digest[:80]}, and it is {sealed.manifest.digest}; it was edited"
        )
    return sealed.manifest


def check_update(update: UpdateManifest, own: Manifest, own_ties: Mapping[str, str]) -> None:
    """It is a set of weights for the model that runs, whose manifest is `own`: refused by the name of what is off."""
    theirs = {record.name: record for record in update.weights.tensors}
    ours = {record.name: record for record in own.tensors}
    for what, names in (("lacks", ours.keys() - theirs.keys()), ("has unknown", theirs.keys() - ours.keys())):
        if names:
            raise ModelError(f"version {update.version!r} {what} {few(names)}; give the whole state dict")
    for name, record in ours.items():
        if theirs[name].form != record.form:
            raise ModelError(f"the new {name} is {theirs[name].form}, but the model has {record.form}")
    if dict(update.tied) != dict(own_ties):
        differing = {*update.tied.items()} ^ {*own_ties.items()}
        raise ModelError(
            f"version {update.version!r} and the model tie other names: {few(name for name, _ in differing)}; "
            "tie or untie the trainer's model as the engine's is"
        )
    if update.weights.buffers:
        _check_buffers(update, own)


def _check_buffers(update: UpdateManifest, own: Manifest) -> None:
    found = Manifest((), own.buffers).diff(Manifest((), update.weights.buffers))
    if found:
        raise ModelError(
            f"version {update.version!r} was made with other buffers than the engine has ({found}); rotary "
            "frequencies come from the configuration: compare the two"
        )


def few(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(set(names))
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _check_label(label: object) -> None:
    if not isinstance(label, str) or not 0 < len(label) <= MOST_LABEL or not label.isprintable():
        raise InvalidValue(
            f"a version is called {str(label)[:80]!r}; use 1 to {MOST_LABEL} printable characters, as 'step 7'"
        )


def _check_ties(update: UpdateManifest) -> None:
    records = {record.name: record for record in update.weights.tensors}
    for name, target in update.tied.items():
        # As a record, so that a name is held to what names are held to.
        TensorRecord(name, (), "bool", "0" * 32)
        if name in records:
            raise InvalidValue(f"{name} is listed as tied to {target} and as a tensor of its own")
        if target not in records:
            raise InvalidValue(f"{name} is tied to {str(target)[:80]!r}, which is not listed")
