import pytest

from zerodrift import models
from zerodrift.audit.recorded.ids_alone import IdsAlone, tokenizer_or_ids
from zerodrift.core.errors import ModelError


def test_ids_come_back_as_they_were():
    tokenizer = IdsAlone()
    assert tokenizer(tokenizer.decode([5, 0, 40], skip_special_tokens=False))["input_ids"] == [5, 0, 40]
    assert tokenizer("what only a tokenizer reads")["input_ids"] == []


def test_only_what_is_missing_is_done_without(tmp_path):
    checkpoint = models.materialise("testbed:llama", tmp_path / "checkpoint")
    assert not isinstance(tokenizer_or_ids(checkpoint), IdsAlone)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError):
        tokenizer_or_ids(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    assert isinstance(tokenizer_or_ids(checkpoint), IdsAlone)
