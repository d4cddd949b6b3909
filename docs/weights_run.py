"""The run that docs/weights.md shows: two versions over one request, a replay, refusals, a rollback and a restart.

python docs/weights_run.py DIRECTORY
"""

import sys
from pathlib import Path

import torch

import zerodrift as zd
from zerodrift import models
from zerodrift.core.errors import ZerodriftError
from zerodrift.engine.replay import check_replay
from zerodrift.engine.updates import Updates
from zerodrift.weights.digest import checkpoint_state
from zerodrift.weights.files import write_update
from zerodrift.weights.of_model import update_of


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def train(model: torch.nn.Module) -> None:
    """A step of the optimizer, as far as this run needs one."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.001)


def publish(updates: Updates, model: torch.nn.Module, label: str, kv: str) -> None:
    with updates.begin(update_of(model, label, updates.current), expected=updates.current) as update:
        for name, tensor in checkpoint_state(model).items():
            update.push(name, tensor)
        update.verify()
        update.commit()
        version = update.publish(kv=kv)
    say("published", version.label, str(version.digest)[:12])


def refused(what: str, act: object) -> None:
    try:
        act()  # type: ignore[operator]
    except ZerodriftError as error:
        say(f"{what}: [{error.code}] {error}")


def engine() -> zd.Engine:
    return zd.Engine("testbed:qwen3", num_blocks=64, version="step 0")


def train_and_serve(directory: Path) -> None:
    trainer = models.load("testbed:qwen3", dtype="float32")
    with zd.EngineLoop(engine()) as loop, Updates(loop, directory / "versions") as updates:
        request = loop.submit("3+4=", zd.SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
        next(iter(request))
        for label in ("step 1", "step 2"):
            train(trainer)
            publish(updates, trainer, label, kv="keep")
        (output,) = request.result()
        for segment in output.lineage:
            say(f"  KV {segment.start:3} to {segment.end:3} was written under {segment.version.label}")
        check_replay(loop.engine, output, updates.weights_of)
        say(f"replayed: {len(output.token_ids)} tokens, every bit")

        refused("late", lambda: updates.begin(update_of(trainer, "step 3"), expected="step 1"))
        refused("replay", lambda: updates.begin(update_of(trainer, "step 1"), expected="step 2"))
        write_update(directory, "step-3", update_of(trainer, "step 3"), checkpoint_state(trainer))
        with (directory / "step-3" / "model.safetensors").open("r+b") as file:
            file.seek(5_000_000)
            file.write(b"\x00\x01")
        refused("file", lambda: updates.from_directory(directory, "step-3", expected="step 2"))
        trainer.lm_head.weight.data[7, 7] = torch.nan
        refused("NaN", lambda: publish(updates, trainer, "step 3", kv="keep"))
        say("rolled back to", updates.rollback(expected="step 2").label)


def restart(directory: Path) -> None:
    with zd.EngineLoop(engine()) as loop, Updates(loop, directory / "versions") as updates:
        say("after a restart", loop.engine.version.label, "of", *(each.label for each in updates.retained))


if __name__ == "__main__":
    train_and_serve(Path(sys.argv[1]))
    restart(Path(sys.argv[1]))
