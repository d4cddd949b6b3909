"""`zerodrift init`: write a configuration to start from, and never over one that exists."""

from pathlib import Path
from typing import Annotated

import typer

from zerodrift.cli import console
from zerodrift.config import shipped
from zerodrift.config.shipped import Profile
from zerodrift.core.errors import ConfigError


def command(
    profile: Annotated[
        Profile, typer.Option(help="Which deployment the configuration is for.")
    ] = Profile.RL_TRAINING,
    out: Annotated[Path, typer.Option(help="Where to write it.")] = Path("zerodrift.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a commented configuration to start from.

    serving: throughput first; nothing is trained on the answers.
    rl-training: correctness first; logprobs that the trainer can reproduce.
    long-context: rollouts near and beyond the trained context.
    mixed-cluster: training and serving on one cluster, in pools of their own.

    A file that exists is never replaced without --force:

    $ zerodrift init
    $ zerodrift init --profile long-context --out audits/long.yaml
    """
    try:
        # "x" asks the file system, so that two runs at once cannot both think that they are first.
        with out.open("w" if force else "x", encoding="utf-8", newline="\n") as file:
            file.write(shipped.text(profile))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}); choose another place with --out, or replace what is there "
            "with --force"
        ) from error
    console.say(f"wrote {out} (profile {profile}); fill in model.path and where the engine is")
