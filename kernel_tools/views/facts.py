"""What there is to say about a run, in words: pure functions from a snapshot to labelled strings.

Panels, static views and text lines all read from here, so they can never disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kernel_tools.state import RunSnapshot
from kernel_tools.views.readable import is_finite, is_number, readable

UNKNOWN: Final = "not yet"
# The figure that every surface names, beside the run's own best metric.
HEADLINE_METRIC: Final = "AP50"


@dataclass(frozen=True, slots=True)
class Section:
    """Labelled figures that belong together: (label, value) in reading order."""

    heading: str
    pairs: tuple[tuple[str, str], ...]


def title(snapshot: RunSnapshot) -> str:
    """The run's name, or its id where it has none."""
    return snapshot.name or snapshot.run_id


def sections(snapshot: RunSnapshot) -> tuple[Section, ...]:
    """Return everything that a person watches, grouped; sections with nothing to say are left out.

    Once the run has ended, what never became known is left out too.
    """
    status = readable(snapshot.status)
    parts: tuple[Section, ...] = (
        Section("training", _training(snapshot)),
        Section(
            "machine",
            (
                ("where", snapshot.where or UNKNOWN),
                ("device", _device(status)),
                ("throughput", _throughput(status)),
                *_data_wait(snapshot.steps),
                *((f"GPU {i}", _gpu(gpu)) for i, gpu in enumerate(_gpus(snapshot.agent))),
            ),
        ),
        Section(
            "code and data",
            (
                ("code synced", _sync(snapshot.sync)),
                *((f"data set {one.name}", one.words()) for one in inputs(snapshot)),
            ),
        ),
    )
    if snapshot.terminal:
        parts = tuple(
            Section(one.heading, tuple(pair for pair in one.pairs if pair[1] != UNKNOWN))
            for one in parts
        )
    return tuple(one for one in parts if one.pairs)


def rows(snapshot: RunSnapshot) -> tuple[tuple[str, str], ...]:
    """Return (label, value) of all sections, in reading order."""
    return tuple(pair for section in sections(snapshot) for pair in section.pairs)


def _training(snapshot: RunSnapshot) -> tuple[tuple[str, str], ...]:
    status = readable(snapshot.status)
    if _tells_nothing(snapshot) and status.get("world_size") is None:
        return (("elapsed", duration(status.get("elapsed_seconds"))),)
    facts = [("world size", _world(status))]
    if not _judges(status):
        facts += [
            ("optimizer steps", _steps(status)),
            ("training loss", number(status.get("train_loss"))),
            ("learning rate", number(status.get("lr"))),
        ]
    facts += [
        (f"{HEADLINE_METRIC} now", number(headline(status))),
        ("best metric", _best(status)),
        ("elapsed", duration(status.get("elapsed_seconds"))),
    ]
    if not snapshot.terminal:
        facts.append(("time left", duration(status.get("eta_seconds"))))
    if (status.get("attempt") or 1) > 1:
        facts.append(("attempt", f"{status['attempt']}, started again after a crash"))
    return tuple(facts)


@dataclass(frozen=True, slots=True)
class Input:
    """A data set on its way to the run, as the agent tells it.

    Attributes:
        name: the reference's name.
        state: waiting, downloading, unpacking or ready.
        done_bytes: here so far.
        size_bytes: in all, None where nobody knows.
    """

    name: str
    state: str
    done_bytes: int
    size_bytes: int | None

    @property
    def fraction(self) -> float:
        """How much of it is here, 0..1."""
        if self.state == "ready":
            return 1.0
        return self.done_bytes / self.size_bytes if self.size_bytes else 0.0

    def words(self, bytes_per_second: float | None = None) -> str:
        """`downloading, 12.00 MB of 30.00 MB, 4.00 MB/s`; a ready one has been verified."""
        if self.state == "ready":
            whole = "" if self.size_bytes is None else f", {size(self.size_bytes)}"
            return f"ready{whole}, verified by SHA-256"
        if self.state != "downloading":
            return self.state
        whole = "" if self.size_bytes is None else f" of {size(self.size_bytes)}"
        speed = "" if bytes_per_second is None else f", {size(bytes_per_second)}/s"
        return f"downloading, {size(self.done_bytes)}{whole}{speed}"


