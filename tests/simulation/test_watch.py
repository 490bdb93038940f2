"""Updates are versions that were published: the number of a rejected step is none."""

from clawstream.simulation.watch import Watch
from tests.monitoring.said import activated, plan, published, rejected


async def test_an_update_is_a_version_that_was_published_and_is_served() -> None:
    watch = Watch()
    for event in (
        published(0),
        activated(0),
        plan(1, (), {}),
        published(1),
        activated(1),
        plan(2, (), {}),
        rejected(2),
    ):
        watch._learn(event)
    assert (watch.updates, watch.num_rejected, watch.versions) == (1, 1, (0, 1))

    watch._learn(published(3))
    assert (watch.updates, watch.versions) == (1, (0, 1, 3))
    watch._learn(activated(3))
    assert watch.updates == 2
