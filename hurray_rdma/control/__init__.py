"""The control channel: messages, sans-IO state machines of both sides, and the one module that touches sockets.

This room knows what is said, when, and what follows from it. It knows neither pages nor UCX: worker addresses and rkeys
are bytes here, pools are numbers, and moving data is somebody else's work.
"""

from hurray_rdma.control.address import DEFAULT_PORT, Address, parse_address
from hurray_rdma.control.announced import MAX_POOLS
from hurray_rdma.control.channel import Channel, EventHandler, open_channel
from hurray_rdma.control.client import ClientSession
from hurray_rdma.control.codes import (
    Capability,
    DeviceUnavailableError,
    ErrorCode,
    LocalProtocolError,
    MessageType,
    NotPublishedError,
    PeerBusyError,
    StaleGenerationError,
    error_code,
    error_from_code,
)
from hurray_rdma.control.config import DIALECT_TAGS, MIN_MESSAGE_NBYTES, PeerInfo, SessionConfig
from hurray_rdma.control.events import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    Committed,
    DescriptorsEnded,
    Event,
    Fetched,
    Granted,
    LeaseRenewed,
    Offered,
    PoolAnnounced,
    PoolRemoved,
    PoolsAnnounced,
    Prepared,
    PublishedHeard,
    Quiesced,
    Refused,
    Reserved,
    SessionClosed,
    SessionOpened,
    Taken,
    TensorData,
    TransferFailed,
)
from hurray_rdma.control.exchange import MAX_DESCRIPTORS, MAX_QUIET_SESSIONS
from hurray_rdma.control.framing import HEADER_NBYTES, FrameDecoder, encode
from hurray_rdma.control.listener import ExposedError, Listener, check_listen, serve
from hurray_rdma.control.messages import Message
from hurray_rdma.control.offers import (
    NONE_RESIDENT,
    Commit,
    Fetch,
    Grant,
    Offer,
    Prepare,
    Published,
    Reserve,
    SnapshotFields,
    Take,
)
from hurray_rdma.control.pools import Pool, PoolRegion, PoolSegment
from hurray_rdma.control.server import ServerSession
from hurray_rdma.control.session import STUCK_FIX, Session
from hurray_rdma.control.tls import SSLContext, Tls

__all__ = [
    "DEFAULT_PORT",
    "DIALECT_TAGS",
    "HEADER_NBYTES",
    "MAX_DESCRIPTORS",
    "MAX_POOLS",
    "MAX_QUIET_SESSIONS",
    "MIN_MESSAGE_NBYTES",
    "NONE_RESIDENT",
    "STUCK_FIX",
    "AbortRequested",
    "Acknowledged",
    "Address",
    "AllEnded",
    "Capability",
    "Channel",
    "ClientSession",
    "Commit",
    "Committed",
    "DescriptorsEnded",
    "DeviceUnavailableError",
    "ErrorCode",
    "Event",
    "EventHandler",
    "ExposedError",
    "Fetch",
    "Fetched",
    "FrameDecoder",
    "Grant",
    "Granted",
    "LeaseRenewed",
    "Listener",
    "LocalProtocolError",
    "Message",
    "MessageType",
    "NotPublishedError",
    "Offer",
    "Offered",
    "PeerBusyError",
    "PeerInfo",
    "Pool",
    "PoolAnnounced",
    "PoolRegion",
    "PoolRemoved",
    "PoolSegment",
    "PoolsAnnounced",
    "Prepare",
    "Prepared",
    "Published",
    "PublishedHeard",
    "Quiesced",
    "Refused",
    "Reserve",
    "Reserved",
    "SSLContext",
    "ServerSession",
    "Session",
    "SessionClosed",
    "SessionConfig",
    "SessionOpened",
    "SnapshotFields",
    "StaleGenerationError",
    "Take",
    "Taken",
    "TensorData",
    "Tls",
    "TransferFailed",
    "check_listen",
    "encode",
    "error_code",
    "error_from_code",
    "open_channel",
    "parse_address",
    "serve",
]
