"""Public bugs of RL frameworks and engines, re-enacted: would an audit have caught them? (docs/would-have-caught.md)"""

from history.bug import KNOWN, reenacted
from history.caches import CACHES
from history.delivery import DELIVERY
from history.path import PATH
from history.prompts import PROMPTS
from history.recorded import RECORDED
from history.reload import RELOAD
from history.reporting import REPORTING
from history.sampling import SAMPLING
from history.trainer import TRAINER

BUGS = (*REPORTING, *SAMPLING, *PROMPTS, *PATH, *DELIVERY, *RELOAD, *CACHES, *TRAINER, *RECORDED)
ELSEWHERE = tuple(reenacted(reported, None) for reported, known in KNOWN.items() if "causes" not in known)
"""Listed, and not run."""

__all__ = ["BUGS", "ELSEWHERE"]
