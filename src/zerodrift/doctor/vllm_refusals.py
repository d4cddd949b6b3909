"""Would vLLM start at all? What it refuses: flags that it does not have, and values that they and variables do not take.

A value that is refused is in force nowhere, so nothing is to be said for or against it but this.
"""

import re
from collections.abc import Iterable, Mapping

from zerodrift.doctor.setting import Origin, Setting
from zerodrift.doctor.tables import Number, VllmName, vllm_names, vllm_options
from zerodrift.doctor.vllm_arguments import Argument, Parsed, hint

_MOST = 20
"""Of names in a sentence; some flags have forty choices."""
_SUFFIXED = re.compile(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]")  # decimals go with powers of ten alone


def refusal(argument: Argument) -> str | None:
    """Why vLLM would not start with it; None where it would."""
    return of_flag(argument) or of_value(argument)


def of_flag(argument: Argument) -> str | None:
    """Why there is no such flag, or none that takes a value."""
    options = vllm_options()
    if argument.candidates:
        return f"--{argument.name} could be {_listed(f'--{each}' for each in argument.candidates)}"
    if argument.name not in options.names:
        return hint(argument.name)
    if not argument.key and argument.values and argument.name in (*options.switches, *options.bare):
        instead = f" or --no-{argument.name}" if argument.name in options.switches else ""
        return f"--{argument.name} takes no value, only --{argument.name}{instead}"
    return None


def of_value(argument: Argument) -> str | None:
    """Why the flag does not take what stands behind it."""
    if not argument.values:
        return None
    choices = vllm_options().choices.get(argument.name)
    if choices is not None and argument.value not in choices:
        return f"--{argument.name} {argument.value} is none of {_listed(choices)}"
    number = vllm_options().numbers.get(argument.name)
    if number is not None and not _is_number(argument.value, number):
        return f"--{argument.name} {argument.value} is no number ({number})"
    return None


def of_variable(spec: VllmName, text: str) -> str | None:
    """Why vLLM stops at what a variable says."""
    if spec.kind != "switch" or spec.words or _is_number(text, "integer"):
        return None
    return f"{spec.env}={text} is no number: vLLM takes 1 or 0"


def of_variables(env: Mapping[str, str]) -> list[str | None]:
    """The same of each that is judged."""
    specs = [spec for spec in vllm_names().values() if spec.env in env]
    return [of_variable(spec, env[spec.env]) for spec in specs if spec.env is not None]


def without_refused(parsed: Parsed) -> Parsed:
    """What is left to judge."""
    return parsed._replace(arguments=tuple(each for each in parsed.arguments if refusal(each) is None))


def setting(reasons: Iterable[str | None]) -> Setting:
    """All of it in one line; None where vLLM has nothing against it."""
    said = dict.fromkeys(reason for reason in reasons if reason)
    return Setting("refused", "; ".join(said) or None, Origin.SET)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return ", ".join(every[:_MOST]) + more


def _is_number(text: str, kind: Number) -> bool:
    word = text.strip()
    if "with a suffix" in kind and _SUFFIXED.fullmatch(word):
        return True
    if kind == "with a suffix, or auto" and word.lower() == "auto":
        return True
    if kind == "decimal or none" and word in ("", "None"):
        return True
    try:
        float(word) if kind == "decimal or none" else int(word)
    except ValueError:
        return False
    return True
