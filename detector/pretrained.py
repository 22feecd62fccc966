"""Start a network from public or own weights, on every rank alike, and say what came of it.

Between the configuration and `models.weights`: which file, who agrees that it was read, what is frozen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from detector import hub
from detector.config import ModelConfig
from detector.freezing import hold_fixed
from detector.models.detector import Detector
from detector.models.weights import LoadReport, WeightsError, load_backbone, load_weights
from detector.runtime import Runtime

LICENCES: Final = {
    "hf://ustc-community/dfine": "Apache-2.0",
    "hf://PekingU/rtdetr": "Apache-2.0",
}
"""Of published weights, by how their names begin; as their authors' pages say."""


def start_from_weights(
    model: Detector, config: ModelConfig, runtime: Runtime, *, resuming: bool = False
) -> None:
    """Fill and freeze `model` as `model.weights`, `backbone_weights` and `freeze` say.

    Called before the average, the optimizer and DDP are built. Every rank reads the file, and none goes
    on where one could not; from the hub one rank a machine downloads it. With `resuming` the file is not
    read (it may be gone by then), but frozen is what was frozen.

    Raises:
        WeightsError: on every rank, in one sentence.
    """
    reference = config.weights or config.backbone_weights
    if reference is not None and not resuming:
        path = _locate(reference, runtime)
        report, failure = None, None
        try:
            report = (load_weights if config.weights else load_backbone)(model, path)
        except WeightsError as error:
            failure = str(error)
        _agree(runtime, failure)
        if runtime.is_main and report is not None:
            _say(reference, report)
    fixed = hold_fixed(model, config)
    if fixed and runtime.is_main:
        print(f"frozen={','.join(fixed)}", flush=True)


def licence_of(reference: str | None) -> str:
    """The licence of the weights that a run starts from, as far as it is known here."""
    if reference is None:
        return "none: trained from nothing"
    known = (text for start, text in LICENCES.items() if reference.startswith(start))
    return next(known, "unknown: that of the weights it started from")


def _locate(reference: str, runtime: Runtime) -> Path:
    """The file that `reference` names, on this rank's machine."""
    if not reference.startswith(hub.PREFIX):
        return Path(os.path.expanduser(reference))
    path, failure = "", None
    if runtime.local_rank == 0:
        try:
            path = str(hub.fetch(hub.HubReference.parse(reference)))
        except hub.HubError as error:
            failure = str(error)
    _agree(runtime, failure)
    return Path(runtime.all_gather(path)[runtime.rank - runtime.local_rank])


def _agree(runtime: Runtime, failure: str | None) -> None:
    """Raise on every rank what failed on one."""
    failures = [text for text in runtime.all_gather(failure) if text is not None]
    if failures:
        raise WeightsError(failures[0])


def _say(reference: str, report: LoadReport) -> None:
    print(f"weights_loaded={reference} layout={report.layout} tensors={report.loaded}")
    heads = dict.fromkeys(name.rpartition(".")[0] for name in report.reinitialised)
    print(f"weights_reinitialised={','.join(heads) or 'none'}", flush=True)
