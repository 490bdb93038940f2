"""Imports what the parts import; each part is a fork of the process that did (launch.py)."""

import gc

from clawstream.cli.process import hide_torch
from clawstream.local.servers.server_process import die_with_parent

die_with_parent()
hide_torch()  # unless it was asked for and is there

import clawstream.gateway.app  # noqa: E402
import clawstream.inference.judge_client  # noqa: E402
import clawstream.inference.sglang  # noqa: E402
import clawstream.judging.stage  # noqa: E402
import clawstream.projections.write.stage  # noqa: E402
import clawstream.samples.stage  # noqa: E402
import clawstream.stream.kafka.connect  # noqa: E402
import clawstream.stream.runner.hosting  # noqa: E402
import clawstream.turns.stage  # noqa: E402
import clawstream.weights.stage  # noqa: E402, F401
import tests.chaos.launch  # noqa: E402, F401

gc.collect()
gc.freeze()  # what all parts share is not copied because each of them looks at it
