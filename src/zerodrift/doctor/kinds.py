"""Whose configuration can a file be?"""

from enum import StrEnum


class FileKind(StrEnum):
    """Told by a file's keys, or by its owner."""

    VLLM = "vllm"
    TRL = "trl"
    PIPELINERL = "pipelinerl"
    ZERODRIFT = "zerodrift"
