"""A program of the agent's own beside it, for what may hang or bring its process down: it prints JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

from .files import Json
from .trainer import clean_environment

_LOOK_SECONDS = 0.2


class Child:
    """One of the programs in this folder, run once.

    Args:
        program: the file's name.
        arguments: its arguments; seen by everybody on the machine.
        environment: that of the agent, and what is to be added.
    """

    def __init__(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        folder = os.path.dirname(os.path.abspath(__file__))
        self._argv = [sys.executable, os.path.join(folder, program), *arguments]
        self._environment = clean_environment(environment)
        self._process: Optional[subprocess.Popen] = None  # type: ignore[type-arg]

    @property
    def pid(self) -> Optional[int]:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def run(
        self, *, seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> Tuple[List[Json], str]:
        """Return what it said, and why there is no more: "" where it came to its end.

        Args:
            seconds: until it is killed.
            given_up: asked again and again; it is killed once that is true.
        """
        try:
            process = subprocess.Popen(
                self._argv, cwd="/", env=self._environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return [], f"nothing can be started: {error}"
        self._process = process
        deadline = time.monotonic() + seconds
        output, problem = b"", ""
        try:
            while not problem:
                try:
                    output, _ = process.communicate(timeout=_LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if given_up():
                        problem = "it was given up"
                    elif time.monotonic() > deadline:
                        problem = f"no answer within {seconds:.0f} s"
        finally:
            if process.returncode is None:  # late, or whoever asked has given up
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            self._process = None
        if not problem and process.returncode:
            problem = f"its process ended with {_ending(process.returncode)}"
        return _rows(output), problem


def _rows(output: bytes) -> List[Json]:
    rows = []
    for line in output.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):  # a library may print too
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
