"""Whether clocks agree and stores answer, from here and from there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kernel_tools.preflight.report import Check

# S3 refuses what was signed 15 minutes off; a clock that is a minute off is on its way there.
MOST_SKEW_SECONDS: Final = 60.0
_CLOCK_ADVICE: Final = "for example: sudo timedatectl set-ntp true"


def clocks(answer: Mapping[str, Any], asked: float, answered: float) -> Iterator[Check]:
    """Judge how far the clocks of this machine, the remote and the store are apart; seconds since 1970."""
    # As NTP does: both ways together; what they differ by is how little is known.
    out, back = answer["asked_at"] - asked, answer["answered_at"] - answered
    ahead, unsure = (out + back) / 2, abs(out - back) / 2
    off = abs(ahead) - unsure > MOST_SKEW_SECONDS
    yield Check(
        "clock", "problem" if off else "ok",
        _offset(ahead, "this machine's", unsure), f"set the one that is wrong, {_CLOCK_ADVICE}" if off else "",
    )  # fmt: skip
    told = [
        row["ahead_seconds"] for row in answer["stores"] if row.get("ahead_seconds") is not None
    ]
    for there in told[:1]:
        far = abs(there) > MOST_SKEW_SECONDS
        yield Check(
            "clock and store", "problem" if far else "ok", _offset(there, "the store's", 0.5),
            f"set the remote's clock, {_CLOCK_ADVICE}" if far else "",
        )  # fmt: skip
        mine = there - ahead
        if abs(mine) - unsure > MOST_SKEW_SECONDS:
            told_here = _offset(mine, "the store's", unsure)
            yield Check(
                "clock here", "problem",
                f"{told_here}: it will refuse what is signed here",
                f"set this machine's clock, {_CLOCK_ADVICE}",
            )  # fmt: skip


def _offset(ahead: float, whose: str, unsure: float) -> str:
    side = "ahead of" if ahead >= 0 else "behind"
    return f"{abs(ahead):.1f} s {side} {whose}, give or take {unsure:.1f} s"


def stores(answer: Mapping[str, Any]) -> Iterator[Check]:
    """Judge what the remote reached."""
    for row in answer["stores"]:
        name, problem = str(row["name"]), str(row["problem"])
        if problem:
            advice = "" if "MINIO_PUBLIC_ENDPOINT" in problem else (
                "the remote must reach the store by the name it is signed for: set MINIO_PUBLIC_ENDPOINT to it"
            )  # fmt: skip
            if name == "the hub":
                advice = "switch the session's internet on, or stage to s3"
            yield Check("store from there", "problem", f"{name}: {problem}", advice)
        else:
            read = f", {row['object']} can be read" if row.get("read") else ""
            yield Check("store from there", "ok", f"{name} answers{read}")


def no_store(local: bool) -> Check:
    """Say what it means that no store is configured."""
    if local:
        return Check("store", "ok", "the embedded one, on this machine too")
    return Check(
        "store", "note", "none is configured: data sets cannot be staged, and files come over the kernel",
        "set MINIO_ENDPOINT, MINIO_ACCESS_KEY and MINIO_SECRET_KEY, or stage to hf://ORG/REPO",
    )  # fmt: skip
