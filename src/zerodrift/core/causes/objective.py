"""Causes of layer `objective`: the numbers are right and used wrongly."""

from zerodrift.core.causes.entry import cause

OBJECTIVE = (
    cause(
        "objective/staleness",
        "Rollouts are older than the objective allows for: the difference is learning, not drift.",
        "bound the age of rollouts, or weight each token by the weights that made it",
    ),
    cause(
        "objective/sequence-ratio",
        "Ratios are multiplied over whole sequences, where a drift too small to see in a token decides.",
        "use token ratios or their geometric mean, and watch the sequence ESS",
    ),
    cause(
        "objective/reward-misbound",
        "Rewards are bound to other completions than they were given for.",
        "match rewards to completions by id, never by order of arrival",
    ),
)
