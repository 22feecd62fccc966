from __future__ import annotations

import inspect
import pickle

from IPython.core.error import UsageError

from kernel_tools import errors
from kernel_tools.redact import register_secret


def every_error():
    return [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.KernelToolsError)
    ]


def test_no_error_is_a_usage_error_which_notebook_runners_take_for_success():
    assert not any(issubclass(kind, UsageError) for kind in every_error())


def test_every_error_stands_in_the_drawn_tree():
    drawn = errors.__doc__ or ""
    assert [k.__name__ for k in every_error() if k.__name__ not in drawn] == []


def test_ipython_shows_one_line_whatever_the_message_holds():
    error = errors.StagingError("line one\nline two", hint="do\nthis")
    assert error._render_traceback_() == ["StagingError: line one line two do this"]


def test_a_registered_secret_never_stands_in_a_message():
    register_secret("hunter2-canary")
    assert "hunter2" not in str(errors.StoreAuthError("key hunter2-canary was refused"))


def test_errors_survive_pickling_with_their_attributes():
    error = errors.RunFailed("r failed.", run_id="r", state="failed", remote_error={"rank": 1})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.run_id, again.state, again.remote_error) == (
        "r failed.",
        "r",
        "failed",
        {"rank": 1},
    )
    remote = pickle.loads(pickle.dumps(errors.RemoteExecutionError("ValueError", "x", ("a",))))
    assert (remote.ename, remote.evalue, remote.traceback) == ("ValueError", "x", ("a",))
