"""The program that runs a job on the machine with the GPU: standard library only, Python 3.8 and later.

It travels to the host as one folder and imports nothing of ours outside it. `api` is what a caller
across the kernel uses; `python kernel_tools_agent supervise RUN_DIR` is the detached process that owns
one run. The folder works under any package name.
"""
