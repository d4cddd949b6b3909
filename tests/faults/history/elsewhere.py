"""Bugs that are not run: no comparison of logprobs could show them, or no testbed model has the part that broke."""

from history.bug import Elsewhere

ELSEWHERE = (
    Elsewhere(
        reported="OpenRLHF#1319",
        repository="OpenRLHF/OpenRLHF",
        happened="The entropy in the loss is that of logits without the sampling temperature.",
        unseen="the logprobs on both sides are right; an audit does not see what the objective makes of them",
    ),
    Elsewhere(
        reported="trl#5814",
        repository="huggingface/trl",
        happened="Ratios multiplied over a whole sequence weight long completions down to nothing.",
        unseen="engine and trainer agree to within rounding, and an audit rightly passes them",
    ),
    Elsewhere(
        reported="verl#6806",
        repository="verl-project/verl",
        happened="Fractions of clipped sequences are computed from weights that are already clipped, and always read 0.",
        unseen="it is a metric of the trainer; nothing that it measures was wrong",
    ),
    Elsewhere(
        reported="verl#7207",
        repository="verl-project/verl",
        happened="Interrupted rollouts that are resumed overrun their budget of tokens.",
        unseen="an audit asks for whole completions, and interrupts none",
    ),
    Elsewhere(
        reported="vllm#52479",
        repository="vllm-project/vllm",
        happened="The drafter keeps its old weights after an update, and hardly any draft is accepted.",
        unseen="verification keeps tokens and logprobs right; the loss is one of speed alone",
    ),
    Elsewhere(
        reported="verl#6896",
        repository="verl-project/verl",
        happened="Experts packed into one three-dimensional tensor are mapped wrongly when weights are sent.",
        unseen="no testbed model has experts; mixtures have not been audited",
    ),
)
