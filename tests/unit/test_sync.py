from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path

import pytest

from kernel_tools import sync as sync_module
from kernel_tools.errors import AgentError, SyncError
from kernel_tools.kernels import CellResult, RemoteErrorInfo
from kernel_tools.kernels.rpc import AgentClient, agent_source
from kernel_tools.sync import SyncReport, build_plan, sync


class InProcessKernel:
    """Runs cells right here; what a kernel and a server do to them is tested with real ones."""

    kernel_id, owned, description = "here", True, "this process"

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.files: list[str] = []
        self.sizes: list[int] = []

    def execute(self, code: str, *, timeout_seconds: float = 60.0) -> CellResult:
        self.cells.append(code)
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(code, "<cell>", "exec"), {})
        except Exception as error:
            return CellResult(out.getvalue(), "", RemoteErrorInfo(type(error).__name__, str(error)))
        return CellResult(out.getvalue())

    def put_file(self, source, remote_path, *, mode=0o644, on_progress=None) -> None:
        self.files.append(remote_path)
        self.sizes.append(len(source) if isinstance(source, bytes) else source.stat().st_size)
        target = Path(remote_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
        target.chmod(mode)

    def get_file(self, remote_path, destination, *, on_progress=None) -> None:
        shutil.copyfile(remote_path, destination)

    def interrupt(self) -> None: ...

    def close(self, *, stop_kernel: bool) -> None: ...


def write(folder: Path, **files: str | bytes) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    write(
        folder,
        **{
            "pyproject.toml": "[project]\nname = 'p'\n",
            "README.md": "# p\n",
            "configs/a.yaml": "model: {}\n",
            "src/pkg/__init__.py": "",
            "src/pkg/net.py": "x = 1\n",
            "scripts/fit.py": "print(1)\n",
            "scripts/helper.py": "print(2)\n",
        },
    )
    return folder


def paths_of(plan) -> set[str]:
    return {file.path for file in plan.files}


def own_paths(plan) -> set[str]:
    return {path for path in paths_of(plan) if not path.startswith("detector/")}


# What travels


def test_detector_configs_and_project_files_travel_by_default(project):
    plan = build_plan(project)
    assert plan.paths == ("detector", "configs", "pyproject.toml", "README.md")
    assert own_paths(plan) == {"configs/a.yaml", "pyproject.toml", "README.md"}
    assert {"detector/__init__.py", "detector/config.py"} <= paths_of(plan)


def test_a_package_named_data_is_code(project):
    assert "detector/data/__init__.py" in paths_of(build_plan(project))
    write(project, **{"src/data/__init__.py": "", "src/runs/log.txt": "x"})
    assert "src/data/__init__.py" in paths_of(build_plan(project, sync_paths=["src"]))


def test_a_project_without_configs_takes_the_packed_ones(project):
    shutil.rmtree(project / "configs")
    packed = {path for path in paths_of(build_plan(project)) if path.startswith("configs/")}
    assert packed
    assert all(path.endswith((".yaml", ".yml")) for path in packed)


def test_the_folder_of_a_script_travels(project):
    assert {"scripts/fit.py", "scripts/helper.py"} <= paths_of(
        build_plan(project, script="scripts/fit.py")
    )


def test_a_script_in_the_root_takes_the_programs_beside_it_and_no_folder(project):
    write(project, **{"fit.py": "", "utils.py": "", "notes.txt": ""})
    plan = build_plan(project, script="fit.py")
    assert {"fit.py", "utils.py"} <= paths_of(plan)
    assert "notes.txt" not in paths_of(plan)
    assert "src/pkg/net.py" not in paths_of(plan)


def test_a_foreign_project_names_its_own_paths(project):
    write(project, **{"pyproject.toml": '[tool.kernel_tools]\nsync = ["src"]\n'})
    plan = build_plan(project)
    assert "src" in plan.paths
    assert "src/pkg/net.py" in paths_of(plan)


def test_sync_in_pyproject_that_is_no_list_is_refused(project):
    write(project, **{"pyproject.toml": '[tool.kernel_tools]\nsync = "src"\n'})
    with pytest.raises(SyncError, match="list of paths"):
        build_plan(project)


@pytest.mark.parametrize(
    "left_out",
    [
        ".venv/x.py", "data/x.txt", "artifacts/x.pt", "runs/x.txt", ".cache/x", ".exp/x", "site/x.html",
        ".git/config", "__pycache__/x.pyc", ".ipynb_checkpoints/a-checkpoint.ipynb", ".ruff_cache/x", "x.pyc",
    ],
)  # fmt: skip
def test_products_and_caches_stay_even_under_a_named_path(project, left_out):
    write(project, **{f"src/{left_out}": "x"})
    assert f"src/{left_out}" not in paths_of(build_plan(project, sync_paths=["src"]))


def test_an_excluded_folder_travels_when_named_exactly(project):
    write(project, **{"src/data/classes.txt": "a\n"})
    assert "src/data/classes.txt" in paths_of(build_plan(project, sync_paths=["src", "src/data"]))


@pytest.mark.parametrize(
    "secret",
    [
        ".env",
        ".env.local",
        "key.pem",
        "id_rsa",
        "ID_RSA",
        "kaggle.json",
        ".netrc",
        ".kernel_tools/datasets.json",
    ],
)
def test_secrets_never_travel_even_when_named(project, secret):
    write(project, **{f"src/{secret}": "secret"})
    assert not any("secret" in f.source.read_text() for f in build_plan(project, sync_paths=["src"]).files
                   if f.path.startswith("src/"))  # fmt: skip
    with pytest.raises(SyncError, match="never synced"):
        build_plan(project, sync_paths=[f"src/{secret}"])


def test_exclude_takes_globs_on_names_and_on_paths(project):
    write(project, **{"src/pkg/notes.md": "n", "src/other/deep.py": ""})
    plan = build_plan(project, sync_paths=["src"], exclude=["*.md", "src/other"])
    assert {p for p in paths_of(plan) if p.startswith("src/")} == {
        "src/pkg/__init__.py",
        "src/pkg/net.py",
    }
    assert "README.md" not in plan.paths


@pytest.mark.parametrize("named", ["nowhere", "../elsewhere", ".", "/etc"])
def test_a_path_that_is_absent_or_outside_is_refused(project, named):
    with pytest.raises(SyncError):
        build_plan(project, sync_paths=[named])


def test_a_link_that_leaves_the_project_is_refused_by_name(project, tmp_path):
    write(tmp_path, **{"elsewhere/secret.txt": "s"})
    (project / "src/link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SyncError, match="src/link is a link that leaves the project"):
        build_plan(project, sync_paths=["src"])


def test_a_link_inside_the_project_travels_as_what_it_points_at(project):
    (project / "src/again").symlink_to(project / "scripts")
    (project / "src/loop").symlink_to(project / "src")
    plan = build_plan(project, sync_paths=["src"])
    assert "src/again/fit.py" in paths_of(plan)
    assert "src/loop/pkg/net.py" not in paths_of(plan)


def test_a_program_keeps_its_x_bit(project):
    (project / "scripts/fit.py").chmod(0o755)
    modes = {file.path: file.mode for file in build_plan(project, sync_paths=["scripts"]).files}
    assert modes["scripts/fit.py"] == 0o755
    assert modes["scripts/helper.py"] == 0o644


# How much


def test_more_than_16_mb_is_refused_with_the_largest_and_the_way_to_stage(project):
    write(project, **{"src/big.bin": b"\0" * 12_000_000, "src/mid.bin": b"\1" * 5_000_000})
    with pytest.raises(SyncError) as caught:
        build_plan(project, sync_paths=["src"])
    assert "src/big.bin (12.0 MB)" in str(caught.value)
    assert "%stage_dataset src" in str(caught.value)
    assert "--allow-large" in str(caught.value)
    plan = build_plan(project, sync_paths=["src"], allow_large=True)
    assert plan.largest(1)[0].path == "src/big.bin"


def test_more_than_5_mb_warns(project):
    assert build_plan(project).warnings == ()
    write(project, **{"src/big.bin": b"\0" * 6_000_000})
    (warning,) = build_plan(project, sync_paths=["src"]).warnings
    assert "src/big.bin (6.0 MB)" in warning


# How it gets there


def test_two_cells_into_an_empty_remote_and_one_when_nothing_changed(project, tmp_path):
    kernel = InProcessKernel()
    plan = build_plan(project, sync_paths=["src"])
    agents = len(agent_source().contents)
    first = sync(kernel, plan, str(tmp_path / "remote"))
    assert len(kernel.cells) == 2
    assert first.uploaded == first.files == len(plan.files) + agents
    second = sync(kernel, plan, str(tmp_path / "remote"))
    assert len(kernel.cells) == 3
    assert (second.uploaded, second.files, second.manifest) == (0, first.files, first.manifest)
    write(project, **{"src/pkg/net.py": "x = 2\n"})
    third = sync(kernel, build_plan(project, sync_paths=["src"]), str(tmp_path / "remote"))
    assert len(kernel.cells) == 5
    assert third.uploaded == 1


def test_what_arrives_is_the_manifest_byte_for_byte(project, tmp_path):
    from kernel_tools.agent.bootstrap import lay_tree

    plan = build_plan(project, sync_paths=["src", "scripts"])
    report = sync(InProcessKernel(), plan, str(tmp_path / "remote"))
    lay_tree(str(tmp_path / "remote"), report.manifest["files"], str(tmp_path / "tree"))
    laid = {p.relative_to(tmp_path / "tree").as_posix(): p.read_bytes()
            for p in (tmp_path / "tree").rglob("*") if p.is_file()}  # fmt: skip
    assert laid == {file.path: file.source.read_bytes() for file in plan.files}


def test_the_agent_is_laid_under_its_hash(project, tmp_path):
    report = sync(InProcessKernel(), build_plan(project), str(tmp_path / "remote"))
    folder = tmp_path / "remote/agent" / report.agent_hash / "kernel_tools_agent"
    assert {p.name: p.read_bytes() for p in folder.glob("*.py")} == dict(agent_source().contents)


def test_the_agent_answers_a_first_call_without_any_sync(tmp_path):
    client = AgentClient(InProcessKernel(), str(tmp_path / "remote"))
    assert client.call("list_runs") == {"runs": []}


def test_a_large_file_is_streamed_and_not_put_into_code(project, tmp_path):
    noise = os.urandom(3_000_000)
    write(project, **{"src/weights.bin": noise})
    kernel = InProcessKernel()
    report = sync(kernel, build_plan(project, sync_paths=["src"]), str(tmp_path / "remote"))
    digest = report.manifest["files"]["src/weights.bin"][1]
    assert (tmp_path / "remote/blobs" / digest[:2] / digest).read_bytes() == noise
    assert str(tmp_path / "remote/blobs" / digest[:2] / digest) in kernel.files
    assert max(map(len, kernel.cells)) < 100_000


def test_many_files_go_in_several_packs_below_the_servers_limit(project, tmp_path):
    write(project, **{f"src/{i}.bin": os.urandom(900_000) for i in range(8)})
    kernel = InProcessKernel()
    report = sync(
        kernel, build_plan(project, sync_paths=["src"], allow_large=True), str(tmp_path / "r")
    )
    assert report.uploaded == report.files
    assert max(kernel.sizes) < 9_000_000
    assert max(map(len, kernel.cells)) < 100_000
    assert not list((tmp_path / "r").rglob("*.pack"))


def test_a_file_that_changed_after_the_plan_is_sent_as_it_is_now(project, tmp_path):
    plan = build_plan(project, sync_paths=["src"])
    write(project, **{"src/pkg/net.py": "x = 'newer'\n"})
    report = sync(InProcessKernel(), plan, str(tmp_path / "remote"))
    digest = report.manifest["files"]["src/pkg/net.py"][1]
    assert (tmp_path / "remote/blobs" / digest[:2] / digest).read_text() == "x = 'newer'\n"


def test_a_large_file_that_changed_after_the_plan_is_refused(project, tmp_path):
    write(project, **{"src/big.bin": os.urandom(2_000_000)})
    plan = build_plan(project, sync_paths=["src"])
    write(project, **{"src/big.bin": os.urandom(2_000_000)})
    with pytest.raises(SyncError, match=r"big\.bin changed while it was being sent"):
        sync(InProcessKernel(), plan, str(tmp_path / "remote"))


def test_a_file_that_keeps_changing_is_refused(project, monkeypatch):
    stat = Path.stat

    def restless(self, **kwargs):
        if self.name == "net.py":
            os.utime(self, ns=(1, os.stat(self).st_mtime_ns + 1_000_000))
        return stat(self, **kwargs)

    monkeypatch.setattr(Path, "stat", restless)
    with pytest.raises(SyncError, match=r"src/pkg/net\.py keeps changing"):
        build_plan(project, sync_paths=["src"])


def test_the_four_lines():
    report = SyncReport(("detector", "configs"), 51, 240_000, 3, {"files": {}})
    assert report.lines() == (
        "sync_paths=detector,configs",
        "sync_files=51",
        "sync_size_mb=0.24",
        "sync_uploaded=3",
    )


def test_planning_reads_no_content_before_the_size_is_accepted(project, monkeypatch):
    write(project, **{"src/huge.bin": b"\0" * 17_000_000})
    monkeypatch.setattr(sync_module, "_hashed", lambda file: pytest.fail(f"read {file.path}"))
    with pytest.raises(SyncError, match="would travel"):
        build_plan(project, sync_paths=["src"])


# .gitignore, deletes, data, thousands of files


def test_what_gitignore_names_stays_here(project):
    write(project, **{".gitignore": "*.log\nbuild/\n", "src/a.log": "x", "src/build/b.py": "x"})
    write(project, **{"src/pkg/.gitignore": "!kept.log\n", "src/pkg/kept.log": "x"})
    plan = build_plan(project, sync_paths=["src"])
    assert {p for p in paths_of(plan) if p.startswith("src/")} == {
        "src/pkg/.gitignore", "src/pkg/__init__.py", "src/pkg/net.py", "src/pkg/kept.log",
    }  # fmt: skip


def test_what_is_ignored_travels_when_named_exactly(project):
    write(project, **{".gitignore": "build/\n*.log\n", "src/build/b.py": "x", "src/a.log": "x"})
    plan = build_plan(project, sync_paths=["src", "src/build", "src/a.log"])
    assert {"src/build/b.py", "src/a.log"} <= paths_of(plan)


def test_a_script_and_the_configurations_travel_whatever_is_ignored(project):
    write(project, **{".gitignore": "*.yaml\n*.py\n"})
    plan = build_plan(project, script="scripts/fit.py")
    assert {"configs/a.yaml", "scripts/fit.py"} <= paths_of(plan)
    assert "scripts/helper.py" not in paths_of(plan)


def test_a_deleted_file_is_gone_from_the_next_tree(project, tmp_path):
    from kernel_tools.agent.bootstrap import lay_tree

    kernel, remote = InProcessKernel(), str(tmp_path / "remote")
    sync(kernel, build_plan(project, sync_paths=["src"]), remote)
    (project / "src/pkg/net.py").unlink()
    report = sync(kernel, build_plan(project, sync_paths=["src"]), remote)
    lay_tree(remote, report.manifest["files"], str(tmp_path / "tree"))
    assert not (tmp_path / "tree/src/pkg/net.py").exists()
    assert (tmp_path / "tree/src/pkg/__init__.py").exists()
    assert report.uploaded == 0


def test_a_data_folder_that_was_named_is_refused_with_the_way_to_stage_it(project, tmp_path):
    for number in range(20):
        write(project, **{f"data/coins/{number}.jpg": os.urandom(100_000 + number)})
    kernel = InProcessKernel()
    with pytest.raises(SyncError) as caught:
        sync(kernel, build_plan(project, sync_paths=["data"]), str(tmp_path / "remote"))
    assert "data holds 20 files, 2.0 MB" in str(caught.value)
    assert "data/coins/19.jpg (0.1 MB)" in str(caught.value)
    assert "%stage_dataset data" in str(caught.value)
    assert "Nothing was sent" in str(caught.value)
    assert kernel.cells == kernel.files == []
    assert not (tmp_path / "remote").exists()


def test_stray_files_of_20_mb_are_refused_and_nothing_is_sent(project, tmp_path):
    write(project, **{"src/pkg/model.bin": os.urandom(20_000_000)})
    kernel = InProcessKernel()
    with pytest.raises(
        SyncError, match=r"largest: src/pkg/model\.bin \(20\.0 MB\).*%stage_dataset"
    ):
        sync(kernel, build_plan(project, sync_paths=["src"]), str(tmp_path / "remote"))
    assert kernel.cells == kernel.files == []
    assert not (tmp_path / "remote").exists()


def test_a_file_that_rests_is_read_once_and_a_changed_one_again(project, monkeypatch):
    for path in (project / "src").rglob("*.py"):
        os.utime(path, (1, 1))
    first = build_plan(project, sync_paths=["src"])
    opened = []
    plain = Path.open

    def noted(self, *args, **kwargs):
        opened.append(self.name)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noted)
    assert build_plan(project, sync_paths=["src"]).files == first.files
    assert not {"net.py", "fit.py"} & set(opened)
    (project / "src/pkg/net.py").write_text("x = 5\n")  # of the same size
    os.utime(project / "src/pkg/net.py", (1, 1))
    changed = {f.path: f.sha256 for f in build_plan(project, sync_paths=["src"]).files}
    assert changed["src/pkg/net.py"] != {f.path: f.sha256 for f in first.files}["src/pkg/net.py"]


class Many:
    """A project of thousands of files and a remote that has them."""

    def __init__(self, project, tmp_path):
        self.project, self.remote, self.kernel = (
            project,
            str(tmp_path / "remote"),
            InProcessKernel(),
        )
        write(project, **{f"src/m/{n % 50}/f{n}.py": f"n = {n}\n" for n in range(1500)})

    def sync(self):
        self.kernel.cells.clear()
        self.kernel.files.clear()
        return sync(self.kernel, build_plan(self.project, sync_paths=["src"]), self.remote)

    @property
    def code_bytes(self):
        return sum(map(len, self.kernel.cells))


@pytest.fixture
def many(project, tmp_path):
    return Many(project, tmp_path)


def test_of_thousands_of_files_only_the_changed_group_is_asked_about(many, project):
    first = many.sync()
    assert first.uploaded == first.files
    assert many.sync().uploaded == 0
    assert len(many.kernel.cells) == 1
    unchanged = many.code_bytes
    write(project, **{"src/m/7/f7.py": "n = 'edited'\n"})
    third = many.sync()
    assert (third.uploaded, len(many.kernel.cells)) == (1, 3)
    assert many.code_bytes < 3 * unchanged + 20_000
    assert many.kernel.files == []
    assert many.sync().uploaded == 0
    assert len(many.kernel.cells) == 1


def test_a_blob_that_is_lost_among_thousands_is_sent_again(many, tmp_path):
    report = many.sync()
    digest = report.manifest["files"]["src/m/7/f7.py"][1]
    (tmp_path / "remote/blobs" / digest[:2] / digest).unlink()
    assert many.sync().uploaded == 1
    assert (tmp_path / "remote/blobs" / digest[:2] / digest).read_text() == "n = 7\n"


def test_a_call_with_the_manifest_of_thousands_travels_as_a_file(many):
    report = many.sync()
    client = AgentClient(many.kernel, many.remote)
    many.kernel.cells.clear()
    with pytest.raises(AgentError, match="not a run id"):
        client.call(
            "launch",
            job={"run_id": "no/good"},
            manifest={
                "files": {
                    **report.manifest["files"],
                    **{f"more/{n}": [420, "0" * 64] for n in range(2000)},
                }
            },
        )
    assert max(map(len, many.kernel.cells)) < 60_000
