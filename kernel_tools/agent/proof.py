"""Whether each card, or the processor, computes. A program of its own: it prints JSON, a line a finding.

In the kernel's own process the CUDA context would hold half a gigabyte of each card for as long as the
kernel lives. Knows nothing of the rest of the agent.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# Ones times ones is this everywhere, exactly, in half precision too (up to 2,048).
SIDE = 1000


def main() -> None:
    """Say what torch is here, then what each place of it computes."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        missing = getattr(error, "name", None) == "torch"
        say(torch=None, problem="" if missing else first_line(error))
        return
    except Exception as error:  # noqa: BLE001 - a library of its own that does not load
        say(torch=None, problem=first_line(error))
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(torch=torch.__version__, cuda=torch.version.cuda, cards=count, problem="")
    for place in ["cuda:%d" % number for number in range(count)] or ["cpu"]:
        try:
            say(place=place, problem="", **prove(torch, place))
        except Exception as error:  # noqa: BLE001 - whatever a card that does not work may raise
            say(place=place, problem=first_line(error), **about(torch, place))


def prove(torch: Any, place: str) -> Any:
    """Compute there; raises what torch raises, and ArithmeticError where the product is wrong."""
    began = time.monotonic()
    for kind in (torch.float32, torch.float16) if place != "cpu" else (torch.float32,):
        ones = torch.ones(SIDE, SIDE, device=place, dtype=kind)
        if not bool((ones @ ones == SIDE).all()):
            raise ArithmeticError(
                "a product of matrices of ones is not %d everywhere in %s" % (SIDE, kind)
            )
    return dict(about(torch, place), seconds=round(time.monotonic() - began, 3))


def about(torch: Any, place: str) -> Any:
    """Say which card it is, and what it was built for."""
    if place == "cpu":
        return {}
    told = {}
    for name, ask in (
        ("name", lambda: torch.cuda.get_device_name(place)),
        ("memory_total", lambda: torch.cuda.get_device_properties(place).total_memory),
        ("memory_free", lambda: torch.cuda.mem_get_info(place)[0]),
        ("capability", lambda: "sm_%d%d" % torch.cuda.get_device_capability(place)),
        ("built_for", torch.cuda.get_arch_list),
    ):
        try:
            told[name] = ask()
        except Exception:  # noqa: BLE001 - an older torch, or a card that answers nothing any more
            told[name] = None
    return told


def first_line(error: BaseException) -> str:
    """Return what went wrong in one line."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def say(**told: Any) -> None:
    """Print one finding, at once: the next may never come."""
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules must not stand for a library's
    main()
