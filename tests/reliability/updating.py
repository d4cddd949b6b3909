"""Weight updates, to be killed: `updating.py DIR` forks an engine for every line on its stdin.

`update LABEL EXPECTED POINT` publishes a version, and dies by SIGKILL at POINT (`none`: it says `published`); `pause LABEL EXPECTED
POINT` is stopped there by SIGSTOP instead, looked past by a second engine, and goes on; `look` says which
version serves after a restart, whether its weights and its tokens are that version's, and how many versions are on the disk.
"""

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2]))
from tests.unit.engine.update_history import broken_promises

from zerodrift.core.errors import ArchiveLocked, VersionConflict
from zerodrift.core.request import SamplingParams
from zerodrift.engine.engine import Engine
from zerodrift.engine.loop import EngineLoop
from zerodrift.engine.updates import Updates
from zerodrift.models.testbed_config import CONFIGS
from zerodrift.weights import files, registry
from zerodrift.weights.digest import checkpoint_state, model_digest
from zerodrift.weights.of_model import update_of

POINTS = {
    "staged": "old",
    "verified": "old",
    "writing weights": "old",
    "committed": "old",
    "writing the log": "old",
    "swap begun": "new",
    "swap done": "new",
}
"""Where it dies, and which version serves after it."""
FIRST = "v0"
PARAMS = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "max_position_embeddings": 96,
}


def model_of(label: str) -> Any:
    """A function of the label: whoever looks can make it again."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIGS["qwen3"], **SIZES})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + int(label[1:]) / 64)
    return model


def loop_of(label: str) -> EngineLoop:
    return EngineLoop(Engine(model_of(label), num_blocks=16, block_size=4, version=label))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


ENDS = [signal.SIGKILL]
"""What a process does to itself at its point; by SIGSTOP it is there again afterwards."""


def die(*_: object) -> None:
    os.kill(os.getpid(), ENDS[0])


def half_written(only: bytes) -> None:
    """Die in the middle of what begins like the line, or the file, that is meant."""
    real = registry.write_all

    def write_all(handle: int, content: bytes) -> None:
        if only in content:
            real(handle, content[: len(content) // 2])
            die()
            registry.write_all = files.write_all = real
            content = content[len(content) // 2 :]
        real(handle, content)

    registry.write_all = files.write_all = write_all


def plant(point: str) -> None:
    """Die while the version is published, or right before."""
    if point == "committed":
        die()
    if point == "writing the log":
        half_written(b'"kind":"published"')
    if point == "swap begun":
        copied = iter(range(5))
        real = torch.Tensor.copy_

        def copy_(to: torch.Tensor, *rest: Any) -> torch.Tensor:
            if next(copied, None) is None:
                die()
                torch.Tensor.copy_ = real  # type: ignore[method-assign]
            return real(to, *rest)

        torch.Tensor.copy_ = copy_  # type: ignore[method-assign]
    if point == "swap done":
        forget = Updates._forget_oldest

        def _forget_oldest(self: Updates) -> None:
            die()
            forget(self)

        Updates._forget_oldest = _forget_oldest  # type: ignore[method-assign]


def update(directory: Path, label: str, expected: str, point: str) -> None:
    loop = loop_of(FIRST)
    versions, model = Updates(loop, directory, retain=2), model_of(label)
    manifest = update_of(model, label)
    try:
        under_way = versions.begin(manifest, expected)
    except VersionConflict:
        say("refused", versions.published(manifest))
        return
    for name, tensor in checkpoint_state(model).items():
        under_way.push(name, tensor)
    if point == "staged":
        die()
    under_way.verify()
    if point == "verified":
        die()
    if point == "writing weights":
        half_written(b"lm_head.weight")
    under_way.commit()
    plant(point)
    under_way.publish()
    say("published", versions.current.label)


def look(directory: Path) -> None:
    loop = loop_of(FIRST)
    try:
        versions = Updates(loop, directory, retain=2)
    except ArchiveLocked:
        say("locked")
        return
    current, model = versions.current, loop.engine.model
    reference = Engine(copy.deepcopy(model_of(current.label)), num_blocks=16, block_size=4)
    (expected,) = reference.generate([5, 6, 7], PARAMS)
    (found,) = loop.submit([5, 6, 7], PARAMS).result()
    kept = len(list((directory / "weights").iterdir()))
    whole = model_digest(model) == current.digest == model_digest(reference.model)
    whole &= broken_promises(loop, versions, directory, retain=2) == []
    say("serves", current.label, whole, found.logprobs == expected.logprobs, kept)


def main(directory: Path) -> None:
    say("ready")
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        child = forked(verb, directory, rest)
        if verb == "pause":
            _, status = os.waitpid(child, os.WUNTRACED)
            say("stopped" if os.WIFSTOPPED(status) else "ended-early")
            os.waitpid(forked("look", directory, ""), 0)
            os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
        say("ended", os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def forked(verb: str, directory: Path, rest: str) -> int:
    child = os.fork()
    if child == 0:
        if verb == "pause":
            ENDS[0] = signal.SIGSTOP
        if verb == "look":
            look(directory)
        else:
            label, expected, point = rest.split(" ", 2)
            update(directory, label, expected, point)
        os._exit(0)
    return child


if __name__ == "__main__":
    main(Path(sys.argv[1]))
