"""An RT-DETR-style object detector that trains with DDP under torchrun, and says what it does.

    config -> commands -> train (the loop) -> runtime, optim, ema, checkpoint, resume
                             |                  report -> status, rundir
                             validate -> evaluate -> coco
    data/ -> targets -> models/ -> losses -> matcher, boxes

Run it as `python -m detector train --config coins/hgnetv2_n`. Importing this package imports no torch.
"""
