"""Project: the folder that code, data sets and runs belong to, and what stands in it.

Everything is looked up anew at each use: a notebook may change its folder, and `.env` its values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernel_tools.runs.registry import Registry
from kernel_tools.settings import Settings, find_project_dir, load_settings

if TYPE_CHECKING:
    from kernel_tools.datasets.reference import DatasetRegistry


class Project:
    """One project: its folder, its settings, the runs it launched, the data sets it staged."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The one that was given, else the project of the current folder."""
        return self._folder or find_project_dir()

    @property
    def registry(self) -> Registry:
        """The runs that were launched."""
        return Registry(self.folder)

    @property
    def datasets(self) -> DatasetRegistry:
        """The data sets that were staged."""
        from kernel_tools.datasets.reference import DatasetRegistry

        return DatasetRegistry(self.folder)

    def settings(self) -> Settings:
        """Read the environment and `.env`."""
        return load_settings(self.folder)

    def resolve(self, path: str | Path) -> Path:
        """Relative paths are looked up in the current folder, then in the project."""
        path = Path(path).expanduser()
        return path.absolute() if path.exists() else self.folder / path
