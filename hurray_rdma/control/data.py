"""What both sides of a session do with descriptors: bytes in order, ends, and what is still owed of them.

This module knows who sends page data: the client in a push, the server in a pull whose reader reaches no memory. It
knows neither sockets nor what the bytes are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

from hurray_rdma.control.codes import LocalProtocolError
from hurray_rdma.control.events import AllEnded, DescriptorsEnded, Event, TensorData
from hurray_rdma.control.exchange import Ended
from hurray_rdma.control.messages import TensorDataEndMessage, TensorDataMessage
from hurray_rdma.control.session import Session
from hurray_rdma.control.states import Step, TransferKind, TransferState
from hurray_rdma.control.transfers import Transfer, every_index
from hurray_rdma.errors import ProtocolError

__all__ = ["DataSession"]


class DataSession(Session):
    """The part of a session that is about descriptors, the same for both sides."""

    _SENDS: ClassVar[TransferKind]
    """The kind of transfer whose page data this side sends."""

    def tensor_data(
        self, transfer_id: int, descriptor_index: int, offset_nbytes: int, data: memoryview | bytes, *, now: float
    ) -> bool:
        """Send page bytes over the control channel, where RDMA cannot be set up.

        Args:
            transfer_id: client: a granted push; server: a pull that is taken.
            descriptor_index: whose bytes they are.
            offset_nbytes: where they belong; ascending, without gaps.
            data: the bytes; a view is not copied, so keep them unchanged until the transfer is acknowledged.
            now: the time.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            ConfigError: larger than what the peer accepts in one message.
            LocalProtocolError: not granted or taken yet, no such descriptor, it ended before, or bytes were left out.
        """
        transfer = self._granted(transfer_id, self._SENDS, descriptor_index)
        if transfer is None:
            return False
        expected = transfer.next_offsets.get(descriptor_index, 0)
        if transfer.ended[descriptor_index] or offset_nbytes != expected:
            raise LocalProtocolError(
                f"the next byte of descriptor {descriptor_index} is {expected}, and none after its end",
                field="offset_nbytes",
                value=offset_nbytes,
            )
        view = memoryview(data).cast("B")
        self._send(TensorDataMessage(offset_nbytes=offset_nbytes, data=view), transfer_id + 1 + descriptor_index)
        self._book.say(transfer, Step.DATA)
        transfer.next_offsets[descriptor_index] = offset_nbytes + len(view)
        return True

    def data_end(self, transfer_id: int, *descriptor_indices: int, now: float) -> bool:
        """Every page of the descriptors is complete at the peer (flushed, not only posted), or all bytes were sent.

        Those that are complete together are told together: it costs both sides little more than one of them.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: not granted or taken yet, no such descriptor, or one ended before, or comes twice, or
                there is none; nothing was said of any.
        """
        transfer = self._granted(transfer_id, self._SENDS, *descriptor_indices)
        if transfer is None:
            return False
        if not descriptor_indices or transfer.not_ended(descriptor_indices) != descriptor_indices:
            raise LocalProtocolError(
                f"must be descriptors of transfer {transfer_id} that did not end before, each once",
                field="descriptor_indices",
                value=descriptor_indices,
            )
        self._book.say(transfer, transfer.end_step(len(descriptor_indices)))
        transfer.mark_ended(descriptor_indices)
        self._say_data_end(transfer, descriptor_indices)
        if transfer.all_ended:
            self._said_ends(transfer, now)
        return True

    def data_end_of_all(self, transfer_id: int, *, now: float) -> bool:
        """As `data_end`, of all descriptors of a push at once.

        Returns:
            False if the transfer is ending or has ended.

        Raises:
            LocalProtocolError: as of it.
        """
        transfer = self._granted(transfer_id, TransferKind.PUSH)
        if transfer is None:
            return False
        if transfer.num_ended:
            raise LocalProtocolError("must be 0: some ended before", field="num_ended", value=transfer.num_ended)
        self._book.say(transfer, Step.LAST_END)
        transfer.mark_ended(every_index(transfer.num_descriptors))
        self._say_ends(transfer, transfer.num_descriptors, now)
        return True

    def _say_data_end(self, transfer: Transfer, descriptor_indices: tuple[int, ...]) -> None:
        if len(descriptor_indices) > 1 and transfer.kind is TransferKind.PUSH:
            self._send(_ended(descriptor_indices), transfer.transfer_id)
        else:
            for index in descriptor_indices:
                self._send(TensorDataEndMessage(), transfer.transfer_id + 1 + index)

    def _granted(self, transfer_id: int, kind: TransferKind, *descriptor_indices: int) -> Transfer | None:
        """The transfer, if something may be said of it, and of descriptors; None if it is ending or has ended."""
        transfer = self._book.get(transfer_id)
        if transfer is not None:
            transfer.require(kind)
        if self.is_closed or transfer is None or transfer.state is TransferState.STOPPING or not transfer.is_open:
            return None
        if transfer.state is TransferState.OFFERED:
            raise LocalProtocolError(f"transfer {transfer_id} is not answered yet")
        num_carried = transfer.num_carried if descriptor_indices else 0
        for index in descriptor_indices:
            if not 0 <= index < num_carried:
                raise LocalProtocolError(
                    f"must be below {num_carried}, what this side may send of transfer {transfer_id}",
                    field="descriptor_index",
                    value=index,
                )
        return transfer

    def _say_ends(self, transfer: Transfer, count: int, now: float) -> None:
        """Say what ends this side's part, whole, and again unless it is answered."""
        self._say_data_end(transfer, every_index(count))
        self._said_ends(transfer, now)

    def _said_ends(self, transfer: Transfer, now: float) -> None:
        """As ``_said``, but the wait doubles: a peer with too much to do must not hear the more the slower it is."""
        transfer.said_in = self._outbox.batch
        self._book.schedule(transfer, now + self._retry_s * 2**transfer.num_said_ends)
        transfer.num_said_ends += 1

    # What the peer says.

    def _hear_data(self, transfer: Transfer, index: int, message: TensorDataMessage, events: list[Event]) -> None:
        if not self._book.hear(transfer, Step.DATA):
            return
        _require_carried(transfer, index)
        expected = transfer.next_offsets.get(index, 0)
        end = message.offset_nbytes + len(message.data)
        if end <= expected:
            return  # Repeated, or empty.
        if transfer.ended[index] or message.offset_nbytes != expected:
            raise ProtocolError(
                f"the next byte of descriptor {index} is {expected}, and none after its end",
                field="byte_offset_in_buffer",
                value=message.offset_nbytes,
            )
        transfer.next_offsets[index] = end
        data = memoryview(message.data)
        events.append(TensorData(transfer.transfer_id, index, message.offset_nbytes, data))

    def _hear_data_end(self, transfer: Transfer, indices: tuple[int, ...], events: list[Event]) -> None:
        ending = transfer.not_ended(indices)
        if not ending or not self._book.hear(transfer, transfer.end_step(len(ending))):
            return
        _require_carried(transfer, max(ending))
        transfer.mark_ended(ending)
        events.append(DescriptorsEnded(transfer.transfer_id, ending))
        if transfer.all_ended:
            events.append(AllEnded(transfer.transfer_id))


@lru_cache(maxsize=64)
def _ended(descriptor_indices: tuple[int, ...]) -> Ended:
    return Ended(descriptor_indices)


def _require_carried(transfer: Transfer, index: int) -> None:
    if index >= transfer.num_carried:
        raise ProtocolError(
            f"transfer {transfer.transfer_id} was promised data of {transfer.num_carried} descriptors",
            field="descriptor_index",
            value=index,
        )
