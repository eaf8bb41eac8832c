"""What one transfer did, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferStats"]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Facts of a completed transfer; counts are over all layers and roles unless they say otherwise."""

    key: str
    num_sequences: int
    num_tokens: int
    """Sum of seq_lens."""
    num_table_entries: int
    """Page references of all sequences, of one layer and role: an aliased page counts each time."""
    num_pages: int
    """Pages of the receiver that were written, of one layer and role: each physical page once."""
    num_resident: int
    """Pages that the receiver had already, of one layer and role: they were not sent."""
    logical_nbytes: int
    """Bytes if every sequence had been sent by itself."""
    sent_nbytes: int
    """Page bytes that were moved."""
    num_operations: int
    """Puts posted, or pieces copied through a mapping."""
    seconds: float
    """From the offer to the acknowledgement."""
    write_seconds: float
    """Of those, spent moving pages."""
    lane: str
    """UCX transport that carried the pages: ``sysv``, ``cma``, ``tcp``, ``rc_mlx5`` ..."""
    path: str
    """``mapped`` (stores into the peer's memory) or ``put`` (``ucp_put_nbx``)."""

    @property
    def gib_per_s(self) -> float:
        """Page bytes moved per second of the whole transfer, GiB/s."""
        return self.sent_nbytes / self.seconds / 2**30 if self.seconds > 0 else 0.0
