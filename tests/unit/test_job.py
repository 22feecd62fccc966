from __future__ import annotations

import datetime as dt
import json

import pytest

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.job import (
    JobSpec,
    Limits,
    check_device,
    check_overrides,
    new_run_id,
    parse_processes,
    slug,
)
from kernel_tools.launching.launch import LaunchOptions


def test_a_run_id_sorts_by_time_and_is_safe_as_a_folder():
    now = dt.datetime(2026, 5, 4, 3, 2, 1, tzinfo=dt.timezone.utc)
    assert (
        new_run_id("Coins/HGNet v2!", now=now, entropy="beef")
        == "20260504-030201-coins-hgnet-v2-beef"
    )
    assert slug("///") == "run"
    assert len(slug("x" * 200)) == 40


def test_a_job_is_json_with_every_field():
    job = JobSpec("r", "n", "t", ("-m", "detector"), inputs=({"object": "o"},), limits=Limits(60))
    data = json.loads(json.dumps(job.to_json()))
    assert data["schema_version"] == 1
    assert data["argv"] == ["-m", "detector"]
    assert data["limits"] == {
        "timeout_seconds": 60,
        "max_hours": None,
        "stall_minutes": 30.0,
        "grace_seconds": 30.0,
    }


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_wrong_process_counts_are_refused(value):
    with pytest.raises(InvalidArgumentError, match="nproc-per-node"):
        parse_processes(value)


def test_right_process_counts():
    assert (parse_processes("2"), parse_processes("auto"), parse_processes(4)) == (2, "auto", 4)


@pytest.mark.parametrize("device", ["gpu", "0,", "cuda:0", ""])
def test_wrong_devices_are_refused(device):
    with pytest.raises(InvalidArgumentError, match="device"):
        check_device(device)


@pytest.mark.parametrize("override", ["solver.epochs", "=5", "a b=3"])
def test_overrides_must_read_key_equals_value(override):
    with pytest.raises(InvalidArgumentError, match="section.key=value"):
        check_overrides([override])


def test_limits_must_be_above_zero():
    with pytest.raises(InvalidArgumentError, match="max_hours"):
        LaunchOptions(max_hours=0)


def test_an_unknown_launch_option_names_those_there_are():
    with pytest.raises(InvalidArgumentError, match="nproc_per_node"):
        LaunchOptions.of({"ranks": 2})


def test_accents_leave_their_letters_in_a_run_id():
    assert slug("Żółw läuft") == "zolw-lauft"


@pytest.mark.parametrize("pattern", ["/etc/passwd", "../../*", "", "a\\b"])
def test_an_artifact_outside_the_work_folder_is_refused_before_anything_is_sent(pattern):
    with pytest.raises(InvalidArgumentError, match="--artifact"):
        LaunchOptions(artifacts=[pattern])
    LaunchOptions(artifacts=["artifacts/*.json"])
