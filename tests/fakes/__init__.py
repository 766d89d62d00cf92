"""Stand-ins for what the scheduler works with: engine room, clock, vocabulary, and a loop without a thread."""

from __future__ import annotations

from .backend import FakeBackend, make_traits
from .clock import FakeClock
from .driver import Driver, Ticket, make_request
from .faults import LOST_CODES, NO_CELLS, POSITION, REFUSED, Culprit, GroupFault, every_fault
from .oracle import cold_logits, cold_run
from .rules import FeedRecord
from .sequences import Sequences
from .vocabulary import EOG, ByteVocab

__all__ = [
    "EOG",
    "LOST_CODES",
    "NO_CELLS",
    "POSITION",
    "REFUSED",
    "ByteVocab",
    "Culprit",
    "Driver",
    "FakeBackend",
    "FakeClock",
    "FeedRecord",
    "GroupFault",
    "Sequences",
    "Ticket",
    "cold_logits",
    "cold_run",
    "every_fault",
    "make_request",
    "make_traits",
]
