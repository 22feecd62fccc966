"""Where settings come from: an argument, the environment, then a `.env` file; and `Secret`.

A `.env` is looked for in `KERNEL_TOOLS_ENV_FILE`, the project's root, and its `scripts/`. It is read
anew at each use and never exported into `os.environ`, so that no child process inherits its secrets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernel_tools.errors import ConfigurationError
from kernel_tools.redact import MASK, register_secret

PROJECT_MARKERS = ("pyproject.toml", ".git", ".kernel_tools")


class Secret:
    """A value that prints as `***`; `reveal()` is the only way to it. It cannot be pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        register_secret(value)
        self._value = value

    def reveal(self) -> str:
        """Return the value itself: to a client library, never to a string that leaves."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    __str__ = __repr__

    def __format__(self, _spec: str) -> str:
        return MASK

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Secret is not pickled")


@dataclass(frozen=True, slots=True)
class Settings:
    """Looks names up in the environment, then in the `.env` file of a project."""

    # Both hold secrets, and a value of a cell shows its repr.
    environ: Mapping[str, str] = field(repr=False)
    dotenv: Mapping[str, str] = field(repr=False)
    project_dir: Path

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("Settings hold secrets and are not pickled")

    def get(self, name: str) -> str | None:
        """Return the value, None where it is not set or empty."""
        return self.environ.get(name) or self.dotenv.get(name) or None

    def secret(self, name: str) -> Secret | None:
        """Return the value as a `Secret`, registered with the redaction filter."""
        value = self.get(name)
        return None if value is None else Secret(value)

    def require_secret(self, name: str) -> Secret:
        """Like `secret`.

        Raises:
            ConfigurationError: the name is set nowhere; says where it could be.
        """
        value = self.secret(name)
        if value is None:
            raise ConfigurationError(
                f"{name} is not set.",
                hint=f"Set it in the environment or in {self.project_dir.name}/.env (never in a cell).",
            )
        return value


def load_settings(
    project_dir: Path | None = None, *, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings of a project (default: the one that holds the current folder).

    Raises:
        ConfigurationError: `KERNEL_TOOLS_ENV_FILE` names a file that does not exist.
    """
    environ = os.environ if environ is None else environ
    project_dir = find_project_dir() if project_dir is None else project_dir
    return Settings(dict(environ), _read_dotenv(project_dir, environ), project_dir)


def find_project_dir(start: Path | None = None) -> Path:
    """Return the nearest folder upwards that holds a project marker, else `start` itself."""
    start = (Path.cwd() if start is None else start).resolve()
    for folder in (start, *start.parents):
        if any((folder / marker).exists() for marker in PROJECT_MARKERS):
            return folder
    return start


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's folder for records and secrets at rest (mode 0700), outside every project."""
    environ = os.environ if environ is None else environ
    named = environ.get("KERNEL_TOOLS_STATE_DIR")
    if named:
        folder = Path(named)
    else:
        import platformdirs

        folder = Path(platformdirs.user_state_dir("kernel_tools", appauthor=False))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _read_dotenv(project_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    named = environ.get("KERNEL_TOOLS_ENV_FILE")
    if named and not Path(named).is_file():
        raise ConfigurationError(
            f"KERNEL_TOOLS_ENV_FILE names {named}, which is not a file.",
            hint="Correct the path, or unset it.",
        )
    for path in (Path(named),) if named else (project_dir / ".env", project_dir / "scripts/.env"):
        if path.is_file():
            from dotenv import dotenv_values

            return {
                k: v for k, v in dotenv_values(path, interpolate=False).items() if v is not None
            }
    return {}
