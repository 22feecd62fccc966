"""Random tars, interrupted at random places, damaged in between: what is there in the end is what was staged.

A tenth of the cases runs always, `-m campaign` runs all of them.
"""

import contextlib
import hashlib
import io
import os
import random
import tarfile

import pytest
from kernel_tools_agent import partfile
from kernel_tools_agent.errors import StopRequestedError
from kernel_tools_agent.intake import Intake
from kernel_tools_agent.job import Job

from .test_stage import dataset

CASES = 400
SIZES = [0, 1, 511, 512, 513, 4096]
FORMATS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
PARTS = [4096, 5000, 16384, 65536, 200_000]
# More than a connection must have brought for its break to be no failure.
CUT_BYTES = 66_000


def random_tar(rng):
    """Return a tar and its files: names that need headers of their own, and an end of any length."""
    kind, file, files = rng.choice(FORMATS), io.BytesIO(), {}
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for number in range(rng.randint(1, 30)):
            name = f"{rng.choice(['a', 'b', 'a/c'])}/{number}"
            if kind != tarfile.USTAR_FORMAT:
                name += rng.choice(["", "x" * 120, "x" * 200, "ż"])
            size = rng.choice([*SIZES, rng.randint(0, 5000), rng.randint(0, 60_000)])
            files[name] = rng.getrandbits(8 * size).to_bytes(size, "little") if size else b""
            info = tarfile.TarInfo(name)
            info.size, info.mode = size, rng.choice([0o644, 0o755])
            tar.addfile(info, io.BytesIO(files[name]))
    return file.getvalue() + bytes(rng.choice([0, 10_240, 512 * rng.randint(0, 500)])), files


def damage(rng, path):
    """Change a file that is read-only, and leave it so."""
    mode, size = os.stat(path).st_mode, os.path.getsize(path)
    os.chmod(path, 0o600)
    change = rng.choice(["cut", "lengthen", "remove", "overwrite"])
    if change == "remove":
        os.unlink(path)
        return
    with open(path, "r+b") as stream:
        if change == "cut":
            stream.truncate(rng.randint(0, size))
        else:
            stream.seek(size if change == "lengthen" else rng.randrange(max(1, size - 2)))
            stream.write(b"?!"[: max(1, size)] if change == "overwrite" and size else b"?!")
    os.chmod(path, mode)


class Case:
    """One tar, one folder of data sets, and calls that end where chance has it."""

    def __init__(self, seed, store, folder):
        self.rng, self.store, self.folder = random.Random(seed), store, folder
        self.data, self.files = random_tar(self.rng)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        store.objects["o"] = self.data
        store.ranges, store.cut = True, self.rng.choice([None, None, CUT_BYTES])
        os.makedirs(folder)

    def intake(self):
        content = sum(map(len, self.files.values()))
        counts = {"file_count": len(self.files), "content_bytes": content}
        entry = dataset(self.data, object="o", **counts)
        job = Job.from_json({"run_id": "r", "kind": "command", "argv": ["true"], "inputs": [entry]})
        connections = self.rng.choice([1, 2, 4])
        return Intake(job.inputs[0], self.folder, self.store.url("o"), connections)

    def interrupt(self):
        """Bring it up to somewhere; by chance to its end."""
        one, limit = self.intake(), self.rng.randint(0, len(self.data))
        name = self.rng.choice(["_downloaded", "_unpacked_so_far"])
        told = getattr(one, name)

        def tell(count):
            assert count <= len(self.data)
            if count >= limit:
                one.cancelled.set()
            told(count)

        setattr(one, name, tell)
        with contextlib.suppress(StopRequestedError):
            one.run()

    def harm(self):
        """By chance, change what the interrupted call has left."""
        part = os.path.join(self.folder, ".part-" + self.sha256)
        chance = self.rng.random()
        if chance < 0.15:
            kept = [
                os.path.join(base, name)
                for base, _, names in os.walk(os.path.join(self.folder, ".new-" + self.sha256))
                for name in sorted(names)
            ]
            if kept:
                damage(self.rng, self.rng.choice(kept))
        elif chance < 0.3:
            path = part + (".journal" if chance < 0.25 else ".map")
            if os.path.exists(path):
                os.truncate(path, self.rng.randint(0, os.path.getsize(path)))
        elif chance < 0.33:
            self.store.ranges, self.store.cut = False, None

    def check(self):
        one = self.intake()
        one.run()
        for name, data in self.files.items():
            path = os.path.join(one.content, name)
            with open(path, "rb") as stream:
                assert stream.read() == data
            assert os.stat(path).st_mode & 0o222 == 0
        assert sum(len(names) for _, _, names in os.walk(one.content)) == len(self.files)
        left = [name for name in os.listdir(self.folder) if not name.startswith(".lock")]
        assert left == [self.sha256]


def run_case(seed, store, folder, monkeypatch):
    case = Case(seed, store, folder)
    monkeypatch.setattr(partfile, "PART_BYTES", case.rng.choice(PARTS))
    for _ in range(case.rng.randint(0, 4)):
        case.interrupt()
        case.harm()
    case.check()


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(CASES // 100))
def test_a_tenth_of_the_cases(tens, store, tmp_path, monkeypatch):
    for seed in range(100 * tens, 100 * tens + 10):
        run_case(seed, store, str(tmp_path / str(seed)), monkeypatch)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_all_cases(store, tmp_path, monkeypatch):
    for seed in range(CASES):
        run_case(seed, store, str(tmp_path / str(seed)), monkeypatch)
