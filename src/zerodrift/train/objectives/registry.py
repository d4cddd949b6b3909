"""Which objectives there are."""

from collections.abc import Mapping

from zerodrift.config.training import ObjectiveName
from zerodrift.train.advantage import leave_one_out, normalised
from zerodrift.train.objectives.base import Objective, RatioBounds, sequence_mean, token_mean
from zerodrift.train.objectives.grpo import grpo
from zerodrift.train.objectives.gspo import gspo
from zerodrift.train.objectives.ppo_clip import ppo_clip
from zerodrift.train.objectives.reinforce_loo import reinforce_loo

_USUAL = RatioBounds(0.2, 0.2)

OBJECTIVES: Mapping[ObjectiveName, Objective] = {
    ObjectiveName.REINFORCE_LOO: Objective(_USUAL, leave_one_out, reinforce_loo, token_mean),
    ObjectiveName.GRPO: Objective(_USUAL, normalised, grpo, sequence_mean),
    ObjectiveName.PPO_CLIP: Objective(_USUAL, leave_one_out, ppo_clip, token_mean),
    ObjectiveName.GSPO: Objective(RatioBounds(3e-4, 4e-4), normalised, gspo, sequence_mean),
}
