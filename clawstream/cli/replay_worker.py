"""The process that a replay's workers are forked from: it imports once, has read nothing and has no other thread."""

import gc
import logging
import signal
import time
from importlib import import_module

from clawstream.cli.process import hide_torch, log_to_stderr
from clawstream.local.servers.server_process import die_with_parent

die_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches our parent, which ends us
log_to_stderr("replay")
hide_torch()
for name in (
    "clawstream.inference.judge_client",
    "clawstream.rendering.renderer",
    "clawstream.replay.processes",
):
    import_module(name)
gc.collect()
gc.freeze()  # so workers share these objects: no garbage collector touches them, which would copy them
logging.getLogger(__name__).info("workers=prepared cpu_s=%.2f", time.process_time())
