"""Nothing that a checkpoint, a dump or an engine sends may become code.

Read from the syntax tree, so that a comment about pickle is allowed and `from torch import load` is not.
"""

import ast

import pytest

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system")}
UNSAFE_LOADERS = {"Loader", "FullLoader", "UnsafeLoader", "CLoader"}


def offences(tree: ast.Module) -> list[str]:
    """What in `tree` could run code that came from outside, with its line."""
    return [
        f"line {getattr(node, 'lineno', 0)}: {what}" for node in ast.walk(tree) for what in _offences_of(node)
    ]


def _offences_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names if name.name.partition(".")[0] in FORBIDDEN_MODULES]
        case ast.ImportFrom(module=str(module), names=names):
            if module.partition(".")[0] in FORBIDDEN_MODULES:
                return [module]
            return [f"{module}.{name.name}" for name in names if (module, name.name) in FORBIDDEN_ATTRIBUTES]
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            unsafe = owner == "yaml" and attribute in UNSAFE_LOADERS
            return [f"{owner}.{attribute}"] if unsafe or (owner, attribute) in FORBIDDEN_ATTRIBUTES else []
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            return [f"{name}()"]
        case ast.keyword(arg="trust_remote_code", value=value):
            # Anything but a literal False might be True.
            return [] if isinstance(value, ast.Constant) and value.value is False else ["trust_remote_code"]
        case ast.keyword(arg="allow_pickle" | "shell", value=value):
            return [] if isinstance(value, ast.Constant) and value.value is False else [str(node.arg)]
        case _:
            return []


def test_the_package_is_safe(sources: dict[str, ast.Module]) -> None:
    found = {path: offences(tree) for path, tree in sources.items()}
    assert not {path: what for path, what in found.items() if what}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import dill.source",
        "torch.load(path)",
        "read = torch.load",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "def f():\n    import pickle",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "os.system(text)",
    ],
)
def test_a_planted_offence_is_seen(code: str) -> None:
    assert offences(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "'pickle'",
        "model.eval()",
        "safetensors.torch.load_file(path)",
        "re.compile(text)",
        "f(trust_remote_code=False)",
        "class L(yaml.SafeLoader): pass",
        "from json import load",
    ],
)
def test_what_only_looks_like_one_is_allowed(code: str) -> None:
    assert not offences(ast.parse(code))
