"""How long code takes to reach a kernel: ours beside pyrun-jupyter's own directory upload.

    python benchmarks/sync.py [--repeats 5]

51 files and 0.24 MB, connection open, kernel idle, at 0 and 100 ms round trip (50 ms each way, by a
relay on loopback). Ours includes planning and hashing, and into an empty remote the agent as well.
Medians; the last line is the ratio at 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernel_tools.kernels.pyrun import PyrunKernel  # noqa: E402
from kernel_tools.kernels.rpc import AgentClient  # noqa: E402
from kernel_tools.sync import SyncReport, build_plan, sync  # noqa: E402
from tests.kernel.conftest import JupyterServer, start_server, stop_server  # noqa: E402
from tests.kernel.relay import Relay  # noqa: E402

FILES, FILE_BYTES = 51, 4706
NOT_OURS = ("detector", "configs", "pyproject.toml", "README.md")


def write_code(folder: Path) -> None:
    """Write Python text of the wanted size: the standard library's, cut into equal files."""
    text = b"".join(path.read_bytes() for path in sorted(Path(email.__file__).parent.glob("*.py")))
    folder.mkdir(parents=True)
    for number in range(FILES):
        start = number * FILE_BYTES
        (folder / f"module_{number:02}.py").write_bytes(text[start : start + FILE_BYTES])


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextlib.contextmanager
def behind_relay(server: JupyterServer, round_trip_seconds: float) -> Iterator[str]:
    relay = Relay(server.port, delay_seconds=round_trip_seconds / 2)
    try:
        yield server.url.replace(str(server.port), str(relay.port))
    finally:
        relay.close()


def measure_ours(kernel: PyrunKernel, project: Path, remote: Path, repeats: int) -> list[float]:
    """Seconds into an empty remote, with nothing changed, with one file changed."""
    numbers = itertools.count()
    edited = project / "code/module_00.py"

    def once(remote_dir: Path) -> SyncReport:
        client = AgentClient(kernel, str(remote_dir))
        return sync(client, build_plan(project, sync_paths=["code"], exclude=NOT_OURS))

    def with_a_change() -> None:
        edited.write_text(f"# edit {next(numbers)} of {remote.name}\n")
        report = once(remote / "kept")
        assert report.uploaded == 1

    empty = median_seconds(lambda: once(remote / str(next(numbers))), repeats)
    once(remote / "kept")
    unchanged = median_seconds(lambda: once(remote / "kept"), repeats)
    return [empty, unchanged, median_seconds(with_a_change, repeats)]


def measure_pyrun(
    url: str, token: str, kernel_id: str, code: Path, remote: Path, repeats: int
) -> float:
    from pyrun_jupyter import JupyterRunner

    runner = JupyterRunner(url, token=token)
    runner.connect_to_kernel(kernel_id)
    runner.run("1")
    numbers = itertools.count()

    def once() -> None:
        sent = runner.upload_directory_via_kernel(code, str(remote / f"pyrun-{next(numbers)}"))
        assert len(sent) == FILES

    return median_seconds(once, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        project = root / "project"
        write_code(project / "code")
        process, server = start_server(root / "server")
        try:
            print(f"{'round trip':>10} {'empty':>8} {'unchanged':>10} {'one file':>9} {'pyrun':>8}")
            for round_trip in (0.0, 0.1):
                with behind_relay(server, round_trip) as url:
                    kernel = PyrunKernel.connect(url, token=server.token)
                    remote = root / f"remote-{round_trip}"
                    ours = measure_ours(kernel, project, remote, repeats)
                    pyrun = measure_pyrun(
                        url, server.token, kernel.kernel_id, project / "code", remote, repeats
                    )
                    kernel.close(stop_kernel=True)
                print(
                    f"{1000 * round_trip:7.0f} ms {ours[0]:6.3f} s {ours[1]:8.3f} s "
                    f"{ours[2]:7.3f} s {pyrun:6.2f} s"
                )
            print(f"ratio_at_100_ms={pyrun / ours[0]:.1f}")
        finally:
            stop_server(process, server)


if __name__ == "__main__":
    main()
