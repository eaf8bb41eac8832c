"""Every failure of the engine, sorted by who can act on it.

::

    HurrayError
    ├── you: wrong input, raised before anything is registered or sent
    │   ├── ConfigError            (ValueError)       a setting contradicts another, or is out of range
    │   │   └── ExposedError                          whoever reaches the address could write into the pools
    │   ├── GeometryError          (ValueError)       shapes, page IDs, seq_lens or dtypes do not fit
    │   └── DescriptorError        (ValueError)       bytes or fields break a rule of the Hurray format
    ├── the peer: what it said or did not say
    │   ├── ProtocolError          (ConnectionError)  the peer broke the control protocol
    │   ├── AuthenticationError    (PermissionError)  the peer is not who it should be
    │   ├── PeerLostError          (ConnectionError)  the peer is gone or cannot be reached
    │   └── TransferAbortedError                      either side ended the transfer
    │       └── StaleGenerationError                  the pool was registered anew since the offer
    ├── the fabric: UCX and the machine under it
    │   ├── RegistrationError      (OSError)          memory could not be registered
    │   └── TransportError         (OSError)          an endpoint, put, get or flush failed
    └── resources and time
        ├── PoolExhaustedError     (MemoryError)      no free pages, or never enough of them
        │   └── PeerBusyError                         the peer's queue is full: later it may take the same
        ├── DeadlineExceededError  (TimeoutError)     a wait ran out of its time budget
        └── LeaseExpiredError      (TimeoutError)     the pages are no longer held

Errors carry their facts as attributes and survive pickling, so that a worker process can hand them to its parent.
The message says the field, the value, the rule that it breaks and, where there is one, the way out.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "ConfigError",
    "DeadlineExceededError",
    "DescriptorError",
    "GeometryError",
    "HurrayError",
    "LeaseExpiredError",
    "PeerLostError",
    "PoolExhaustedError",
    "ProtocolError",
    "RegistrationError",
    "TransferAbortedError",
    "TransportError",
]


class HurrayError(Exception):
    """Base of every failure the engine raises.

    Args:
        rule: what must hold, as a sentence with the numbers of both sides.
        field: name of the field or argument at fault, if one is.
        value: its value as received; must be picklable.
        fix: what to do about it, if that is known.
    """

    in_doubt: bool = False
    """True if bytes of what failed may still arrive at the peer: its pages must not be used again yet."""

    def __init__(self, rule: str, *, field: str | None = None, value: object = None, fix: str | None = None) -> None:
        self.rule = rule
        self.field = field
        self.value = value
        self.fix = fix
        super().__init__(rule)

    def __str__(self) -> str:
        text = self.rule
        if self.field is not None:
            text = f"{self.field} = {self.value!r}: {text}"
        if self.fix is not None:
            text = f"{text}. {self.fix}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[HurrayError], facts: dict[str, object]) -> HurrayError:
    error = kind(str(facts["rule"]))
    error.__dict__.update(facts)
    return error


class ConfigError(HurrayError, ValueError):
    """A setting contradicts another, or lies outside its range."""


class GeometryError(HurrayError, ValueError):
    """Shapes, page IDs, sequence lengths, roles or dtypes do not fit together."""


class DescriptorError(HurrayError, ValueError):
    """Bytes or fields break a rule of the Hurray format.

    ``offset`` is the byte offset of the field in the descriptor, None when the error concerns no single place.
    """

    def __init__(
        self,
        rule: str,
        *,
        field: str | None = None,
        value: object = None,
        offset: int | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(rule, field=field, value=value, fix=fix)
        self.offset = offset

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.offset is None else f"at byte {self.offset}: {text}"


class ProtocolError(HurrayError, ConnectionError):
    """The peer broke the control protocol; ``code`` is the ERROR code that tells it so (WIRE.md, message 9)."""

    def __init__(
        self, rule: str, *, code: int = 6, field: str | None = None, value: object = None, fix: str | None = None
    ) -> None:
        super().__init__(rule, field=field, value=value, fix=fix)
        self.code = code


class AuthenticationError(HurrayError, PermissionError):
    """The peer did not prove that it may talk to this engine."""


class PeerLostError(HurrayError, ConnectionError):
    """The peer is gone, or was never reachable."""


class TransferAbortedError(HurrayError):
    """Either side ended the transfer before it was complete."""


class RegistrationError(HurrayError, OSError):
    """Memory could not be registered with UCX, or is not of the kind it was said to be."""


class TransportError(HurrayError, OSError):
    """An endpoint, put, get or flush failed; ``status`` is UCX's code (``ucs_status_t``), 0 if there is none."""

    def __init__(
        self, rule: str, *, status: int = 0, field: str | None = None, value: object = None, fix: str | None = None
    ) -> None:
        super().__init__(rule, field=field, value=value, fix=fix)
        self.status = status


class PoolExhaustedError(HurrayError, MemoryError):
    """The pool has too few free pages now, or too few pages ever."""


class DeadlineExceededError(HurrayError, TimeoutError):
    """A wait ran out of its time budget."""


class LeaseExpiredError(HurrayError, TimeoutError):
    """The pages of a lease went back before they were used."""
