"""What `Monitor.observe` is given, read out of a generation batch of TRL's."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerodrift.core.errors import InvalidValue
from zerodrift.integrations.trl_sampling import drawn_with

VERSION_FIELD = "weight_version"
"""What a `rollout_func` may return beside its tokens: the trainer's global_step whose weights made each completion, one
number each, or one for each token."""
ENVIRONMENT_FIELD = "environment"
SAMPLING, OLD = "sampling_per_token_logps", "old_per_token_logps"
MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def loss_mask(output: Mapping[str, Any]) -> torch.Tensor:
    """Tokens that TRL's loss counts: of completions, not padding, and made by the model."""
    mask: torch.Tensor = output["completion_mask"]
    return mask * output["tool_mask"] if "tool_mask" in output else mask


def batch_of(trainer: Any, inputs: Sequence[Mapping[str, Any]], output: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but rewards and step."""
    mask = loss_mask(output).bool()
    given = {
        "old_logprobs": old_logprobs(trainer, output),
        "mask": mask,
        "prompt_ids": prompts_of(output),
        "completion_ids": output["completion_ids"].cpu().numpy(),
        "versions": versions_of(trainer, inputs, mask.shape[1]),
        "trainer_version": int(trainer.state.global_step),
        "groups": groups_of(inputs, prompts_of(output)),
    }
    if (sampling := drawn_with(trainer)) is not None:
        given["sampling"] = sampling
    if SAMPLING in output:
        given["behavior_logprobs"] = output[SAMPLING]
    return given


def old_logprobs(trainer: Any, output: Mapping[str, Any]) -> torch.Tensor:
    """TRL's own where it made them; else the same forward is made here, and not handed to TRL."""
    if output.get(OLD) is not None:
        made: torch.Tensor = output[OLD]
        return made
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    more = {name: output[name] for name in MULTIMODAL if output.get(name) is not None}
    # Dropout would draw from the stream that the training draws from, and watching must not change it.
    with torch.no_grad(), torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        found: torch.Tensor = trainer._get_per_token_logps_and_entropies(  # noqa: SLF001 - TRL has no public forward
            trainer.model,
            ids,
            attended,
            output["completion_ids"].size(1),
            batch_size=trainer.args.per_device_train_batch_size,
            **more,
        )[0]
    return found


def prompts_of(output: Mapping[str, Any]) -> list[list[int]]:
    """Without padding."""
    return [
        row[kept].tolist()
        for row, kept in zip(output["prompt_ids"].cpu(), output["prompt_mask"].bool().cpu(), strict=True)
    ]


def versions_of(trainer: Any, inputs: Sequence[Mapping[str, Any]], width: int) -> Any:
    """What a rollout_func says; else what TRL believes: the step at which it last loaded weights, or the one of now."""
    if any(VERSION_FIELD in row for row in inputs):
        # One that is missing stays None, which the monitor calls unknown, and so do all of them where a rollout_func knows none:
        # its server was started anew, and holds anything but the newest weights.
        told = [row.get(VERSION_FIELD) for row in inputs]
        return [_padded(each, width) if isinstance(each, list | tuple) else each for each in told]
    return int(trainer._last_loaded_step if trainer.use_vllm else trainer.state.global_step)  # noqa: SLF001


def _padded(versions: Sequence[int], width: int) -> list[int]:
    """As wide as the arrays of logprobs; what is behind the last token is masked."""
    return [*versions, *[versions[-1] if versions else 0] * (width - len(versions))]


def groups_of(inputs: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]]) -> dict[str, list[str]]:
    """Samples of one prompt, which are not independent; and environments, where rows have one."""
    groups = {"prompt": [hashlib.sha256(repr(ids).encode()).hexdigest()[:16] for ids in prompts]}
    if all(ENVIRONMENT_FIELD in row for row in inputs):
        groups["environment"] = [str(row[ENVIRONMENT_FIELD]) for row in inputs]
    return groups


def rewards_of(trainer: Any, gathered: torch.Tensor, count: int) -> torch.Tensor:
    """One number per completion of this process, NaN where no reward function had an answer."""
    first = trainer.accelerator.process_index * count
    mine = gathered[first : first + count]
    if len(mine) != count:
        raise InvalidValue(f"{len(mine)} rewards for {count} completions; TRL was expected to give one each")
    total: torch.Tensor = (mine * trainer.reward_weights.to(mine.device)).nansum(dim=1)
    total[mine.isnan().all(dim=1)] = torch.nan
    return total
