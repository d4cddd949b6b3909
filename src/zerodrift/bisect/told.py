"""The answer of a search, for people."""

from zerodrift.bisect.records import BisectAnswer
from zerodrift.bisect.states import ChangeKind

CHANGED = {
    ChangeKind.SEMANTICS: "What the logprobs mean changed",
    ChangeKind.NUMBERS: "The numbers changed",
    ChangeKind.SAMPLING: "Which tokens a seed draws changed",
}
COMPUTES = ("torch", "transformers", "tokenizers", "numpy", "triton", "intel-openmp")
STATUS = {True: "changed", False: "same", None: "–"}
WIDTH = 10
"""Of the longest kind, and a blank."""


def lines(answer: BisectAnswer) -> list[str]:
    """First what changed with which, then what that rests on."""
    return [
        *_headline(answer),
        "",
        f"between {answer.before} and {answer.after}:",
        *(f"    {each.kind:{WIDTH}} {STATUS[each.differs]:8} {each.says}" for each in answer.findings),
        *_packages(answer),
        *_others(answer),
        *_doubts(answer),
        "",
        f"looked at {len(answer.looked)} of {answer.of}:",
        *_looked(answer),
    ]


def _headline(answer: BisectAnswer) -> list[str]:
    if not answer.skipped:
        return [f"{CHANGED[answer.kind]} with {answer.after}"]
    said = ", ".join((*answer.skipped, answer.after))
    return [
        f"{CHANGED[answer.kind]} with one of {said}",
        f"({len(answer.skipped)} of them cannot be judged)",
    ]


def _packages(answer: BisectAnswer) -> list[str]:
    """Those that numbers and samples hang on are named; of the others it is said how many there are."""
    named = {name: answer.packages[name] for name in COMPUTES if name in answer.packages}
    told = [f"{name} {before} → {after}" for name, (before, after) in named.items()]
    if more := len(answer.packages) - len(named):
        told.append(f"{more} more (tried.json has them)")
    return [f"    {'installed':{WIDTH}} otherwise: {', '.join(told)}"] if told else []


def _others(answer: BisectAnswer) -> list[str]:
    """Changes between the ends that were not followed, and did not come with this one."""
    here = {each.kind for each in answer.findings if each.differs}
    others = [each for each in answer.ends if each.differs and each.kind not in here]
    if not others:
        return []
    return [
        "",
        "between the ends, and not followed:",
        *(f"    {each.kind:{WIDTH}} {each.says}; follow it with --what {each.kind}" for each in others),
    ]


def _doubts(answer: BisectAnswer) -> list[str]:
    if not answer.unlike:
        return []
    are = "is" if len(answer.unlike) == 1 else "are"
    return [
        "",
        f"There is more than one change of this kind: {', '.join(answer.unlike)} {are} not as",
        "the neighbours on the same side. PointSearch again with such a one as an end.",
    ]


def _looked(answer: BisectAnswer) -> list[str]:
    width = max(len(each.name) for each in answer.looked)
    return [f"    {each.name:{width}}  {each.says}" for each in answer.looked]
