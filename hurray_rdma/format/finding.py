"""One broken rule of the format, as a value. This file knows nothing of descriptors or bytes.

Rules are written once, as generators of findings. A strict reader raises the first finding as a `DescriptorError`; a
permissive reader keeps the tolerable ones; ``inspect`` shows them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hurray_rdma.errors import DescriptorError

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule of the format that some bytes, fields or index arrays break.

    Attributes:
        field: name of the field at fault, as WIRE.md or the specification spells it.
        value: its value.
        rule: what must hold, with the numbers of both sides.
        offset: byte offset of the field in its descriptor; None when the finding is not about bytes.
        position: index of the first offending entry of an index array; None when it is not about one.
        tolerable: a permissive reader may go on in spite of it.
        fix: what to do about it, where that is known.
    """

    field: str
    value: object
    rule: str
    offset: int | None = None
    position: int | None = None
    tolerable: bool = False
    fix: str | None = None

    def error(self) -> DescriptorError:
        """The finding as the error that a strict reader raises."""
        return DescriptorError(self.rule, field=self.field, value=self.value, offset=self.offset, fix=self.fix)


def is_integer(value: object) -> bool:
    """Whether a caller's value is an integer, Python's or numpy's, and not a float or text."""
    return hasattr(value, "__index__")


def settle(findings: Iterable[Finding], *, strict: bool) -> tuple[Finding, ...]:
    """Raise the first finding that may not stand; return those that may.

    Raises:
        DescriptorError: for the first finding (strict), or the first that is not tolerable (permissive).
    """
    kept: list[Finding] = []
    for finding in findings:
        if strict or not finding.tolerable:
            raise finding.error()
        kept.append(finding)
    return tuple(kept)
