"""How fast a data set gets into the embedded store and out of it, beside the seed's way and plain tar.

    python benchmarks/staging.py [--megabytes 329] [--files 2048] [--repeats 3] [--memory-gib 0]

Incompressible files (as JPEG is) of one size, loopback, 0 ms, the ways in turns; medians. `seed`: Python's
tarfile with gzip, then the SDK's fput_object. `plain`: tar, then fput_object. `ours`: `stage`, which packs,
hashes and sends in one pass and names the object by its hash. Then the same content staged again; then the
remote's side (download, verify, unpack, mark) beside `curl | tar x`. `--memory-gib` stages that much of one
sparse file in a process of its own and tells its peak. The last line has the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernel_tools.agent.job import Job  # noqa: E402
from kernel_tools.agent.stage import stage_inputs  # noqa: E402
from kernel_tools.datasets import inputs_for, stage  # noqa: E402
from kernel_tools.datasets.archive import scan_folder  # noqa: E402
from kernel_tools.datasets.stream import blocks_of, hash_blocks  # noqa: E402
from kernel_tools.stores.local import LocalStore  # noqa: E402

MEBIBYTE = 1 << 20
WAYS = ("seed", "plain", "ours")


def level(folder: Path, *, megabytes: int) -> None:
    """Make the machine the same for each way: nothing left to write, and free memory of which the host knows.

    In a virtual machine the first touch of a page costs more than all that is measured here.
    """
    path = folder / "level"
    block = bytes(MEBIBYTE)
    with path.open("wb") as stream:
        for _ in range(2 * megabytes):
            stream.write(block)
    path.unlink()
    os.sync()


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def make_files(folder: Path, *, megabytes: int, files: int) -> None:
    size = megabytes * 1_000_000 // files
    for number in range(files):
        path = folder / "images" / ("val" if number % 8 == 0 else "train") / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))


class Bench:
    """A data set, a store and a scratch folder."""

    def __init__(self, root: Path, store: LocalStore, folder: Path) -> None:
        self.root, self.store, self.folder = root, store, folder
        self.archive = root / "archive"
        self.project = root / "project"
        self.project.mkdir()

    def seed(self) -> None:
        with tarfile.open(self.archive, "w:gz") as tar:
            tar.add(self.folder, self.folder.name)
        self._fput("seed.tar.gz")

    def plain(self) -> None:
        words = ["tar", "cf", str(self.archive), "-C", str(self.folder.parent), self.folder.name]
        subprocess.run(words, check=True)
        self._fput("plain.tar")

    def ours(self) -> None:
        self.reference = stage(self.folder, store=self.store, project_dir=self.project)

    def _fput(self, key: str) -> None:
        self.store._client.fput_object(self.store.bucket, key, str(self.archive))  # noqa: SLF001

    def forget(self) -> None:
        """Make the next one start from nothing."""
        for found in list(self.store.list()):
            if found.key != "first":
                self.store.remove(found.key)
        with contextlib.suppress(FileNotFoundError):
            self.archive.unlink()

    def hashing(self) -> None:
        hash_blocks(blocks_of(scan_folder(self.folder).open()))

    def ingest(self, number: int) -> Callable[[], None]:
        """Return the remote's side: a new session's, with nothing there yet."""
        described, urls = inputs_for(self.reference, store=self.store)
        run = self.root / f"remote{number}" / "runs" / "one"
        (run / "work").mkdir(parents=True)
        job = Job.from_json(
            {
                "run_id": "one", "name": "one", "argv": ["x.py"], "inputs": [described],
                "created_at": "2026-01-01T00:00:00+00:00",
            }
        )  # fmt: skip
        return lambda: stage_inputs(
            str(run), job, urls=urls, log=lambda _: None, progress=lambda _: None,
            should_stop=lambda: False, stall_seconds=None,
        )  # fmt: skip

    def curl(self, number: int) -> Callable[[], None]:
        folder = self.root / f"curl{number}"
        folder.mkdir()
        url = self.store.presign_get(self.reference.object, expires_seconds=3600)

        def fetch() -> None:
            with subprocess.Popen(["curl", "-sf", "-K", "-"], stdin=-1, stdout=-1) as curl:
                assert curl.stdin is not None
                curl.stdin.write(f'url = "{url}"\n'.encode())
                curl.stdin.close()
                subprocess.run(["tar", "x", "-C", str(folder)], stdin=curl.stdout, check=True)

        return fetch


def measure_up(bench: Bench, repeats: int, megabytes: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {way: [] for way in (*WAYS, "again", "hashing")}
    bench.store.put(Path(__file__), "first")  # the bucket and its volumes exist for all
    for _ in range(repeats):
        for way in WAYS:
            level(bench.root, megabytes=megabytes)
            figures[way].append(timed(getattr(bench, way)))
            if way == "ours":
                figures["again"].append(timed(bench.ours))
                figures["hashing"].append(timed(bench.hashing))
            else:
                bench.forget()
            print(f"{way:>8}: {figures[way][-1]:6.2f} s", flush=True)
        if _ < repeats - 1:
            bench.forget()
    return {way: statistics.median(values) for way, values in figures.items()}


def measure_down(bench: Bench, repeats: int, megabytes: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {"ingest": [], "curl | tar": []}
    # What was unpacked stays until the end: ext4 steps over the inodes of minutes ago, one by one, at each
    # new file (RECENTCY in fs/ext4/ialloc.c), and that would be most of what is measured.
    for number in range(repeats):
        level(bench.root, megabytes=megabytes)
        figures["curl | tar"].append(timed(bench.curl(number)))
        level(bench.root, megabytes=megabytes)
        figures["ingest"].append(timed(bench.ingest(number)))
        print(
            f"  ingest: {figures['ingest'][-1]:6.2f} s, curl | tar x {figures['curl | tar'][-1]:.2f} s"
        )
    return {way: statistics.median(values) for way, values in figures.items()}


def peak_memory(gib: float, root: Path) -> int:
    """Stage one sparse file in a process of its own; return its peak resident memory in bytes."""
    done = subprocess.run(
        [sys.executable, __file__, "--stage-sparse", str(gib), str(root)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


def stage_sparse(gib: float, root: Path) -> None:
    (root / "big").mkdir(parents=True)
    with (root / "big" / "one.bin").open("wb") as file:
        file.truncate(int(gib * (1 << 30)))
    store = LocalStore.ensure(state_dir=root.parent / "state")
    try:
        stage(root / "big", store=store, project_dir=root)
    finally:
        store.release()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=329)
    parser.add_argument("--files", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-gib", type=float, default=0.0)
    parser.add_argument(
        "--scratch", type=Path, help="folder for everything (default: a temporary one)"
    )
    parser.add_argument("--stage-sparse", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage_sparse:
        stage_sparse(float(options.stage_sparse[0]), Path(options.stage_sparse[1]))
        return
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        folder = root / "vehicles3"
        make_files(folder, megabytes=options.megabytes, files=options.files)
        store = LocalStore.ensure(state_dir=root / "state", idle_seconds=120)
        try:
            bench = Bench(root, store, folder)
            up = measure_up(bench, options.repeats, options.megabytes)
            down = measure_down(bench, options.repeats, options.megabytes)
            memory = peak_memory(options.memory_gib, root / "sparse") if options.memory_gib else 0
        finally:
            store.stop()
    for way, seconds in (up | down).items():
        print(f"{way:>10}: {seconds:6.2f} s  {options.megabytes / seconds:7.1f} MB/s")
    if memory:
        print(f"peak memory at {options.memory_gib:g} GiB: {memory / MEBIBYTE:.0f} MiB")
    print(
        f"times faster than the seed: {up['seed'] / up['ours']:.2f}, than plain tar:"
        f" {up['plain'] / up['ours']:.2f}; again beyond hashing: {up['again'] - up['hashing']:.2f} s;"
        f" ingest over curl | tar x: {down['ingest'] / down['curl | tar']:.2f}"
    )


if __name__ == "__main__":
    main()
