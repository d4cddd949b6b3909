"""`zerodrift doctor`: are these settings fit for RL? Asked of a command, a file or a server, before a token is made."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from zerodrift.cli import console
from zerodrift.cli.console import JsonOption
from zerodrift.core.errors import ConfigError
from zerodrift.doctor.secrets import HIDDEN
from zerodrift.doctor.setting import FileKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerodrift.doctor.diagnosis import Diagnosis
    from zerodrift.doctor.setting import Settings, Target, Value


HOTTEST = 2
CANNOT_TELL = 3
_PUT_BACK = f"secrets are not shown; put them back before it is used, where {HIDDEN} stands"


TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="http://HOST:PORT, a vLLM command in quotes or in a file, or a YAML file."
    ),
]
FixOption = Annotated[
    bool, typer.Option("--fix", help="Print the command or file with what is wrong corrected, instead.")
]
RisksOption = Annotated[bool, typer.Option("--fix-risks", help="As --fix, and what is at risk too.")]
AllOption = Annotated[bool, typer.Option("--all", help="Also notes, and settings that are fine.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="What the trainer samples at, where TARGET does not say.")
]
KindOption = Annotated[FileKind | None, typer.Option(help="Whose file it is; default: told by its keys.")]
VersionOption = Annotated[
    str | None,
    typer.Option(
        metavar="X.Y", help="vLLM that will read it, where it is another than the one whose defaults we know."
    ),
]
ProbeOption = Annotated[
    bool, typer.Option("--probe/--no-probe", help="Ask a server for five completions of one or two tokens.")
]


# Help is shown with the line breaks of the docstring: keep its lines within the 78 columns of a terminal.
def command(
    target: TargetArgument,
    fix: FixOption = False,
    fix_risks: RisksOption = False,
    everything: AllOption = False,
    as_json: JsonOption = False,
    temperature: TemperatureOption = None,
    kind: KindOption = None,
    vllm_version: VersionOption = None,
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the server's key.")] = None,
    probe: ProbeOption = True,
) -> None:
    """Are these settings fit for RL, and what to type if not?

    Judges every setting in force (written, or the default of the version):
    wrong, risk, note, fine, or unknown where it cannot be seen. Notes and what
    is fine are shown with --all.
    Exit code: 0 nothing wrong, 1 something wrong, 2 usage, 3 cannot be judged.

    $ zerodrift doctor "vllm serve Qwen/Qwen3-8B --dtype bfloat16"
    $ zerodrift doctor http://127.0.0.1:8000 --temperature 0.7
    $ zerodrift doctor grpo.yaml --fix > fixed.yaml

    With --fix, what is wrong is changed in a single vLLM command or a YAML
    file, with --fix-risks what is at risk as well; the exit code is then that
    of the corrected text. Of a server it says what to change by hand.
    """
    from zerodrift.doctor.diagnosis import diagnose
    from zerodrift.doctor.setting import Origin, Setting
    from zerodrift.view.diagnosis import print_diagnosis

    if (fix or fix_risks) and as_json:
        raise ConfigError("--fix prints the corrected text, and --json the judgement; leave one of them out")
    _check_temperature(temperature)
    asked = {} if temperature is None else {"temperature": Setting("temperature", temperature, Origin.ASKED)}
    opened = _opened(target, kind, vllm_version, _key(api_key_env), probe=probe)
    if fix or fix_risks:
        raise typer.Exit(_fixed(opened, asked, risks=fix_risks).exit_code)
    diagnosis, _ = diagnose(opened, asked)
    if as_json:
        console.say_json(diagnosis)
    else:
        print_diagnosis(diagnosis, console.stdout(), everything=everything)
    raise typer.Exit(diagnosis.exit_code)


def _opened(
    target: str, kind: FileKind | None, version: str | None, key: str | None, *, probe: bool
) -> "Target":
    from zerodrift.doctor.open_target import is_url, open_target
    from zerodrift.doctor.other_version import of_version
    from zerodrift.doctor.server import Server

    if is_url(target):
        if version is not None:
            raise ConfigError("a running server says itself what is in force; leave out --vllm-version")
        return Server(target, api_key=key, probe=probe)
    opened = open_target(target, kind)
    return opened if version is None else of_version(opened, version)


def _fixed(opened: "Target", asked: "Settings", *, risks: bool) -> "Diagnosis":
    """Print the corrected text, and say what was changed and what is left; the diagnosis of what was printed."""
    from zerodrift.doctor.diagnosis import diagnose
    from zerodrift.doctor.judge import fixes
    from zerodrift.doctor.rule import Severity

    severities = (Severity.WRONG, Severity.RISK) if risks else (Severity.WRONG,)
    diagnosis, judgements = diagnose(opened, asked)
    changes = fixes(judgements, severities)
    fixed, new = opened.corrected(changes), changes
    # What a change brings into force is judged too, and each setting is changed once.
    while fixed is not None and new:
        diagnosis, judgements = diagnose(fixed, asked)
        left = fixes(judgements, severities)
        new = {name: value for name, value in left.items() if name not in changes}
        changes |= new
        fixed = fixed.corrected(new) or fixed
    if fixed is not None:
        console.say(fixed.printed().removesuffix("\n"))
        if HIDDEN in fixed.printed():
            typer.echo(_PUT_BACK, err=True)
    _say_changes(opened, changes, fixes(judgements, severities), diagnosis, edited=fixed is not None)
    _say_what_is_left(diagnosis, risks=risks)
    return diagnosis


def _check_temperature(temperature: float | None) -> None:
    """vLLM 0.32 refuses a request outside of this, and what is not a number compares with nothing."""
    if temperature is not None and not 0 <= temperature <= HOTTEST:
        raise ConfigError(f"--temperature is {temperature}; vLLM samples at 0 to {HOTTEST}")


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"--api-key-env names {variable}, which is not set; export it first")
    return key


def _say_changes(
    opened: "Target",
    changes: "Mapping[str, Value]",
    left: "Mapping[str, Value]",
    diagnosis: "Diagnosis",
    *,
    edited: bool,
) -> None:
    """On stderr, so that the text can be piped on."""
    if changes and not edited:
        typer.echo("--fix edits a single vLLM command or a YAML file; here, change by hand:", err=True)
    for name, value in changes.items():
        typed = opened.typed(name, value)
        word = "by hand" if name in left else "changed"
        typer.echo(f"{word}: {typed}" if typed else f"not set here: {name} {value}", err=True)
    if diagnosis.unseen:
        typer.echo(
            f"The command that started this server cannot be known from here. {diagnosis.unseen}", err=True
        )
    elif not changes:
        typer.echo(
            "nothing that can be changed here" if diagnosis.exit_code else "nothing to change", err=True
        )


def _say_what_is_left(diagnosis: "Diagnosis", *, risks: bool) -> None:
    """Why the exit code is what it is, and what --fix leaves alone."""
    from zerodrift.doctor.rule import Severity
    from zerodrift.view.visible import LONGEST_TYPED, visible

    for advice in diagnosis.findings:
        if advice.severity is Severity.WRONG:
            cure = "; ".join([*advice.type, *([advice.do] if advice.do else [])])
            left = f"still wrong: {advice.title} {advice.value}: {advice.message} {cure}"
            typer.echo(visible(left, LONGEST_TYPED), err=True)
    if diagnosis.exit_code == CANNOT_TELL:
        hidden = [row.title for row in diagnosis.settings if row.severity is Severity.UNKNOWN]
        typer.echo(f"cannot be seen from here: {', '.join(hidden)}", err=True)
    at_risk = [advice.title for advice in diagnosis.findings if advice.severity is Severity.RISK]
    if at_risk:
        more = "" if risks else "; --fix-risks takes these as well"
        typer.echo(f"at risk: {', '.join(at_risk)}{more}", err=True)
