"""How long code takes to reach a kernel: ours beside pyrun-jupyter's own directory upload.

    python benchmarks/sync.py [--repeats 5]

51 files and 0.24 MB, connection open, kernel idle, at 0 and 100 ms round trip (50 ms each way, by a
relay on loopback), by each client library. Ours includes planning and hashing, and into an empty remote
the agent as well. Then 5,000 files at 100 ms, where the cost must follow what changed. Medians of as many
as asked for; the last line is the ratio at 100 ms with the default client.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernel_tools.kernels import CLIENTS, RemoteKernel, connect_kernel  # noqa: E402
from kernel_tools.kernels.rpc import AgentClient  # noqa: E402
from kernel_tools.sync import SyncReport, build_plan, sync  # noqa: E402
from tests.kernel.conftest import JupyterServer, start_server, stop_server  # noqa: E402
from tests.kernel.relay import Relay  # noqa: E402

FILES, FILE_BYTES = 51, 4706
MANY = 5000
NOT_OURS = ("detector", "configs", "pyproject.toml", "README.md")


def write_code(folder: Path, count: int = FILES) -> None:
    """Write Python text of the wanted size: the standard library's, cut into equal files."""
    text = b"".join(path.read_bytes() for path in sorted(Path(email.__file__).parent.glob("*.py")))
    folder.mkdir(parents=True)
    for number in range(count):
        start = number * FILE_BYTES % (len(text) - FILE_BYTES)
        head = f"# module {number}\n".encode()
        (folder / f"module_{number:02}.py").write_bytes(
            (head + text[start : start + FILE_BYTES])[:FILE_BYTES]
        )
        os.utime(folder / f"module_{number:02}.py", (1.7e9, 1.7e9))  # not written just now


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


def measure_ours(kernel: RemoteKernel, project: Path, remote: Path, repeats: int) -> list[float]:
    """Seconds into an empty remote, with nothing changed, with one file changed."""
    numbers = itertools.count()
    edited = project / "code/module_00.py"

    def once(remote_dir: Path) -> SyncReport:
        client = AgentClient(kernel, str(remote_dir))
        plan = build_plan(project, sync_paths=["code"], exclude=NOT_OURS, allow_large=True)
        return sync(client, plan)

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


def tell(client: str, files: int, round_trip: float, times: list[float]) -> None:
    print(
        f"{client:>8} {files:6} {1000 * round_trip:7.0f} ms {times[0]:6.3f} s {times[1]:8.3f} s "
        f"{times[2]:7.3f} s",
        flush=True,
    )


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
            print(
                f"{'client':>8} {'files':>6} {'round trip':>10} {'empty':>8} {'unchanged':>10} "
                f"{'one file':>9}"
            )
            ours: dict[tuple[str, float], list[float]] = {}
            for round_trip, client in itertools.product((0.0, 0.1), CLIENTS):
                with behind_relay(server, round_trip) as url:
                    kernel = connect_kernel(url, token=server.token, client=client)
                    remote = root / f"remote-{client}-{round_trip}"
                    times = measure_ours(kernel, project, remote, repeats)
                    kernel.close(stop_kernel=True)
                ours[client, round_trip] = times
                tell(client, FILES, round_trip, times)
            many = root / "many"
            write_code(many / "code", MANY)
            with behind_relay(server, 0.1) as url:
                kernel = connect_kernel(url, token=server.token)
                times = measure_ours(kernel, many, root / "remote-many", 3)
                kernel.close(stop_kernel=True)
            tell(CLIENTS[0], MANY, 0.1, times)
            for round_trip in (0.0, 0.1):
                with behind_relay(server, round_trip) as url:
                    kernel = connect_kernel(url, token=server.token)
                    code, remote = project / "code", root / f"remote-pyrun-{round_trip}"
                    theirs = measure_pyrun(
                        url, server.token, kernel.kernel_id, code, remote, repeats
                    )
                    kernel.close(stop_kernel=True)
                print(
                    f"pyrun-jupyter's upload_directory_via_kernel, {1000 * round_trip:.0f} ms: "
                    f"{theirs:.2f} s"
                )
            print(f"ratio_at_100_ms={theirs / ours[CLIENTS[0], 0.1][0]:.1f}")
        finally:
            stop_server(process, server)


if __name__ == "__main__":
    main()
