"""A tar that is kept as what was unpacked from it: gone on from to the byte, and never beside its content."""

import os

import pytest
from kernel_tools_agent import intake, partfile
from kernel_tools_agent.errors import DiskFullError, InputError, StopRequestedError
from kernel_tools_agent.job import Job

from .archives import tar_of
from .test_stage import dataset, sha

PART = 64 << 10
FILES = {
    "ds/a.bin": os.urandom(300_000),
    "ds/empty": b"",
    "ds/" + "long" * 50 + ".bin": os.urandom(1000),
    "ds/large.bin": os.urandom(2_000_000),
    "ds/z/last.bin": os.urandom(5),
}
TAR = tar_of(FILES)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(partfile, "PART_BYTES", PART)


class Machine:
    """A folder of data sets, and one input that is brought there."""

    def __init__(self, store, folder):
        self.store, self.folder = store, folder
        store.objects["o"] = TAR
        os.makedirs(folder)

    def intake(self, data=TAR, connections=2):
        entry = dataset(data, object="o", file_count=len(FILES))
        job = Job.from_json({"run_id": "r", "kind": "command", "argv": ["true"], "inputs": [entry]})
        return intake.Intake(job.inputs[0], str(self.folder), self.store.url("o"), connections)

    def leave(self, unpacked):
        """End a first call when so many bytes of content are unpacked."""
        one = self.intake()
        told = one._unpacked_so_far

        def stop(done):
            if done >= unpacked:
                one.cancelled.set()
            told(done)

        one._unpacked_so_far = stop
        with pytest.raises(StopRequestedError):
            one.run()
        self.store.sent, self.store.requests = 0, []

    def path(self, name):
        return os.path.join(str(self.folder), f".new-{sha(TAR)}", "content", name)

    def check(self, connections=2):
        one = self.intake(connections=connections)
        one.run()
        for name, data in FILES.items():
            path = os.path.join(one.content, name)
            with open(path, "rb") as stream:
                assert stream.read() == data
            assert os.stat(path).st_mode & 0o222 == 0
        left = [name for name in os.listdir(str(self.folder)) if not name.startswith(".lock")]
        assert left == [sha(TAR)]


@pytest.fixture
def machine(store, tmp_path):
    return Machine(store, tmp_path / "datasets")


@pytest.mark.parametrize("unpacked", [1, 300_000, 301_000, 700_000, 2_301_000, 2_301_005])
def test_what_was_unpacked_is_gone_on_from(machine, unpacked):
    machine.leave(unpacked)
    machine.check()
    # Two lines had a part each on the way, and of what was read a chunk was not written yet.
    assert machine.store.sent <= len(TAR) - unpacked + 2 * PART


def test_it_is_gone_on_from_twice(machine):
    machine.leave(700_000)
    machine.leave(1_500_000)
    machine.check()
    assert machine.store.sent <= len(TAR) - 1_500_000 + 2 * PART


def test_the_archive_never_lies_beside_its_content(machine, monkeypatch):
    rooms = []
    take_room = partfile.PartFile._take_room
    monkeypatch.setattr(
        partfile.PartFile,
        "_take_room",
        lambda self: (take_room(self), rooms.append(os.path.getsize(self.path))),
    )
    machine.check()
    assert rooms == [4 * PART]


def damage(path):
    os.chmod(path, 0o600)
    with open(path, "r+b") as stream:
        stream.write(b"damaged")


def lengthen(path):
    os.chmod(path, 0o600)
    with open(path, "ab") as stream:
        stream.write(b"more")


@pytest.mark.parametrize("change", [damage, lengthen, os.unlink])
@pytest.mark.parametrize("name", ["ds/a.bin", "ds/large.bin"])
def test_what_was_damaged_since_comes_anew(machine, change, name):
    machine.leave(1_500_000)
    change(machine.path(name))
    machine.check()


@pytest.mark.parametrize("size", [0, 100, 512, 1000])
def test_a_journal_that_lost_its_end_costs_what_it_lacks(machine, size):
    machine.leave(1_500_000)
    os.truncate(os.path.join(str(machine.folder), f".part-{sha(TAR)}.journal"), size)
    machine.check()
    assert machine.store.sent <= len(TAR) + 8 * PART


@pytest.mark.parametrize("lost", [1_000, 200_000, 600_000, 1_100_000])
def test_a_file_that_a_machine_took_the_end_of_with_it_costs_that_end(machine, lost):
    machine.leave(1_500_000)
    path = machine.path("ds/large.bin")
    kept = os.path.getsize(path) - lost
    os.chmod(path, 0o600)
    os.truncate(path, kept)
    machine.check()
    assert machine.store.sent <= len(TAR) - 301_000 - kept + 2 * PART


def test_a_store_without_ranges_sends_all(machine):
    machine.store.ranges = False
    machine.check()


def test_a_store_that_lost_its_ranges_sends_all_again(machine):
    machine.leave(1_500_000)
    machine.store.ranges = False
    machine.check()


def test_where_memory_cannot_be_mapped_it_is_read(machine, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError("no such device")

    monkeypatch.setattr(partfile.mmap, "mmap", refuse)
    machine.check()


def test_something_else_than_was_staged_leaves_nothing(machine):
    other = tar_of(dict(FILES, **{"ds/a.bin": os.urandom(300_000)}))
    with pytest.raises(InputError, match="is not what was staged"):
        machine.intake(other).run()
    left = [name for name in os.listdir(str(machine.folder)) if not name.startswith(".lock")]
    assert left == []


def test_a_line_that_is_refused_keeps_what_came(machine):
    machine.store.cut = 50_000

    def wait(_seconds):
        machine.store.refuse = (403, b"", {})

    one = machine.intake(connections=1)
    one.cancelled.wait = wait
    with pytest.raises(InputError, match="refused"):
        one.run()
    machine.store.cut = machine.store.refuse = None
    machine.store.sent = 0
    machine.check(connections=1)
    assert machine.store.sent < len(TAR) - 45_000


def test_a_disk_without_room_for_the_parts_says_so(machine, monkeypatch):
    def refuse(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(partfile.os, "posix_fallocate", refuse)
    with pytest.raises(DiskFullError, match="the disk is full: coins could not be downloaded"):
        machine.intake().run()
    left = [name for name in os.listdir(str(machine.folder)) if not name.startswith(".lock")]
    assert left == []
