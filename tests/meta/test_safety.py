"""Nothing that a checkpoint, a dump or an engine sends may become code.

Read from the syntax tree, so that a comment about pickle is allowed and `from torch import load` is not.
"""

import ast

import pytest

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("os", "system"),
    *(
        ("yaml", name)
        for name in ("unsafe_load", "full_load", "Loader", "FullLoader", "UnsafeLoader", "CLoader")
    ),
}
FORBIDDEN_FLAGS = {"trust_remote_code", "allow_pickle", "shell"}


def offences(tree: ast.Module) -> list[str]:
    """What in `tree` could run code that came from outside."""
    return [what for node in ast.walk(tree) for what in (*_imports(node), *_uses(node)) if what]


def _imports(node: ast.AST) -> list[str]:
    names: list[tuple[str, str]] = []
    if isinstance(node, ast.Import):
        names = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [(node.module or "", alias.name) for alias in node.names]
    return [
        f"line {node.lineno}: import of {module} {name}"
        for module, name in names
        if module.partition(".")[0] in FORBIDDEN_MODULES or (module, name) in FORBIDDEN_ATTRIBUTES
    ]


def _uses(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_ATTRIBUTES:
            return [f"line {node.lineno}: {owner}.{name}"]
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            return [f"line {node.lineno}: {name}()"]
        # Anything but a literal False might be True.
        case ast.keyword(arg=str(name), value=value) if name in FORBIDDEN_FLAGS:
            safe = isinstance(value, ast.Constant) and value.value is False
            return [] if safe else [f"line {node.lineno}: {name}={ast.unparse(value)}"]
    return []


def test_the_package_is_safe(sources: dict[str, ast.Module]) -> None:
    found = {path: offences(tree) for path, tree in sources.items()}
    assert not {path: what for path, what in found.items() if what}


PLANTED = """
import pickle | import os, pickle as p | from pickle import loads | import dill.source | torch.load(path)
read = torch.load | from torch import load | eval(text) | exec(text) | f = lambda: exec(text) | os.system(text)
f(trust_remote_code=True) | f(trust_remote_code=flag) | numpy.load(path, allow_pickle=True)
subprocess.run(text, shell=True) | yaml.load(text, Loader=yaml.Loader) | yaml.unsafe_load(text)
"""
HARMLESS = """
'pickle' | model.eval() | safetensors.torch.load_file(path) | re.compile(text) | f(trust_remote_code=False)
class L(yaml.SafeLoader): pass | from json import load
"""


@pytest.mark.parametrize("code", PLANTED.strip().replace("\n", " | ").split(" | "))
def test_a_planted_offence_is_seen(code: str) -> None:
    assert offences(ast.parse(code))
    assert offences(ast.parse(f"def f():\n    {code}"))


@pytest.mark.parametrize("code", HARMLESS.strip().replace("\n", " | ").split(" | "))
def test_what_only_looks_like_one_is_allowed(code: str) -> None:
    assert not offences(ast.parse(code))
