"""A vLLM general plugin: applies the one fault named in EXAM_FAULT, or nothing."""
import os

_applied = None


def register():
    """Called by vLLM in every process; does nothing unless EXAM_FAULT is set."""
    global _applied
    name = os.environ.get("EXAM_FAULT", "").strip()
    if not name or _applied == name:
        return
    _applied = name
    from . import faults, faults_c  # noqa: F401

    faults.FAULTS[name].apply()
