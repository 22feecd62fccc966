from __future__ import annotations

import base64
import zlib

import pytest

from kernel_tools.runs.mirror import METRICS, RunMirror


def part(offset, data, size=None):
    packed = base64.b64encode(zlib.compress(data)).decode()
    return {"offset": offset, "data": packed, "size": offset + len(data) if size is None else size}


def test_two_writers_of_one_run_leave_one_gapless_log(tmp_path):
    one, two = RunMirror(tmp_path), RunMirror(tmp_path)
    one.write_log(part(0, b"hello "))
    two.write_log(part(0, b"hello wor"))
    one.write_log(part(6, b"world\n"))
    assert one.log_path.read_bytes() == b"hello world\n"


def test_a_part_that_would_leave_a_gap_is_refused(tmp_path):
    with pytest.raises(ValueError, match="past the end"):
        RunMirror(tmp_path).write_log(part(5, b"x"))


def test_rows_cut_by_a_resume_are_read_again_from_the_start(tmp_path):
    mirror = RunMirror(tmp_path)
    mirror.write_rows(METRICS, {"offset": 0, "data": '{"epoch": 1}\n{"epoch": 2}\n', "size": 26})
    assert mirror.write_rows(METRICS, {"offset": 0, "data": "", "size": 13}) is None
    assert mirror.offsets().metrics == 0
    rows = mirror.write_rows(METRICS, {"offset": 0, "data": '{"epoch": 1}\n', "size": 13})
    assert rows == ({"epoch": 1},)
    assert mirror.rows(METRICS) == ({"epoch": 1},)


def test_the_tail_begins_at_a_line(tmp_path):
    mirror = RunMirror(tmp_path)
    mirror.write_log(part(0, b"".join(b"line %d\n" % i for i in range(20000))))
    tail = mirror.log_tail()
    assert tail.startswith("line ")
    assert tail.endswith("line 19999\n")
    assert len(tail) <= 64 * 1024
