import pytest

from zerodrift.cli.main import main
from zerodrift.config import shipped
from zerodrift.config.load import load
from zerodrift.config.shipped import Profile


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["init", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("profile", Profile)
def test_a_profile_is_written_byte_for_byte(profile, tmp_path):
    out = tmp_path / "run.yaml"
    assert run("--profile", profile, "--out", str(out)) == 0
    assert out.read_bytes() == shipped.text(profile).encode()
    load(out)


def test_a_file_that_exists_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "zerodrift.yaml"
    out.write_text("mine")
    assert run() == 2
    assert out.read_text() == "mine"
    assert "[config/invalid]" in capsys.readouterr().err
    assert run("--force") == 0
    assert out.read_text(encoding="utf-8") == shipped.text(Profile.RL_TRAINING)


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_a_place_or_a_profile_that_there_is_not(flags, tmp_path):
    assert run("--out", str(tmp_path / "no" / "such" / "run.yaml"), *flags) == 2
    assert run("--out", str(tmp_path), *flags) == 2
    assert run("--profile", "rl", *flags) == 2
