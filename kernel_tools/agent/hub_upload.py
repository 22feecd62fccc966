"""Put one file into a model repository of the Hugging Face Hub. A program of its own: it prints one JSON line.

    python hub_upload.py ORG/REPO NAME FILE NOTES        HF_TOKEN and HF_ENDPOINT in the environment

Needs huggingface_hub, which the rest of the agent does without. Nothing it prints holds the token or a link.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

TRIES = 3
PAUSE_SECONDS = 2.0
# Of our own notes beside a file, as the laptop's side writes them.
NOTES = ".kernel_tools"


def main(repository: str, name: str, path: str, notes: str) -> None:
    """Upload, and say how it went: {"problem": one sentence, or ""}."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except Exception as error:  # noqa: BLE001 - also one that is there and does not load
        absent = isinstance(error, ImportError) and error.name == "huggingface_hub"
        say("huggingface_hub is not installed" if absent else "huggingface_hub cannot be imported")
        return
    problem = ""
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE_SECONDS * number)
        try:
            upload(hub, repository, name, path, notes)
        except Exception as error:  # noqa: BLE001 - its own text may hold a signed link
            status = status_of(error) or status_of(error.__cause__)  # around the bytes of an upload
            problem = sentence(error, status)
            if status is not None and status < 500 and status not in (408, 429):
                break
        else:
            problem = ""
            break
    say(problem)


def upload(hub: Any, repository: str, name: str, path: str, notes: str) -> None:
    """One commit, private where the repository is made."""
    api = hub.HfApi(token=os.environ["HF_TOKEN"], endpoint=os.environ.get("HF_ENDPOINT"))
    api.create_repo(repository, repo_type="model", private=True, exist_ok=True)
    added = hub.CommitOperationAdd
    api.create_commit(
        repository,
        [added(name, path), added("{}/{}.json".format(NOTES, name), notes.encode("utf-8"))],
        commit_message="Push " + name,
        repo_type="model",
    )


def status_of(error: Any) -> Any:
    """Return what the hub answered; None where it did not."""
    return getattr(getattr(error, "response", None), "status_code", None)


def sentence(error: BaseException, status: Any) -> str:
    """Say what went wrong without what the client says: that may hold the token or a link."""
    if status in (401, 403):
        return "the hub refused HF_TOKEN ({})".format(status)
    if status is not None:
        return "the hub answered {}".format(status)
    return "the hub does not answer ({})".format(type(error).__name__)


def say(problem: str) -> None:
    """Print the one line."""
    print(json.dumps({"problem": problem}), flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules must not stand for a library's
    main(*sys.argv[1:])
