"""A batch as the monitor takes it: flat numbers of every token, with versions, rewards and ids."""

from collections.abc import Sequence

from zerodrift.monitor.decision import Decision
from zerodrift.monitor.monitor import Monitor
from zerodrift.monitor.rewards import Output as OutputId
from zerodrift.train.learner import Learnt
from zerodrift.train.records import GroupRecord, output_id, version_number
from zerodrift.train.rescore import RescoredBatch


def judged(
    monitor: Monitor,
    step: int,
    groups: Sequence[GroupRecord],
    learnt: Learnt,
    rescored: RescoredBatch,
) -> Decision:
    """Before it is learnt from."""
    outputs = [output for group in groups for output in group.outputs]
    return monitor.observe(
        behavior_logprobs=[value for output in outputs for value in output.logprobs],
        old_logprobs=[value for row in learnt.logprobs for value in row.tolist()],
        rescored_logprobs=rescored.values,
        rescored_mask=rescored.scored,
        versions=[
            version_number(span.version)
            for output in outputs
            for span in output.versions
            for _ in range(span.start, span.end)
        ],
        trainer_version=step,
        lengths=[len(output.token_ids) for output in outputs],
        rewards=[reward for group in groups for reward in group.rewards],
        outputs=[OutputId(*output_id(output)) for output in outputs],
        groups={"prompt": [f"g{group.index}" for group in groups for _ in group.outputs]},
        reference_kl=learnt.kl,
        prompt_ids=[list(output.prompt_token_ids) for output in outputs],
        completion_ids=[list(output.token_ids) for output in outputs],
        sampling=outputs[0].sampling,
        step=step,
    )
