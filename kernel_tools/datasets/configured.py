"""The archive that a configuration names: `data.archive_object`, `archive_sha256` and `root`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernel_tools.errors import ConfigurationError, InvalidArgumentError
from kernel_tools.settings import Settings


@dataclass(frozen=True, slots=True)
class ConfiguredArchive:
    """What a configuration says of its data set.

    Attributes:
        name: the last part of its root.
        object: its key in the store.
        sha256: of the archive; None where the configuration does not tell.
        root: where it unpacks to.
    """

    name: str | None
    object: str
    sha256: str | None
    root: str | None


def archive_of(config: str, *, project_dir: Path, settings: Settings) -> ConfiguredArchive:
    """Read a configuration's archive keys.

    Raises:
        ConfigurationError: there is no such configuration, or it is wrong.
        InvalidArgumentError: it names no archive.
    """
    from detector import config as detector_config

    try:
        found = detector_config.find_config(config, project_dir)
        environ = {**settings.dotenv, **settings.environ}
        data = detector_config.load_config(found, (), environ=environ).data
    except detector_config.ConfigError as error:
        raise ConfigurationError(str(error)) from error
    if data.archive_object is None:
        raise InvalidArgumentError(
            f"{config} names no archive.", hint="Its data.archive_object would; or give a PATH."
        )
    name = data.root.rstrip("/").rpartition("/")[2] if data.root else None
    return ConfiguredArchive(name or None, data.archive_object, data.archive_sha256, data.root)
