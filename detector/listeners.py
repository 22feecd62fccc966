"""Who listens to a run, as the configuration says: callbacks and sinks, on rank 0."""

from __future__ import annotations

from detector.callbacks import callback_listeners
from detector.config import Config, ConfigError
from detector.events import Listener, Listeners
from detector.progress import Progress
from detector.rundir import RunDirectory
from detector.runtime import Runtime
from detector.sinks import SinkContext, sink_listeners


def open_listeners(
    config: Config, run: RunDirectory, runtime: Runtime, progress: Progress
) -> Listeners:
    """Return rank 0's callbacks and sinks; none on the other ranks.

    Raises:
        ConfigError: on every rank, where a callback is not to be found.
    """
    found: list[Listener] = []
    failure = None
    if runtime.is_main:
        context = SinkContext(
            run.path, run.path.name, config.as_dict(), first_step=progress.optimizer_steps
        )
        try:
            found = callback_listeners(config.runtime.callbacks)
            found += sink_listeners(config.logging.sinks, context)
        except ConfigError as error:
            failure = str(error)
    failure = runtime.broadcast(failure)
    if failure is not None:
        raise ConfigError(failure)
    return Listeners(found)
