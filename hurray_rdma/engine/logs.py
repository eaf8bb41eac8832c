"""How the engine logs: with the peer, transfer, key and pool as attributes of each record, and as JSON if wanted.

Everything is under the standard logger ``hurray_rdma``; handlers and levels are the application's. Knows no engine.
What a peer may have chosen (names, keys, messages) brings no control characters into a line: they are replaced here.
Facts are these four: there is no place for tokens and rkeys.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

__all__ = ["FACTS", "EngineLog", "JsonFormatter", "printable"]

FACTS = ("peer", "transfer", "key", "pool")
"""Attributes of a record: who, its transfer ID, the key of the snapshot, the pool's name; None where none applies."""

_MAX_CHARS = 2000


def printable(text: str, /) -> str:
    """``text`` in one line: what cannot be printed is replaced by U+FFFD, and all from 2000 characters on is cut."""
    shown = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


@dataclass(frozen=True, slots=True)
class _Line:
    """A message, formatted when a handler asks for it: what is wrong with one is the handler's to report."""

    text: object
    args: tuple[object, ...]

    def __str__(self) -> str:
        return printable(str(self.text) % self.args if self.args else str(self.text))


class EngineLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records carry facts.

    ::

        log = EngineLog(logging.getLogger(__name__), peer="decode-3:7400")
        log.bind(transfer=7, key="req-17").warning("falls back to the control channel: %s", error)

    Args:
        logger: of the module that logs.
        peer: name or address of the other engine.
        transfer: transfer ID, unique within a session.
        key: key of the snapshot.
        pool: name of the pool.
    """

    logger: logging.Logger

    def __init__(
        self,
        logger: logging.Logger,
        /,
        *,
        peer: str | None = None,
        transfer: int | None = None,
        key: str | None = None,
        pool: str | None = None,
    ) -> None:
        super().__init__(logger, {"peer": peer, "transfer": transfer, "key": key, "pool": pool})

    def bind(self, **facts: Any) -> EngineLog:
        """The same logger with more facts, or others in their place; as of the class."""
        return EngineLog(self.logger, **{**self._facts, **facts})

    @property
    def _facts(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.extra)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As of `logging.Logger`, but for the message, which is `printable`."""
        if self.isEnabledFor(level):
            line, merged = self.process(_Line(msg, args), kwargs)
            # One frame up: the record names whoever called, not this method.
            self.logger.log(level, line, **{**merged, "stacklevel": merged.get("stacklevel", 1) + 1})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the facts to what the caller has in ``extra``."""
        # Made fit to print here, since most loggers are made for a transfer that has nothing to report.
        facts = {name: printable(fact) if isinstance(fact, str) else fact for name, fact in self._facts.items()}
        return msg, {**kwargs, "extra": {**kwargs.get("extra", {}), **facts}}


class JsonFormatter(logging.Formatter):
    """One JSON object per record and line, ASCII: install it on any handler of the logger ``hurray_rdma``.

    Members: ``time`` (ISO 8601, UTC, microseconds), ``level``, ``logger``, ``message``, those of `FACTS` that apply;
    with an exception ``error`` (its class) and ``traceback``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as JSON, without a line break."""
        members: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = {name: getattr(record, name, None) for name in FACTS}
        members |= {name: fact for name, fact in facts.items() if fact is not None}
        if record.exc_info and record.exc_info[0] is not None:
            members |= {"error": record.exc_info[0].__name__, "traceback": self.formatException(record.exc_info)}
        return json.dumps(members, default=str)
