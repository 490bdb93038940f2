"""Every error that clawstream raises on purpose; types differ where the handling differs.

ClawstreamError
+-- OperatorError      a person has to change something: exit code 2 on the command line
|   +-- ConfigError        the settings file or an override
|   +-- TopicMismatch      a topic is missing, or is not as topics/*.yaml says
|   +-- UnusableCheckpoint a checkpoint folder is incomplete or of another model
|   +-- SamplesGone        a plan names samples that are not on the log any more
|   +-- LogContradicted    the log is not the one that was read before
|   +-- TrainingDiverged   a step's gradient is not finite, or the step changes nothing that is published
|   |   +-- GradientNotFinite  the gradient is not finite; a gate rejects the step
|   +-- DatabaseMismatch   the database's schema is not the one this version writes
|   +-- PartUnavailable    a needed server is not there (broker, database, engine, Java)
|   +-- TooManyFailures    a stage set too many records aside: exit code 3, a person has to look before it starts again
|   +-- OtherBase          the policy began with another base: exit code 3 too
+-- UnusableEvent      this record can never be processed: it goes to <topic>.dlq
|   +-- UndecodableRecord  its bytes are an event of no schema that we know
|   +-- ParkedRecord       an earlier record of its session is set aside, and this one waits behind it
|   +-- UnusableExchange   an exchange that can't become a turn or a sample
+-- StepRefused       a step's outcome is not published; the policy goes on from the version before
+-- UnrenderableRequest  the template can't express a request; the client has to change it
+-- ServiceRefused     a service that trains and samples elsewhere refuses a request; it would be refused again
+-- TooLate            the call's result is of no use any more; the call is given up
+-- TryLater           a peer did not answer as it should; the same call may succeed later
    +-- NotYet             the peer is there, but its result is not
    +-- ServiceAway        a service that trains and samples elsewhere does not answer

A message names the thing, what was found and what was expected, what happens now, and what to do.
"""

from typing import ClassVar


class ClawstreamError(Exception):
    """Root of the tree; never raised itself."""


class OperatorError(ClawstreamError):
    """A person has to change something; the command line prints the message and exits with `exit_status`."""

    exit_status: ClassVar[int] = 2  # a supervisor may start the part again: what is wrong may pass by itself


class ConfigError(OperatorError):
    """The settings file or an override can't be used."""


class TopicMismatch(OperatorError):
    """A topic is missing or differs from its file in topics/."""


class LogContradicted(OperatorError):
    """The log is not the one that was read: it ends earlier, or has another record where reading stopped."""


class UnusableCheckpoint(OperatorError):
    """A checkpoint folder is incomplete, damaged or of another model."""


class SamplesGone(OperatorError):
    """Samples that a plan names are past their topic's retention, so its step can't be taken."""


class TrainingDiverged(OperatorError):
    """A step's gradient is not finite, or the step changes nothing that is published; no version is published."""


class GradientNotFinite(TrainingDiverged):
    """A step's gradient is not a finite number: the weights are as they were before it."""


class DatabaseMismatch(OperatorError):
    """The database's schema is not the one that this version reads and writes."""


class PartUnavailable(OperatorError):
    """A server that is needed can't be reached or started."""


class TooManyFailures(OperatorError):
    """A stage set too many records aside; each start of it would set more aside until a person has looked."""

    exit_status: ClassVar[int] = 3


class OtherBase(OperatorError):
    """The settings name another base than the policy began with; every start would fail the same way."""

    exit_status: ClassVar[int] = 3


class UnusableEvent(ClawstreamError):
    """This record can never be processed; it goes to the topic's dead-letter queue."""


class UndecodableRecord(UnusableEvent):
    """The bytes of a record are not an event of any schema we know."""


class ParkedRecord(UnusableEvent):
    """A record that waits behind an earlier one of its session, which is set aside."""


class UnusableExchange(UnusableEvent):
    """An exchange that can't become a turn or a sample."""


class StepRefused(ClawstreamError):
    """The gate rejects a step, so no version is published; the message says why. The weights have moved already."""


class UnrenderableRequest(ClawstreamError):
    """The template can't express these messages or options; the client has to change them."""


class TryLater(ClawstreamError):
    """A peer refused, failed or did not answer in time; a later call may succeed. Uncaught, a command exits with 2."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLate(ClawstreamError):
    """The call's result is of no use any more, so the call is given up at once and no peer is asked."""


class NotYet(TryLater):
    """A peer answered, but its result is still to come: the peer does not count as away."""


class ServiceRefused(ClawstreamError):
    """A service that trains and samples elsewhere refuses this request; the same request would be refused again."""


class ServiceAway(TryLater):
    """A service that trains and samples elsewhere did not answer, or not as it should; nothing was changed here."""


def first_of(failed: BaseException) -> BaseException:
    """Return the first error of a group, however deep it lies; any other error is its own first."""
    while isinstance(failed, BaseExceptionGroup):
        failed = failed.exceptions[0]
    return failed
