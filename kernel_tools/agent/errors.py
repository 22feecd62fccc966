"""The agent's errors: what is expected to go wrong, said in one sentence without secrets."""

from __future__ import annotations


class AgentError(Exception):
    """Expected trouble; `str(error)` is one sentence for the user."""


class RunNotFoundError(AgentError):
    """No run of that id is in the remote folder."""


class InputError(AgentError):
    """An input could not be downloaded, verified or unpacked."""


class DiskFullError(InputError):
    """The disk filled while an input came; what there is of it is removed, so that others have room."""


class UnsafeArchiveError(InputError):
    """An archive holds something that must not be unpacked."""


class PushError(AgentError):
    """A file of the run could not be sent to the store."""


class SourceError(PushError):
    """A file of the run cannot be read as it was when its sending began; the store has no part in it."""


class UploadGoneError(PushError):
    """The store knows a begun upload no more: it has served, or was ended."""


class StopRequestedError(Exception):
    """Raised inside staging when the run was asked to end; carries nothing."""
