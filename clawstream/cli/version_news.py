"""What `clawstream up` says of versions as they come. Pure."""

from clawstream.events import Event, PolicyActivated, PolicyEvent, PolicyRejected, StepRejected, StepTaken


class VersionNews:
    """The events of one policy as lines for whoever watches."""

    def __init__(self, policy_id: str) -> None:
        self._policy_id = policy_id
        self._steps: dict[int, StepTaken] = {}
        self._served = 0  # the newest version that was said to be served; that the base is, is no news

    def line(self, event: Event) -> str | None:
        """Return what is to be said of the event; None: nothing."""
        if not isinstance(event, PolicyEvent) or event.policy_id != self._policy_id:
            return None
        match event:
            case StepTaken():
                self._steps[event.policy_version] = event
            case StepRejected():
                return f"step {event.policy_version} was rejected, and the version before it stays: {event.reason}"
            case PolicyRejected():
                return f"{event.engine} did not take version {event.policy_version} over: {event.reason}"
            case PolicyActivated(policy_version=version) if version > self._served:
                self._served = version
                return f"version {version} is served{self._learned(version)}"
        return None

    def _learned(self, version: int) -> str:
        step = self._steps.pop(version, None)
        if step is None:
            return ""
        reward = "" if step.mean_reward is None else f" with a mean reward of {step.mean_reward:.2f}"
        return f": it learned from {step.num_samples} samples{reward}, {step.num_hinted} of them with a hint"
