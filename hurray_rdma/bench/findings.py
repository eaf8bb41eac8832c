"""What the doctor may say: verdicts on one thing each, with the reason and the line that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hurray_rdma.bench.machine import MachineFacts

__all__ = ["Diagnosis", "Finding", "Verdict"]


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Nothing that costs speed now; it may surprise, or cost some in other set-ups."""
    SLOW = "slow"
    """The engine would be on a slow path."""
    BROKEN = "broken"
    """The engine would not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    found: str
    """The facts."""
    fix: str = ""
    """The line that mends it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was looked at."""

    facts: MachineFacts
    findings: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """True if nothing is slow or broken."""
        return all(each.verdict in (Verdict.OK, Verdict.NOTE) for each in self.findings)
