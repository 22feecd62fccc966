"""Execute one of the project's notebooks without a browser; leave it and an HTML page behind.

The page holds its pictures and needs no network. The notebook in the tree is not touched.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kernel_tools.errors import InvalidArgumentError, KernelToolsError, MissingDependencyError
from kernel_tools.redact import redact

PACKED: Final = "_notebooks"  # in a wheel


class NotebookFailed(KernelToolsError):  # noqa: N818 - named like RunFailed
    """A cell raised; the executed notebook up to there was kept."""


def find_notebook(name: str) -> Path:
    """Return a notebook by name: the project's, else the packed one.

    Raises:
        InvalidArgumentError: there is none of that name.
    """
    from kernel_tools.settings import find_project_dir

    here = Path(__file__).resolve().parent
    folders = (find_project_dir() / "notebooks", here.parent / "notebooks", here / PACKED)
    for folder in folders:
        path = folder / f"{name}.ipynb"
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.ipynb")})
    raise InvalidArgumentError(f"there is no notebook {name!r}.", hint=f"There are: {known}.")


def run_notebook(name: str, *, to: Path, parameters: Sequence[str] = ()) -> Path:
    """Execute a notebook; write `<to>/<name>.ipynb` and `<to>/<name>.html`; return the page.

    Args:
        name: of the notebook, without its ending.
        to: folder for what is written; made if absent.
        parameters: `name=value` for the cell tagged `parameters`; values are Python literals or text.

    Raises:
        NotebookFailed: a cell raised; both files show how far it came.
        MissingDependencyError: nbconvert or ipykernel is not installed.
    """
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError
        from nbconvert.preprocessors import ExecutePreprocessor
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed.", hint="pip install 'remote-kernel-tools[local]'"
        ) from error
    source = find_notebook(name)
    notebook = nbformat.read(source, as_version=4)
    _set_parameters(notebook, parameters)
    to.mkdir(parents=True, exist_ok=True)
    print(f"executing {source} ...", flush=True)
    started = time.monotonic()
    execute = ExecutePreprocessor(
        timeout=None,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors; its warnings are not about us
    )
    # A packed notebook works in the current folder: its own belongs to the installation.
    folder = Path.cwd() if source.parent.name == PACKED else source.parent
    failure: str | None = None
    try:
        execute.preprocess(notebook, {"metadata": {"path": str(folder)}})
    except CellExecutionError as error:
        failure = f"{error.ename}: {error.evalue}"
    nbformat.write(notebook, to / source.name)
    page = to / f"{name}.html"
    page.write_text(_to_html(notebook), encoding="utf-8")
    if failure is not None:
        raise NotebookFailed(
            f"{name} stopped at a cell: {redact(failure)}", hint=f"{page} shows how far it came."
        )
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"done in {minutes} min {seconds} s: {to / source.name} and {page}", flush=True)
    return page


def _set_parameters(notebook: Any, parameters: Sequence[str]) -> None:
    """Put a cell with the given values behind the one tagged `parameters`, as papermill does."""
    if not parameters:
        return
    import nbformat

    lines = []
    for parameter in parameters:
        key, equals, text = parameter.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgumentError(f"--set {parameter!r} does not read name=value.")
        lines.append(f"{key} = {_literal(text)!r}")
    for position, cell in enumerate(notebook.cells):
        if "parameters" in cell.metadata.get("tags", []):
            injected = nbformat.v4.new_code_cell("\n".join(lines))
            injected.metadata["tags"] = ["injected-parameters"]
            notebook.cells.insert(position + 1, injected)
            return
    raise InvalidArgumentError("this notebook has no cell tagged `parameters`.")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _to_html(notebook: Any) -> str:
    from nbconvert import HTMLExporter

    # Without these the page would ask a content delivery network for scripts that it does not need.
    exporter = HTMLExporter(mathjax_url="", require_js_url="", mermaid_js_url="")
    page, _resources = exporter.from_notebook_node(notebook)
    return str(page)
