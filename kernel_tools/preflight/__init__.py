"""Preflight: what is checked on the remote before anything is paid for, and what to do where it is not well.

One question to the agent, in a kernel that it does not keep busy for more than a minute; what it answers is
judged here, each finding by itself. It changes nothing there and prices nothing that nobody has named.
"""

from kernel_tools.preflight.asking import Probe, judge, look
from kernel_tools.preflight.report import Check, RemoteInfo

__all__ = ["Check", "Probe", "RemoteInfo", "judge", "look"]
