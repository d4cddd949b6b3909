"""The profiles that ship with zerodrift: one complete, commented configuration per kind of deployment."""

from enum import StrEnum
from importlib.resources import files


class Profile(StrEnum):
    """Which deployment a configuration is for; each name is a file in `profiles/`."""

    SERVING = "serving"
    """Throughput first; nothing is trained on the answers."""
    RL_TRAINING = "rl-training"
    """Correctness first: rollouts whose logprobs the trainer can reproduce."""
    LONG_CONTEXT = "long-context"
    """Rollouts near and beyond the trained context."""
    MIXED_CLUSTER = "mixed-cluster"
    """Training and serving on one cluster, in pools of their own."""


def text(profile: Profile) -> str:
    """The file, comments included."""
    return (files("zerodrift.config") / "profiles" / f"{profile}.yaml").read_text(encoding="utf-8")
