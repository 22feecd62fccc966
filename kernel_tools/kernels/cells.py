"""The code that runs on the remote kernel, as text: the frame round every call, and two small cells.

Python 3.8, stdlib and IPython >= 7 only. A cell leaves no name in the user's namespace, no entry in
`In` or the history database, and no secret anywhere: what is secret travels as a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

# IPython keeps a cell that looks like %paste out of its history (run_cell_async, 7.x to 9.x). That is
# the only way to say it where the client library always asks for history.
KEPT_OUT_OF_HISTORY: Final = (
    "# kernel_tools, not for the history: get_ipython().run_line_magic( paste\n"
)

# In a kernel of ours the history database is off for whatever else runs there.
QUIET_CELL: Final = KEPT_OUT_OF_HISTORY + "get_ipython().history_manager.enabled = False\n"

# The frame: a module of its own in the kernel, whose `answer` runs `function(**arguments)` of another and
# prints one line, `<nonce>{json}`. Errors are values too; a stack trace is text for the log.
_FRAME: Final = """
import base64, json, linecache, os, sys, traceback, zlib

def load_source(name, source):
    module = sys.modules.get(name)
    if module is None:
        import types
        module = types.ModuleType(name)
        module.__file__ = name + ".py"
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        sys.modules[name] = module
    return module

def load_package(name, folder, api):
    import importlib, importlib.util
    if name not in sys.modules:
        init = os.path.join(folder, "__init__.py")
        if not os.path.isfile(init):
            raise AgentMissing(folder)
        spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[folder])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return importlib.import_module(name + "." + api)

class AgentMissing(Exception):
    pass

def result_of(call, blob):
    if "source" in call:
        module = load_source(call["module"], call["source"])
    else:
        module = load_package(call["module"], call["folder"], call["api"])
    if "arguments_file" in call:
        with open(call["arguments_file"], "rb") as stream:
            call["arguments"].update(json.load(stream))
    if "blob_file" in call:
        # Gone: this is a repeat whose first reply was lost, and the content was taken in then.
        data = b""
        if os.path.exists(call["blob_file"]):
            with open(call["blob_file"], "rb") as stream:
                data = stream.read()
        call["arguments"][call["blob"]] = data
    elif "blob" in call:
        call["arguments"][call["blob"]] = base64.b64decode(blob)
    result = getattr(module, call["function"])(**call["arguments"])
    if call.get("blob_file") and os.path.exists(call["blob_file"]):
        os.unlink(call["blob_file"])
    return result

def answer(nonce, call, blob=None):
    try:
        call = json.loads(zlib.decompress(base64.b64decode(call)))
        reply = {"result": result_of(call, blob)}
    except Exception as error:
        reply = {"error": {"type": type(error).__name__, "message": str(error),
                           "traceback": traceback.format_exc()}}
    # ipykernel flushes at a cell's end; its timer for what is written before wakes a thread twice, a
    # tenth of what a poll costs. Taken for set already, it is not.
    if getattr(sys.stdout, "_flush_pending", None) is False:
        sys.stdout._flush_pending = True
    sys.stdout.write(nonce + json.dumps(reply) + "\\n")
    # IPython keeps the text of every cell for tracebacks; a poll a second would pile up.
    cell = sys._getframe(1).f_code.co_filename
    for cache in (linecache.cache, getattr(linecache, "_ipython_cache", {})):
        cache.pop(cell, None)
"""
_FRAME_NAME: Final = f"_kernel_tools_frame_{hashlib.sha256(_FRAME.encode()).hexdigest()[:8]}"
# What follows the nonce of a short cell where the kernel, new or restarted, does not have the frame.
FRAME_ABSENT: Final = " "
_INSTALL: Final = (
    "import sys, types, zlib, base64\n"
    "module = sys.modules[name] = types.ModuleType(name)\n"
    "exec(zlib.decompress(base64.b64decode(source)), module.__dict__)\n"
)


def call_cell(nonce: str, call: Mapping[str, Any], *, blob: bytes | None = None) -> str:
    """Return the cell that makes one call, whatever the kernel has; it lays the frame there.

    Args:
        nonce: starts the line of the reply.
        call: `module`, `function`, `arguments` and either `source` or `folder` and `api`; JSON-able.
        blob: bytes handed over as the argument that `call["blob"]` names; or, larger, they lie in the
            remote file `call["blob_file"]`, which is removed.
    """
    handed = json.dumps({"name": _FRAME_NAME, "source": _packed(_FRAME.encode())})
    lay = f"exec({json.dumps(_INSTALL)}, {handed})"
    return f"{KEPT_OUT_OF_HISTORY}{lay}\n{_module()}.answer({_words(nonce, call, blob)})\n"


def short_call_cell(nonce: str, call: Mapping[str, Any], *, blob: bytes | None = None) -> str:
    """Return the cell that makes one call where the frame is; where it is not, it prints its words.

    IPython's work grows with a cell's tokens, and compiling the frame costs more than most calls. It must
    not fail where the frame is absent: a failing cell takes down those that a person has queued behind it.
    """
    found = f'getattr({_module()},"answer",print)'
    return f"{KEPT_OUT_OF_HISTORY}{found}({_words(nonce, call, blob)})\n"


def _module() -> str:
    return f'__import__("sys").modules.get("{_FRAME_NAME}")'


def _words(nonce: str, call: Mapping[str, Any], blob: bytes | None) -> str:
    words = [nonce, _packed(json.dumps(call).encode())]
    if blob is not None:
        words.append(base64.b64encode(blob).decode())
    return ", ".join(map(json.dumps, words))


@cache
def module_source(name: str) -> str:
    """Return the text of a module beside this one that runs on the remote."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def _packed(data: bytes) -> str:
    # base64, not base85: Python decodes the latter at 5 MB/s, which costs more than its 6 % saves.
    return base64.b64encode(zlib.compress(data, 6)).decode()