def inputs(snapshot: RunSnapshot) -> tuple[Input, ...]:
    """Return the data sets that the agent brings, or has brought, to the run."""
    coming = (snapshot.agent or {}).get("inputs") or ()
    return tuple(
        Input(
            name=str(row.get("name") or "?"),
            state=str(row.get("state") or "waiting"),
            done_bytes=int(row.get("bytes") or 0),
            size_bytes=row.get("size_bytes"),
        )
        for row in coming
    )


def bars(
    snapshot: RunSnapshot, rates: Mapping[str, float] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return (label with figures, fraction 0..1) of the run and its epoch, or of the data on its way.

    `rates` are bytes a second by the data set's name, where somebody has measured them.
    """
    status = readable(snapshot.status)
    epochs, epoch = status.get("total_epochs"), status.get("current_epoch")
    steps, step = status.get("steps_per_epoch"), status.get("step")
    whole = float(status.get("progress") or 0.0)
    coming = inputs(snapshot) if status.get("phase") == "inputs" and not snapshot.terminal else ()
    if coming:
        rates = rates or {}
        return tuple((f"{i.name}: {i.words(rates.get(i.name))}", i.fraction) for i in coming)
    if _judges(status):
        return ((f"batches evaluated {step or 0} of {steps}", whole),)
    if _tells_nothing(snapshot):
        return ()
    if snapshot.terminal:
        return (
            (f"epochs done {status.get('completed_epochs') or 0} of {_or(epochs, '?')}", whole),
        )
    if epoch is None:
        return (("waiting for the first epoch", whole),)
    return (
        (f"epoch {epoch} of {_or(epochs, '?')}", whole),
        (f"step {_or(step, '?')} of {_or(steps, '?')}", (step or 0) / steps if steps else 0.0),
    )


def tokens(snapshot: RunSnapshot) -> str:
    """The figures as `name=value`, the same tokens that the log carries; unknown ones are left out."""
    status, sync = readable(snapshot.status), snapshot.sync or {}
    pairs: list[tuple[str, Any]] = [
        ("sync_files", sync.get("files")),
        ("sync_size_mb", _megabytes(sync.get("bytes"))),
        ("world_size", status.get("world_size")),
        ("optimizer_steps", status.get("optimizer_steps")),
        ("skipped_steps", status.get("skipped_steps")),
    ]
    pairs += [(HEADLINE_METRIC, _plain(headline(status)))]
    return " ".join(f"{name}={value}" for name, value in pairs if value is not None)


def line(snapshot: RunSnapshot) -> str:
    """One line for a terminal or a batch log."""
    status = readable(snapshot.status)
    parts = [f"{snapshot.run_id}", f"state={snapshot.state.value}"]
    if _judges(status):
        parts.append(f"eval_batch={status.get('step') or 0}/{status['steps_per_epoch']}")
    elif not _tells_nothing(snapshot):
        done = status.get("completed_epochs") or 0
        parts.append(f"epoch={done}/{_or(status.get('total_epochs'), '?')}")
    if status.get("optimizer_steps") is not None:
        parts.append(f"optimizer_steps={status['optimizer_steps']}")
    if status.get("train_loss") is not None:
        parts.append(f"loss={number(status['train_loss'])}")
    value = headline(status)
    if value is not None:
        parts.append(f"{HEADLINE_METRIC}={_plain(value)}")
    if not snapshot.terminal and status.get("eta_seconds") is not None:
        parts.append(f"eta={duration(status['eta_seconds']).replace(' ', '')}")
    if snapshot.contact.kind != "live":
        parts.append(f"contact={snapshot.contact.kind}")
    return " ".join(parts)


def failure(snapshot: RunSnapshot) -> str | None:
    """Why the run failed or timed out, in one sentence; None where it did not."""
    if snapshot.state.value not in {"failed", "timed_out"}:
        return None
    error = readable(snapshot.status).get("error") or {}
    if not error:
        return snapshot.message or f"the run ended as {snapshot.state.value}"
    rank = error.get("rank")
    where = "" if rank is None else f" (rank {rank})"
    return f"{error.get('type') or 'error'}: {error.get('message') or snapshot.message}{where}"


def headline(status: Mapping[str, Any]) -> float | None:
    """AP50 of the last evaluation, None before the first."""
    metrics = status.get("metrics")
    value = metrics.get(HEADLINE_METRIC) if isinstance(metrics, Mapping) else None
    if value is None and status.get("current_metric_name") == HEADLINE_METRIC:
        value = status.get("current_metric")
    return float(value) if value is not None and is_number(value) else None


def duration(seconds: float | None) -> str:
    """3725 -> '1 h 02 min'; 65 -> '1 min 05 s'."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def size(count: float | None) -> str:
    """Bytes in decimal units: 240000 -> '0.24 MB'."""
    if count is None:
        return UNKNOWN
    if count < 1e3:
        return f"{count:.0f} B"
    if count < 1e5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def number(value: float | None) -> str:
    """Four significant digits."""
    return UNKNOWN if value is None else f"{float(value):.4g}"


def plain_table(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return aligned lines `  label   value`."""
    pairs = tuple(pairs)
    width = max((len(label) for label, _ in pairs), default=0)
    return [f"  {label:<{width}}  {value}" for label, value in pairs]


def _tells_nothing(snapshot: RunSnapshot) -> bool:
    """True for a program without a status file, and for a run that ended before its first figure."""
    status = readable(snapshot.status)
    begun = snapshot.terminal or snapshot.state.value in {"training", "stopping"}
    keys = (
        "total_epochs",
        "current_epoch",
        "completed_epochs",
        "steps_per_epoch",
        "optimizer_steps",
    )
    return begun and not any(status.get(key) for key in keys)


def _judges(status: Mapping[str, Any]) -> bool:
    """True for a run that evaluates without training: it has batches, and no epochs."""
    return status.get("total_epochs") is None and bool(status.get("steps_per_epoch"))


def _or(value: object, otherwise: str) -> str:
    return otherwise if value is None else str(value)


def _plain(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _megabytes(count: float | None) -> str | None:
    return None if count is None else f"{count / 1e6:.2f}"


def _sync(sync: Mapping[str, Any] | None) -> str:
    if not sync:
        return UNKNOWN
    sent = sync.get("uploaded")
    tail = "" if sent is None else f" ({sent} sent, verified)"
    return f"{sync.get('files')} files, {_megabytes(sync.get('bytes'))} MB{tail}"


def _world(status: Mapping[str, Any]) -> str:
    ranks = status.get("world_size")
    if ranks is None:
        return UNKNOWN
    return f"{ranks} ranks (DDP)" if ranks > 1 else "1 rank"


def _steps(status: Mapping[str, Any]) -> str:
    steps = status.get("optimizer_steps")
    return UNKNOWN if steps is None else f"{steps}, {status.get('skipped_steps') or 0} skipped"


def _best(status: Mapping[str, Any]) -> str:
    value, name, epoch = (status.get(f"best_{key}") for key in ("metric", "metric_name", "epoch"))
    if value is None:
        return UNKNOWN
    return f"{name or 'metric'} {value:.4f}" + ("" if epoch is None else f", epoch {epoch}")


def _throughput(status: Mapping[str, Any]) -> str:
    rate = status.get("images_per_second")
    return UNKNOWN if rate is None else f"{rate:.1f} images/s"


def _data_wait(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The share of its time that a step waits for pictures, which should be near 0; () if nobody says."""
    row = steps[-1] if steps else {}
    waited, worked = row.get("data_seconds"), row.get("step_seconds")
    if not (is_finite(waited) and is_finite(worked)):
        return ()
    share = 100 * waited / max(waited + worked, 1e-9)
    return (("waiting for data", f"{share:.0f} % of the time, {waited:.2g} s a step"),)


def _device(status: Mapping[str, Any]) -> str:
    names = [str(name) for name in status.get("gpu_names") or ()]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return _or(status.get("device"), UNKNOWN)


def _gpus(agent: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    return tuple((agent or {}).get("gpus") or ())


def _gpu(gpu: Mapping[str, Any]) -> str:
    used, total = gpu.get("memory_used"), gpu.get("memory_total")
    return (
        f"{_or(gpu.get('util'), '?')} % busy, {size(used)} of {size(total)},"
        f" {_or(gpu.get('temperature'), '?')} °C"
    )
