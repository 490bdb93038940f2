"""What a replay's workers are forks of: imported once, in a process that has read nothing yet and started no thread."""

import gc
import logging
import signal
import time
from importlib import import_module

from clawstream.cli.process import hide_torch, log_to_stderr
from clawstream.local.servers.server_process import die_with_parent

die_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches whoever started us, who ends us
log_to_stderr("replay")
hide_torch()
for name in (
    "clawstream.inference.judge_client",
    "clawstream.rendering.renderer",
    "clawstream.replay.processes",
):
    import_module(name)
gc.collect()
gc.freeze()  # what all share is not copied because each of them looks at it
logging.getLogger(__name__).info("workers=prepared cpu_s=%.2f", time.process_time())
