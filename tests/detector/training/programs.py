"""Programs that the tests run as ranks of their own: `python programs.py NAME ARGUMENTS`."""

from __future__ import annotations

import sys

import torch

# Boxes a picture, in steps of four pictures: on one rank's share none, on another's thirty.
COUNTS = ((0, 0, 30, 1), (1, 0, 0, 0), (30, 2, 1, 0), (0, 0, 0, 0), (3, 1, 2, 30))


def gradients(out: str, accumulate: str) -> int:
    """Five steps on random pictures; rank 0 saves each step's gradients and the last weights."""
    from detector.config import ModelConfig, RuntimeConfig, SolverConfig
    from detector.data.loader import Batch
    from detector.freezing import hold_fixed
    from detector.losses import Criterion
    from detector.microbatches import averaging, split
    from detector.models.detector import build_detector
    from detector.optim import build_optimizer
    from detector.runtime import start_runtime
    from detector.targets import Targets

    with start_runtime(RuntimeConfig()) as runtime:
        torch.manual_seed(0)
        model = build_detector("hgnetv2_n", num_classes=3, num_queries=30, num_denoising=20)
        with torch.no_grad():  # a fresh network has zeros, behind which errors hide
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        hold_fixed(model, ModelConfig(freeze="norms"))
        optimizer = build_optimizer(model, SolverConfig(lr=1e-4))
        share = 4 // runtime.world_size
        network = runtime.wrap(model, batch=share).train()
        criterion = Criterion(3)
        grads, losses = [], []
        mine = slice(runtime.rank * share, (runtime.rank + 1) * share)
        for step, counts in enumerate(COUNTS):
            draw = torch.Generator().manual_seed(step)
            images = torch.randint(256, (4, 3, 64, 64), generator=draw, dtype=torch.uint8)
            boxes = [torch.rand(n, 4, generator=draw) * 0.3 + 0.2 for n in counts]
            labels = [torch.randint(3, (n,), generator=draw) for n in counts]
            ids = torch.arange(4)[mine]
            targets = Targets.pad(boxes[mine], labels[mine])
            batch = Batch(images[mine], targets, ids, torch.full((share, 2), 64))
            parts = split(batch, parts=int(accumulate), step=step, runtime=runtime)

            def forward(part, *, step=step):
                noise = part.noise(0, epoch=step)
                return network(runtime.to_input(part.images), part.targets, noise), part.targets

            over = averaging(
                parts,
                forward=forward,
                network=network,
                spec=model.spec,
                criterion=criterion,
                runtime=runtime,
            )
            optimizer.zero_grad()
            total = 0.0
            for part, matches in zip(parts, over.matches, strict=True):
                with runtime.gradients_stay(network, not part.last):
                    terms = criterion(
                        *forward(part),
                        matches=matches,
                        total=over.total,
                        shares=runtime.world_size,
                    )
                    terms["total"].backward()
                total += float(terms["total"].detach())
            losses.append(runtime.sum([total])[0] / runtime.world_size)
            named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
            grads.append({name: grad.clone() for name, grad in named})
            optimizer.step()
        weights = {name: value.detach() for name, value in model.named_parameters()}
        sums = runtime.all_gather(sum(float(value.double().sum()) for value in weights.values()))
        assert len(set(sums)) == 1, "the ranks' weights differ"
        if runtime.is_main:
            torch.save({"grads": grads, "weights": weights, "losses": losses}, out)
    return 0


def write_checkpoints(path: str) -> None:
    """Save checkpoint after checkpoint until killed; each is announced once it is on disk."""
    from pathlib import Path

    from detector.checkpoint import previous_of, save_checkpoint

    count = 0
    while True:
        count += 1
        weights = torch.full((200_000,), float(count))
        state = {"format_version": 1, "kind": "training", "count": count, "model": {"w": weights}}
        save_checkpoint(Path(path), state, previous=previous_of(Path(path)))
        Path(path).with_name("written").write_text(str(count))


def serve() -> None:
    """Fork a trained-up copy of this process for each request: importing torch takes seconds, once.

    A line of JSON `{"argv", "env", "log", "hook"}` starts one and is answered with its pid; `{"wait"}`
    with a pid is answered with its exit code, negative for a signal.
    """
    import json
    import os

    import detector.commands  # noqa: F401 - what a child is spared

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run_forked(request)
        print(pid, flush=True)


