"""How fast one large file goes over the kernel's line, beside pyrun-jupyter's own binary transfer.

    python benchmarks/transfer.py [--megabytes 64] [--repeats 3]

Loopback, 0 ms. Every measured transfer runs in a process of its own, which tells how far its memory rose
above what it was before; the kernel's rise is read from outside. Medians; the last lines are the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from kernel_tools.kernels import connect_kernel  # noqa: E402
from tests.kernel.conftest import start_server, stop_server  # noqa: E402

MEGABYTE = 1 << 20
SAMPLE_SECONDS = 0.01
WHO = ("ours pyrun", "ours jupyter", "pyrun-jupyter")
WAYS = ("up", "down")


class MemoryRise:
    """How far a process's resident memory rises above where it was, in bytes, sampled."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._idle = self._process.memory_info().rss
        self._most = self._idle
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryRise:  # noqa: PYI034
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._most - self._idle

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self._most = max(self._most, self._process.memory_info().rss)


def transfer(who: str, way: str, url: str, kernel_id: str, local: Path, remote: str) -> None:
    """Carry one file in this process, after a small one; print seconds and the rise of memory."""
    token = sys.stdin.read()
    if who == "pyrun-jupyter":
        from pyrun_jupyter import JupyterRunner

        runner = JupyterRunner(url, token=token)
        runner.connect_to_kernel(kernel_id)
        socket = runner._websocket  # noqa: SLF001 - its public methods look the file up first
        up, down = socket.upload_file, socket.download_file
    else:
        kernel = connect_kernel(url, token=token, attach=kernel_id, client=who.split()[1])

        def up(source: Path, there: str) -> None:
            kernel.put_file(source, there)

        def down(there: str, target: Path) -> None:
            kernel.get_file(there, target)

    small = local.with_name("small")
    small.write_bytes(os.urandom(100_000))
    up(small, f"{remote}.small")
    with MemoryRise(os.getpid()) as rise:
        start = time.perf_counter()
        if way == "up":
            up(local, remote)
        else:
            down(remote, local.with_name("back"))
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "rise": rise.bytes}))


def kernel_process(kernel_id: str) -> int:
    for process in psutil.process_iter(["cmdline"]):
        if any(f"kernel-{kernel_id}" in word for word in process.info["cmdline"] or []):
            return int(process.pid)
    raise RuntimeError("the kernel has no process")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        who, way, url, kernel_id, local, remote = options.one
        transfer(who, way, url, kernel_id, Path(local), remote)
        return
    size = options.megabytes * MEGABYTE
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        local, remote = root / "file", root / "there"
        local.write_bytes(os.urandom(size))
        process, server = start_server(root / "server")
        speeds: dict[tuple[str, str], float] = {}
        try:
            for way in WAYS:
                figures: dict[str, list[tuple[float, int, int]]] = {who: [] for who in WHO}
                # In turns, so that a slow minute of the machine is a slow minute for all.
                for _ in range(options.repeats):
                    for who in WHO:
                        kernel = connect_kernel(server.url, token=server.token, client="jupyter")
                        kernel.put_file(b"x", str(root / "first"))
                        with MemoryRise(kernel_process(kernel.kernel_id)) as rise:
                            words = [sys.executable, __file__, "--one", who, way, server.url]
                            words += [kernel.kernel_id, str(local), str(remote)]
                            done = subprocess.run(
                                words,
                                input=server.token,
                                capture_output=True,
                                text=True,
                                check=True,
                            )
                        told = json.loads(done.stdout)
                        figures[who].append((told["seconds"], told["rise"], rise.bytes))
                        kernel.close(stop_kernel=True)
                        arrived = remote if way == "up" else local.with_name("back")
                        assert arrived.read_bytes() == local.read_bytes()
                for who, rows in figures.items():
                    seconds = statistics.median(row[0] for row in rows)
                    speeds[who, way] = size / MEGABYTE / seconds
                    here, there = (max(row[n] for row in rows) / MEGABYTE for n in (1, 2))
                    print(
                        f"{who:>14} {way:>5}: {speeds[who, way]:6.1f} MiB/s, memory here +{here:.1f} "
                        f"MiB, in the kernel +{there:.1f} MiB",
                        flush=True,
                    )
            for way in WAYS:
                ratios = ", ".join(
                    f"{who} {speeds[who, way] / speeds[WHO[2], way]:.2f}" for who in WHO[:2]
                )
                print(f"ratio_{way}: {ratios}")
        finally:
            stop_server(process, server)


if __name__ == "__main__":
    main()
