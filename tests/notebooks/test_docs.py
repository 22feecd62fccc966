"""The pages in `docs/`: what they show runs, what they name exists, what is generated is current.

Of the notebooks, which other tests execute, it is the prose that is held against the code here.
"""

from __future__ import annotations

import re
import subprocess
import sys

import nbformat
import pytest

from detector.config import option_names
from kernel_tools.magics import families
from kernel_tools.magics.arguments import parse, parse_with_rest
from tests.notebooks.conftest import ROOT, outputs, papermill, pictures, texts

PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [*PAGES, ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]
# In the order in which the index names them, for what runs builds on what ran before.
ORDER = re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs/README.md").read_text("utf-8"))
FENCE = re.compile(r"^```(\w+)( run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAGIC = re.compile(r"%{1,2}((?:remote|stage|dataset|store)(?:_\w+)?)\b")
CALL = re.compile(
    r"^(?:\w+ = )?%{1,2}((?:remote|stage|dataset|store)(?:_\w+)?)\b(.*)$", re.MULTILINE
)
SECTIONS = ("model", "data", "solver", "runtime", "logging", "evaluation")
KEY = re.compile(rf"(?<![\w.])((?:{'|'.join(SECTIONS)})\.\w+)")
FILES = {"data.yaml"}
# Enough for every page to have something to show; the names are those of the pages.
TINY = """\
model: {backbone_name: hgnetv2_n, num_queries: 50, num_denoising: 20}
data: {format: coins, image_size: 96, train_samples: 16, eval_samples: 4, workers: 0}
solver: {epochs: 2, batch_size: 4, lr: 0.0008, warmup_steps: 2}
logging: {log_interval: 1}
evaluation: {batch_size: 4}
"""


def magics():
    return {
        name: getattr(family, name)
        for family in families()
        for kind in ("line", "cell")
        for name in family.magics[kind]
    }


def text(path):
    """A page as Markdown; a notebook as the page that it would be."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        return "\n".join(
            f"```python\n{c.source}\n```" if c.cell_type == "code" else c.source for c in cells
        )
    return path.read_text("utf-8")


@pytest.fixture(params=READ, ids=lambda path: path.relative_to(ROOT).as_posix())
def page(request):
    return request.param


def test_the_index_names_every_page_once():
    assert sorted(ORDER) == sorted(path.name for path in PAGES if path.name != "README.md")


def test_what_is_generated_is_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_magic_that_a_page_names_exists(page):
    named = {name for name in MAGIC.findall(text(page)) if not name.endswith("_")}
    assert named - set(magics()) == set()


def test_every_line_of_magic_is_read_by_its_magic(page):
    joined = text(page).replace("\\\n", " ")
    blocks = [body for _, _, body in FENCE.findall(joined)]
    spans = re.findall(r"`(%[^`]*\S)`", text(page))
    complete = [one for one in spans if not re.search(r"[|\[?]| [A-Z]+\b", one) and " " in one]
    for name, line in CALL.findall("\n".join([*blocks, *complete])):
        call = re.sub(r"\s+#.*", "", line).replace("{settings}", "")
        read = parse_with_rest if name == "remote_run" else parse
        if "..." in call or "[OPTIONS]" in call:
            continue
        read(magics()[name], re.sub(r"\{[\w.]+\}", "1", call))


def test_every_option_that_a_page_names_exists(page):
    ours = {o for function in magics().values() for o in function.parser._option_string_actions}
    told = text(ROOT / "detector/__main__.py") + text(ROOT / "kernel_tools/__main__.py")
    others = set(re.findall(r"\"(--[\w-]+)\"", told))
    others |= {"--minio-secret-key", "--no-browser", "--epochs"}  # refused; other programs'
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", text(page)))
    assert named - ours - others == set()


def test_every_key_that_a_page_names_exists(page):
    named = set(KEY.findall(re.sub(r"\]\(.*?\)", "", text(page))))
    assert named - set(option_names()) - FILES == set()


def test_every_link_and_picture_is_there_and_small(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text(page)):
        if not target.startswith("http"):
            path = page.parent / target
            assert path.exists(), target
            assert path.suffix != ".png" or path.stat().st_size < 150_000, target
    assert all(alt for alt in re.findall(r"!\[(.*?)\]", text(page)))


def test_no_page_is_long(page):
    written = "Written by docs/generate.py" in text(page)
    assert written or len(text(page).split()) < 1200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_marked_run_does_run(tmp_path, monkeypatch):
    """All pages as one notebook, in a project whose configuration is small, executed as a batch job."""
    project = tmp_path / "project"
    (project / "configs/coins").mkdir(parents=True)
    (project / "configs/coins/hgnetv2_n.yaml").write_text(TINY)
    (project / "pyproject.toml").write_text("[project]\nname = 'a-users-project'\n")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("KERNEL_TOOLS_IDLE_SECONDS", "5")
    cells = [
        nbformat.v4.new_code_cell(body.rstrip(), metadata={"page": name})
        for name in ORDER
        for _, runs, body in FENCE.findall(text(ROOT / "docs" / name))
        if runs
    ]
    assert len(cells) >= 20
    cells += [nbformat.v4.new_code_cell("%remote_disconnect")]
    book, executed = tmp_path / "docs.ipynb", tmp_path / "executed.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), book)
    done = papermill(book, executed, cwd=project)
    assert done.returncode == 0, texts(executed)[-3000:]
    said = texts(executed)
    for told in ("world_size=2", "state=stopped", "42", "would run:", "receipt of"):
        assert told in said
    assert pictures(executed) >= 4
    assert [output for output in outputs(executed) if output.output_type == "error"] == []
