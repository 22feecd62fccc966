"""A trainer without torch: writes status, steps, log, weights; obeys control/stop.json; fails on request.

`python stub_trainer.py [--ranks N] [--steps N] [--step-seconds S] [--fault NAME] [--obey yes|no]`
Every rank is a process of its own in its own session, as under torchrun. Standard library only.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback

RUN_DIR = os.environ["RUN_DIR"]


def replace_json(path, value):
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w") as stream:
        json.dump(value, stream)
    os.replace(temporary, path)


def write_status(**changes):
    path = os.path.join(RUN_DIR, "status.json")
    with open(path) as stream:
        status = json.load(stream)
    status.update(changes)
    replace_json(path, status)


def save(text):
    with open(os.path.join(RUN_DIR, "weights", "last.pt"), "w") as stream:
        stream.write(text)


def leave_daemon():
    """A grandchild in a session of its own, without the marker in its environment, nobody's child."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
        os._exit(0)


def leave(rank, reason, code, message="", error=None):
    replace_json(
        os.path.join(RUN_DIR, "reasons", f"rank{rank}.json"),
        {
            "rank": rank,
            "reason": reason,
            "exit_code": code,
            "message": message,
            "error": error,
        },
    )
    raise SystemExit(code)


def train(rank, options):
    if options.fault == "ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop_file = os.path.join(RUN_DIR, "control", "stop.json")
    for step in range(1, options.steps + 1):
        time.sleep(options.step_seconds)
        if rank == 0:
            write_status(
                state="training",
                phase="train",
                pid=os.getpid(),
                step=step,
                optimizer_steps=step,
                world_size=options.ranks,
                distributed=options.ranks > 1,
            )
            with open(os.path.join(RUN_DIR, "steps.jsonl"), "a") as stream:
                stream.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")
            print(f"step={step}/{options.steps}", flush=True)
            if step == 1 and "RUN_RESUME_CHECKPOINT" in os.environ:
                print("resumed_from=" + os.environ["RUN_RESUME_CHECKPOINT"], flush=True)
        if step == options.fault_step and rank == options.fault_rank:
            if options.fault == "raise":
                raise ValueError("banana")
            if options.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if options.fault == "exit":
                os._exit(3)
            if options.fault == "hang":
                faulthandler.register(signal.SIGUSR1)
                time.sleep(600)
            if options.fault == "crash-once" and os.environ["RUN_ATTEMPT"] == "1":
                save(f"weights of step {step}")
                os._exit(3)
            if options.fault == "leave-daemon":
                leave_daemon()
        if options.obey == "yes" and os.path.exists(stop_file):
            with open(stop_file) as stream:
                request = json.load(stream)
            if rank == 0:
                write_status(state="stopping")
                with open(os.path.join(RUN_DIR, "weights", "last.pt"), "w") as stream:
                    stream.write(f"weights of step {step}")
            leave(rank, request["reason"], 75, request["message"])
    if rank == 0:
        with open(os.path.join(RUN_DIR, "weights", "last.pt"), "w") as stream:
            stream.write(f"weights of step {options.steps}")
        with open(os.path.join("artifacts", "x.pt"), "w") as stream:
            stream.write("artifact")
    leave(rank, "completed", 0)


def run_rank(rank, options):
    try:
        train(rank, options)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        leave(
            rank,
            "failed",
            1,
            str(error),
            {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "rank": rank,
            },
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--fault", default="")
    parser.add_argument("--fault-rank", type=int, default=0)
    parser.add_argument("--fault-step", type=int, default=2)
    parser.add_argument("--obey", default="yes")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), options)
    print("trainer_started", flush=True)
    workers = [
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)] + sys.argv[1:],
            env=dict(os.environ, RANK=str(rank)),
            start_new_session=True,
        )
        for rank in range(options.ranks)
    ]
    codes = [worker.wait() for worker in workers]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
