"""The agent's promise to the host: the standard library alone, Python 3.8."""

import ast
import os

import pytest

from .conftest import AGENT_FOLDER

MODULES = sorted(name for name in os.listdir(AGENT_FOLDER) if name.endswith(".py"))
# What Python 3.8 and every later one have and the agent uses; anything new is to be thought about.
STANDARD = {
    "__future__", "base64", "concurrent", "contextlib", "ctypes", "dataclasses", "datetime", "email",
    "errno", "fcntl", "fnmatch", "glob", "gzip", "hashlib", "http", "importlib", "json", "math", "os",
    "platform", "re", "select", "shutil", "signal", "socket", "stat", "struct", "subprocess", "sys",
    "threading", "time", "traceback", "typing", "unicodedata", "urllib", "zipfile", "zlib",
}  # fmt: skip


def parse(name):
    with open(os.path.join(AGENT_FOLDER, name), encoding="utf-8") as stream:
        return ast.parse(stream.read(), name, feature_version=(3, 8))


@pytest.mark.parametrize("name", MODULES)
def test_only_the_standard_library_and_itself_are_imported(name):
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= STANDARD
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 or (node.level == 0 and node.module.split(".")[0] in STANDARD)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_python_3_8(name):
    tree = parse(name)
    calls = {
        n.func.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    assert not calls & {"removeprefix", "removesuffix", "pidfd_open", "bit_count"}
    # Annotations must stay text: `int | None` is no value in 3.8.
    assert name == "__init__.py" or tree.body[1].module == "__future__"
