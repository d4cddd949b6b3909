import pytest

from zerodrift.backends.server_log import KNOWN, READ_BYTES, last_error, why

OFFSET = "RuntimeError: CPU Generator does not use offset"
# As vLLM 0.32 prints it: the worker's traceback, then what every other process makes of it.
DIED = f"""\
(APIServer pid=410) INFO 11-16 18:20:01 [api_server.py:1] Started
(EngineCore pid=412) ERROR 11-16 18:20:11 [core.py:1012] Traceback (most recent call last):
(EngineCore pid=412) ERROR 11-16 18:20:11 [core.py:1012]   File "x.py", line 3, in <module>
(EngineCore pid=412) ERROR 11-16 18:20:11 [core.py:1012] {OFFSET}
(APIServer pid=410) ERROR 11-16 18:20:11 [async_llm.py:708] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=410) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (DIED, OFFSET),
        ("ValueError: first\nTraceback\nKeyError: 'second'\n", "KeyError: 'second'"),
        (
            "vllm.v1.engine.exceptions.EngineDeadError: see above",
            "vllm.v1.engine.exceptions.EngineDeadError: see above",
        ),
        ("an Error of no form\nINFO all is well", None),
        ("", None),
    ],
    ids=["vllm", "last", "only a pointer", "none", "empty"],
)
def test_the_last_error_that_names_a_cause(text, error):
    assert last_error(text) == error


def test_the_log_its_last_error_and_the_known_remedy(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("x" * 3 * READ_BYTES + "\n" + DIED)
    told = why(log, "otherwise")
    assert str(log) in told
    assert OFFSET in told
    assert "engine.max_num_batched_tokens" in told
    log.write_text("ValueError: another\n")
    assert not any(remedy in why(log, "otherwise") for remedy in KNOWN.values())


def test_a_log_that_cannot_be_read_changes_no_words(tmp_path):
    assert why(tmp_path / "nowhere.log", "otherwise") == "otherwise"