def _run_forked(request: dict) -> None:
    import faulthandler
    import os
    import signal

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 99
    try:
        from detector.__main__ import main

        if request.get("hook"):
            HOOKS[request["hook"]]()
        program = request.get("program")
        code = globals()[program](*request["argv"]) if program else main(request["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def record_pixels() -> None:
    """Write what each rank trains on: `$PIXELS/<epoch>-<step>-<rank>.json`, ids and hashes."""
    import hashlib
    import json
    import os
    from pathlib import Path

    from detector.data.loader import TrainLoader

    folder = Path(os.environ["PIXELS"])
    folder.mkdir(exist_ok=True)
    real = TrainLoader.epoch

    def epoch(self: TrainLoader, epoch: int, start_step: int = 0):
        for step, batch in enumerate(real(self, epoch, start_step), start_step):
            seen = [
                [int(number), hashlib.sha256(image.numpy().tobytes()).hexdigest(), int(count)]
                for number, image, count in zip(
                    batch.image_ids, batch.images, batch.targets.counts, strict=True
                )
            ]
            name = f"{epoch}-{step}-{os.environ['RANK']}.json"
            (folder / name).write_text(json.dumps(seen))
            yield batch

    TrainLoader.epoch = epoch


def break_losses() -> None:
    """Make the loss of one rank (`$BROKEN_RANK`) NaN in the global steps `$BROKEN_STEPS`."""
    import os

    import detector.train as train

    real = train.Criterion.__call__
    steps = {int(step) for step in os.environ["BROKEN_STEPS"].split(",")}
    calls = []

    def broken(self, *args, **kwargs):
        losses = real(self, *args, **kwargs)
        calls.append(1)
        if os.environ["RANK"] == os.environ["BROKEN_RANK"] and len(calls) in steps:
            losses["total"] = losses["total"] * float("nan")
        return losses

    train.Criterion.__call__ = broken


def raise_on_one_rank() -> None:
    """Rank 1 raises in its second step; rank 0 then waits for ever, as in a collective of CUDA's."""
    import os
    import threading

    import detector.train as train

    real, calls = train.reported, []

    def broken(*args):
        calls.append(1)
        if len(calls) == 2:
            if os.environ["RANK"] == "1":
                raise ValueError("rank 1 is unwell")
            if os.environ.get("OTHERS_HANG"):
                threading.Event().wait()
        return real(*args)

    train.reported = broken


def only_background() -> None:
    """Take every box from rank 1's pictures; each rank leaves a hash of its weights."""
    import hashlib
    import os
    from pathlib import Path

    from detector.data.loader import Samples
    from detector.state import TrainingState

    save = TrainingState.save_last

    def save_last(self, *args):
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        Path(f"weights-{os.environ['RANK']}").write_text(digest.hexdigest())
        return save(self, *args)

    TrainingState.save_last = save_last

    real = Samples.batch

    def batch(self, samples):
        packed = real(self, samples)
        if os.environ["RANK"] == "1":
            targets = packed.targets
            empty = type(targets)(
                targets.boxes[:, :0], targets.labels[:, :0], torch.zeros_like(targets.counts)
            )
            packed = packed._replace(targets=empty)
        return packed

    Samples.batch = batch


def limit_files() -> None:
    """Let no file grow beyond 30 MB: the checkpoint is larger."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000_000, 30_000_000))


def lose_pictures() -> None:
    """In the second step of the first epoch delete `$MISSING` and tear `$TORN`."""
    import os
    from pathlib import Path

    from detector.data.loader import TrainLoader

    real = TrainLoader.epoch

    def epoch(self: TrainLoader, epoch: int, start_step: int = 0):
        for step, batch in enumerate(real(self, epoch, start_step), start_step):
            yield batch
            if (epoch, step) == (0, 0):
                Path(os.environ["MISSING"]).unlink()
                torn = Path(os.environ["TORN"])
                torn.write_bytes(torn.read_bytes()[:200])

    TrainLoader.epoch = epoch


HOOKS = {
    "limit": limit_files,
    "lose": lose_pictures,
    "pixels": record_pixels,
    "nan": break_losses,
    "raise": raise_on_one_rank,
    "background": only_background,
}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
