"""Start a network from public or own weights, on every rank alike, and say what came of it.

Between the configuration and `models.weights`: which file, who agrees that it was read, what is frozen.
"""

from __future__ import annotations

from detector.config import ModelConfig
from detector.models.detector import Detector
from detector.models.weights import (
    LoadReport,
    WeightsError,
    load_backbone,
    load_weights,
    resolve_reference,
)
from detector.runtime import Runtime


def start_from_weights(
    model: Detector, config: ModelConfig, runtime: Runtime, *, resuming: bool = False
) -> None:
    """Fill and freeze `model` as `model.weights`, `backbone_weights` and `freeze` say.

    Called before the average, the optimizer and DDP are built. Every rank reads the file, and none goes
    on where one could not. With `resuming` the file is not read (it may be gone by then), but frozen
    is what was frozen.

    Raises:
        WeightsError: on every rank, in one sentence.
    """
    if config.weights is None and config.backbone_weights is None:
        return
    if not resuming:
        report, failure = None, None
        try:
            report = _load(model, config)
        except WeightsError as error:
            failure = str(error)
        failures = [text for text in runtime.all_gather(failure) if text is not None]
        if failures:
            raise WeightsError(failures[0])
        if runtime.is_main and report is not None:
            _say(config, report)
    spec = model.spec
    if config.freeze == "auto" and (spec.freeze_stem or spec.freeze_norm):
        model.freeze(stem=spec.freeze_stem, norms=spec.freeze_norm)
        if runtime.is_main:
            parts = {"backbone.stem": spec.freeze_stem, "backbone.norms": spec.freeze_norm}
            print(f"frozen={','.join(part for part, held in parts.items() if held)}", flush=True)


def _load(model: Detector, config: ModelConfig) -> LoadReport:
    if config.weights is not None:
        return load_weights(model, resolve_reference(config.weights))
    assert config.backbone_weights is not None
    return load_backbone(model, resolve_reference(config.backbone_weights))


def _say(config: ModelConfig, report: LoadReport) -> None:
    source = config.weights or config.backbone_weights
    print(f"weights_loaded={source} layout={report.layout} tensors={report.loaded}")
    heads = dict.fromkeys(name.rpartition(".")[0] for name in report.reinitialised)
    print(f"weights_reinitialised={','.join(heads) or 'none'}", flush=True)
