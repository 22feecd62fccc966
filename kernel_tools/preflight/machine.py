"""What the machine itself is: Python, packages, torch, cards, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kernel_tools.preflight.report import Check
from kernel_tools.views.facts import size

# What a container gets unless it is told otherwise; loaders and NCCL die in it of a bus error.
LEAST_SHARED_BYTES: Final = 256 << 20
OLDEST_PYTHON: Final = (3, 10)
# Modules that the detector imports, and what installs each.
PACKAGES: Final[Mapping[str, str]] = {
    "numpy": "numpy", "scipy": "scipy", "cv2": "opencv-python-headless", "PIL": "pillow",
    "yaml": "pyyaml", "safetensors": "safetensors", "faster_coco_eval": "faster-coco-eval",
    "pycocotools": "pycocotools",
}  # fmt: skip
# One of the two does.
_EVALUATORS: Final = ("faster_coco_eval", "pycocotools")


def machine(answer: Mapping[str, Any]) -> Check:
    """Say what it is."""
    kind = "a Kaggle session" if answer["kaggle"] else str(answer["platform"])
    return Check("machine", "ok", f"{kind}, {_count(answer['cpu_count'], 'CPU')}")


def versions(answer: Mapping[str, Any]) -> Iterator[Check]:
    """Judge Python, torch and the packages that the detector imports."""
    version = str(answer["python"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_PYTHON:
        yield Check(
            "Python", "problem", f"{version} at {answer['executable']}; the detector needs 3.10",
            "start a kernel of a newer one: %remote_connect ... --kernel-name SPEC",
        )  # fmt: skip
    else:
        yield Check("Python", "ok", version)
    yield _torch(answer)
    missing = list(answer["missing"])
    if not all(name in missing for name in _EVALUATORS):
        missing = [name for name in missing if name not in _EVALUATORS]
    else:
        missing.remove("pycocotools")
    if missing:
        names = " ".join(PACKAGES[name] for name in missing)
        yield Check(
            "packages", "problem", f"the detector lacks {', '.join(missing)}",
            f"in a %%remote cell: %pip install {names}",
        )  # fmt: skip
    else:
        yield Check("packages", "ok", "all that the detector imports")


def _torch(answer: Mapping[str, Any]) -> Check:
    told, late = answer["torch"], str(answer["proof_problem"])
    install = "in a %%remote cell: %pip install torch"
    if told is None:
        return Check("torch", "problem", f"importing it failed: {late}", install)
    if told["torch"] is None:
        if told["problem"]:
            return Check("torch", "problem", f"it cannot be imported: {told['problem']}", install)
        return Check("torch", "problem", f"not installed for {answer['executable']}", install)
    driver = str(answer["driver"])
    built = f"built for CUDA {told['cuda']}" if told["cuda"] else "built without CUDA"
    carried = f", driver {driver} (CUDA up to {answer['driver_cuda'] or '?'})" if driver else ""
    found = f"{told['torch']}, {built}{carried}"
    listed, seen = len(answer["gpus"]), int(told["cards"])
    if listed > seen:
        advice = "CUDA_VISIBLE_DEVICES of the kernel hides some" if seen else (
            "install a torch that is built for the driver's CUDA: https://pytorch.org/get-started"
        )  # fmt: skip
        cards = f"the driver lists {_count(listed, 'card')}, torch sees {seen}"
        return Check("torch", "note" if seen else "problem", f"{found}; {cards}", advice)
    return Check("torch", "ok", found)


def places(answer: Mapping[str, Any]) -> Iterator[Check]:
    """One row a card, or one for the processor: does it compute?"""
    told, late = answer["torch"], str(answer["proof_problem"])
    places = list(answer["places"])
    for row in places:
        yield _place(row)
    if told is None or told["torch"] is None:
        for number, gpu in enumerate(answer["gpus"]):
            memory = size(gpu["memory_total"])
            found = f"{gpu['name']}, {memory}; not tried, for want of torch"
            yield Check(f"cuda:{number}", "note", found)
    elif late:
        expected = [f"cuda:{number}" for number in range(int(told["cards"]))] or ["cpu"]
        for number, name in enumerate(expected[len(places) :]):
            why = late if number == 0 else "not tried: the one before it hangs"
            advice = "restart the session, or take another machine"
            yield Check(name, "problem", f"the product was not computed: {why}", advice)


def _place(row: Mapping[str, Any]) -> Check:
    name = str(row["place"])
    card = "no CUDA card" if name == "cpu" else str(row.get("name") or "a card")
    total, free = row.get("memory_total"), row.get("memory_free")
    memory = ""
    if total:
        memory = f", {size(total)}" if free is None else f", {size(free)} of {size(total)} free"
    if row["problem"]:
        advice = "restart the session, or take another machine"
        capability, built = row.get("capability"), row.get("built_for")
        if capability and built and capability not in built:
            advice = f"install a torch that is built for {capability}; this one is for {', '.join(built)}"
        return Check(name, "problem", f"{card}{memory}; fails: {row['problem']}", advice)
    found = f"{card}{memory}; a product of matrices is right, {row['seconds']:.2f} s"
    if total and free is not None and free < total / 2:
        return Check(
            name, "note", found, "another process holds it: !nvidia-smi in a %%remote cell"
        )
    return Check(name, "ok", found)


def memory(answer: Mapping[str, Any]) -> Check:
    """Tell the memory."""
    total, free = answer["memory_bytes"], answer["memory_available_bytes"]
    left = "" if free is None else f"{size(free)} of "
    return Check("memory", "ok", "unknown" if total is None else f"{left}{size(total)} free")


def shared_memory(answer: Mapping[str, Any]) -> Iterator[Check]:
    """Judge `/dev/shm`, where the system has one."""
    free = answer["shared_memory_bytes"]
    if free is None:
        return
    if free < LEAST_SHARED_BYTES:
        yield Check(
            "shared memory", "problem", f"{size(free)} in /dev/shm: loaders and NCCL need more",
            "start the container with --shm-size=2g, or --set data.workers=0",
        )  # fmt: skip
    else:
        yield Check("shared memory", "ok", f"{size(free)} free")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
