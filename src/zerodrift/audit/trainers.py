"""The trainer's own forward, from what the user writes behind `--trainer`.

transformers                                    the checkpoint in fp32, padded micro-batches
transformers:dtype=bfloat16,autocast=bfloat16,packed=true,batch=8,device=cuda
transformers:base=./base,lora=./adapter         what the audited model is the merged form of
my_module:scorer                                an object with `score`, or a function of the model that gives one
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch

from zerodrift import models
from zerodrift.config.model import Device
from zerodrift.core import require
from zerodrift.core.errors import ConfigError, InvalidValue
from zerodrift.core.task import Scorer
from zerodrift.models.loading import dtype_of
from zerodrift.models.lora import attach
from zerodrift.models.placing import check_device, place
from zerodrift.tasks import user_objects

BUILT_IN = "transformers"
EXAMPLES = f"{BUILT_IN}, {BUILT_IN}:dtype=bfloat16,packed=true or my_module:scorer"


class TrainerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a training step runs the model, as far as it can change a logprob."""

    dtype: str = "float32"
    """Of the parameters."""
    autocast: str | None = None
    """Dtype of the autocast region around the forward; None: there is none."""
    packed: bool = False
    """Sequences of a micro-batch in one row, told apart by positions that restart."""
    batch: int = 4
    """Sequences in a micro-batch."""
    base: str | None = None
    """Model that is trained; None: the audited one."""
    lora: str | None = None
    """Directory of an adapter that is trained beside it."""
    device: Device = "cpu"
    """Where it computes."""

    def __post_init__(self) -> None:
        """Dtypes that exist, and at least one sequence."""
        dtype_of(self.dtype)
        if self.autocast is not None:
            dtype_of(self.autocast)
        require.whole(InvalidValue, "batch", self.batch, "a micro-batch holds at least one sequence", 1)


class TransformersTrainer:
    """A transformers model as the user trains it; no gradient is needed to read its logprobs."""

    def __init__(self, model: str | Path, options: TrainerOptions | None = None) -> None:
        """`model` as in `models.load`."""
        self.options = options or TrainerOptions()
        check_device(self.options.device)
        self.model = models.load(self.options.base or model, self.options.dtype)
        if self.options.lora is not None:
            self.model = attach(self.model, Path(self.options.lora))
        self.model = place(self.model, self.options.device)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Raw logprobs of tokens 1… of each sequence, with the softmax in fp32 as trainers take it."""
        scores = []
        for ids, logits_LV in zip(sequences, self._logits(sequences), strict=True):
            logprobs_LV = torch.log_softmax(logits_LV.float(), dim=-1)
            scores.append(logprobs_LV[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist())
        return scores

    def _logits(self, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        dtype, device = self.options.autocast, self.options.device
        for begin in range(0, len(sequences), self.options.batch):
            group = sequences[begin : begin + self.options.batch]
            with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype_of(dtype)):
                yield from self._packed(group) if self.options.packed else self._padded(group)

    def _padded(self, group: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        longest = max(map(len, group))
        ids_BL = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in group])
        mask_BL = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in group])
        logits_BLV = self.model(ids_BL, attention_mask=mask_BL, use_cache=False).logits
        return [logits_LV[: len(ids)] for ids, logits_LV in zip(group, logits_BLV, strict=True)]

    def _packed(self, group: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        ids_1L = torch.tensor([[token for ids in group for token in ids]])
        positions_1L = torch.tensor([[position for ids in group for position in range(len(ids))]])
        # No mask: transformers reads from the positions where sequences begin, and keeps them apart.
        logits_1LV: torch.Tensor = self.model(ids_1L, position_ids=positions_1L, use_cache=False).logits
        return torch.split(logits_1LV[0], [len(ids) for ids in group])


def open_trainer(spec: str, model: str | Path) -> Scorer:
    """The scorer that `spec` names, for this model."""
    name, _, rest = spec.partition(":")
    if name == BUILT_IN:
        return TransformersTrainer(model, _options(spec, rest))
    lacks = "has no method `score(sequences)`; see zerodrift.core.task.Scorer"
    scorer: Scorer = user_objects.load("trainer", spec, model, Scorer, EXAMPLES, lacks)
    return scorer


def _options(spec: str, text: str) -> TrainerOptions:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    try:
        return msgspec.convert(
            {key.strip(): value.strip() for key, _, value in pairs}, TrainerOptions, strict=False
        )
    except (msgspec.ValidationError, InvalidValue) as error:
        known = ", ".join(TrainerOptions.__struct_fields__)
        raise ConfigError(f"trainer {spec!r}: {error}; options are {known}, written as key=value") from error
