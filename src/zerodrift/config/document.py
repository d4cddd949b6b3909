"""YAML in and out, without its surprises.

Three of them are removed: a key given twice is refused (YAML keeps the last), `1e-3` is a number (YAML 1.1 reads
a string, because there is no dot), and only plain values can be built (the safe loader).
"""

import re
from typing import Any

import yaml

from zerodrift.core.errors import ConfigError

_FLOAT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+\Z")


class _Loader(yaml.SafeLoader):
    # deep is a flag because PyYAML's is.
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key {key.value!r} is given twice; keep one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: object) -> bool:
        return True  # a list that occurs twice is written twice: people read these files

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Between single quotes U+0085 and its like are line breaks, and come back as spaces; between double
        # quotes they are escaped.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


# Both sides, so that the string "1e-3" is quoted on its way out and stays a string.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse(text: str, source: str) -> object:
    """The value that `text` holds; `source` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(f"{source} is not valid YAML: {error.problem}{where}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date such as 2026-13-45; RecursionError: thousands of nested brackets.
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def render(value: object) -> str:
    """YAML that `parse` reads back as `value`."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
