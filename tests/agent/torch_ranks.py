"""Two ranks over gloo for the tests under the real torchrun: one ends as it is told, the other waits for it."""

import datetime as dt
import faulthandler
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

faulthandler.register(signal.SIGUSR1, all_threads=True)


def spin():
    while True:
        pass


dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
rank, fault = dist.get_rank(), sys.argv[1]
print(f"distributed=True world_size={dist.get_world_size()}", flush=True)
for step in range(3000):
    dist.all_reduce(torch.ones(2))
    if step == 5 and rank == 1:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("banana")
        if fault == "exit":
            os._exit(5)
        if fault == "spin":
            spin()
    if step == 20 and fault == "none":
        break
    time.sleep(0.02)
dist.destroy_process_group()
