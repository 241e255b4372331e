"""What the supervisor's log says of events, and of what is done about them."""

from __future__ import annotations

import logging

from tandem.cluster.supervisor import events as ev

_log = logging.getLogger(__name__)

_UNREMARKABLE = (
    ev.LoadReported,
    ev.LoadingHeard,
    ev.HeartbeatMissed,
    ev.NodesListed,
    ev.NodeKnocked,
    ev.WriterSuspected,
    ev.Tick,
)


def log_event(event: ev.Event) -> None:
    """Unless events of its kind come all the time."""
    if not isinstance(event, _UNREMARKABLE):
        _log.info("%s", event)


def log_instruction(instruction: ev.Instruction) -> None:
    _log.info("-> %s", _brief(instruction))


def _brief(instruction: ev.Instruction) -> str:
    if isinstance(instruction, ev.PublishMembership):
        version, num_members = instruction.version, len(instruction.members)
        return f"PublishMembership({instruction.name}, version={version}, members={num_members})"
    return str(instruction)
