"""A part that ran for long is restarted at once, however long a part waits that dies soon after its start."""

from pathlib import Path

from clawstream.local.supervisor import Patience
from tests.parts.local.test_server_process import SERVES, WITHIN_S
from tests.parts.local.test_supervisor import part, serving, supervising


async def test_a_part_that_ran_for_long_is_restarted_at_once(tmp_path: Path) -> None:
    patience = Patience(ready_within_s=WITHIN_S, stop_within_s=2.0, steady_after_s=0.0, first_wait_s=3600.0)
    async with supervising(tmp_path, patience) as supervisor:
        await supervisor.start([part("turns", SERVES)])
        for times in (1, 2):
            (await serving(supervisor, "turns", times)).kill()
        await serving(supervisor, "turns", 3)
        assert supervisor.children["turns"].restarts == 2
