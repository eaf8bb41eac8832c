"""Log records: facts as attributes, one line each whatever a peer says, JSON, and no secrets."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hurray_rdma
from hurray_rdma.control import SessionConfig, open_channel, serve
from hurray_rdma.engine import JsonFormatter
from hurray_rdma.engine.logs import FACTS, EngineLog, printable
from hurray_rdma.errors import AuthenticationError, PeerLostError

LOGGER = logging.getLogger("hurray_rdma.engine.a_module")
SECRET_NAMES = {"token", "_token", "rkey", "rkeys", "packed_rkey", "packed_rkeys"}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="hurray_rdma")
    return caplog


def facts_of(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in FACTS)


def test_a_record_carries_its_facts(logged: pytest.LogCaptureFixture) -> None:
    log = EngineLog(LOGGER, peer="decode-3:7400", pool="full")
    log.info("connected")
    log.bind(transfer=7, key="req-17").warning("%d pages quarantined: %s", 3, PeerLostError("gone"))
    log.bind(pool=None).debug("100% done")
    assert [facts_of(record) for record in logged.records] == [
        ("decode-3:7400", None, None, "full"),
        ("decode-3:7400", 7, "req-17", "full"),
        ("decode-3:7400", None, None, None),
    ]
    assert [record.getMessage() for record in logged.records] == ["connected", "3 pages quarantined: gone", "100% done"]
    assert {record.name for record in logged.records} == {LOGGER.name}


def test_a_record_names_its_caller(logged: pytest.LogCaptureFixture) -> None:
    log = EngineLog(LOGGER)
    log.info("by name of the level")
    log.log(logging.INFO, "by number of the level")
    log.error("an error")
    try:
        raise PeerLostError("gone")
    except PeerLostError:
        log.exception("with a traceback")
    assert {(record.filename, record.funcName) for record in logged.records} == {
        ("test_logs.py", "test_a_record_names_its_caller")
    }


def test_what_a_caller_adds_is_kept(logged: pytest.LogCaptureFixture) -> None:
    EngineLog(LOGGER, peer="a").info("text", extra={"num_pages": 4})
    assert (logged.records[0].__dict__["num_pages"], logged.records[0].__dict__["peer"]) == (4, "a")


def test_a_fact_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="token"):
        EngineLog(LOGGER).bind(token="s3cret")


def test_what_is_not_logged_is_not_formatted() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("was formatted")

    assert not LOGGER.isEnabledFor(logging.DEBUG)
    EngineLog(LOGGER).debug("%s", Unprintable())


EVIL = "req-1\n2026-01-01 CRITICAL forged\r\x1b[2J\x00\u2028\x85end"


def test_a_peer_cannot_forge_lines(logged: pytest.LogCaptureFixture) -> None:
    log = EngineLog(LOGGER, peer=EVIL, key=EVIL, pool=EVIL)
    log.warning("%s said %s", EVIL, PeerLostError(EVIL))
    log.warning(EVIL)
    formatter = logging.Formatter("%(message)s %(peer)s %(key)s %(pool)s")
    for record in logged.records:
        line = formatter.format(record)
        assert line.isprintable(), line
        assert len(line.splitlines()) == 1
        assert "forged" in line


@given(st.text())
def test_printable_text_is_printable_and_else_the_same(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable())


def test_long_text_is_cut() -> None:
    assert printable("x" * 2000) == "x" * 2000
    assert printable("x" * 10**6) == "x" * 2000 + "..."


def json_of(record: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    told = json.loads(line)
    assert isinstance(told, dict)
    return told


def test_json_of_a_record(logged: pytest.LogCaptureFixture) -> None:
    EngineLog(LOGGER, peer="dec\u00f6de", transfer=7, key="req-17").warning("%d pages", 3)
    told = json_of(logged.records[0])
    time = datetime.fromisoformat(str(told.pop("time")))
    assert time.timestamp() == pytest.approx(logged.records[0].created, abs=1e-5)
    assert time.utcoffset() is not None
    assert told == {
        "level": "WARNING",
        "logger": LOGGER.name,
        "message": "3 pages",
        "peer": "dec\u00f6de",
        "transfer": 7,
        "key": "req-17",
    }


def test_json_of_an_exception_is_one_line(logged: pytest.LogCaptureFixture) -> None:
    try:
        raise PeerLostError(EVIL)
    except PeerLostError:
        EngineLog(LOGGER).exception("failed")
    told = json_of(logged.records[0])
    assert told["error"] == "PeerLostError"
    assert "test_json_of_an_exception_is_one_line" in str(told["traceback"])


def test_json_of_a_record_of_another_room(logged: pytest.LogCaptureFixture) -> None:
    logging.getLogger("hurray_rdma.control.channel").error("%r", EVIL)
    assert set(json_of(logged.records[0])) == {"time", "level", "logger", "message"}


def logging_calls(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"debug", "info", "warning", "error", "exception", "critical", "log", "bind"}
        and "log" in ast.unparse(node.func.value).lower()
    ]


def names_in(call: ast.Call) -> set[str]:
    """Variables and attributes that a logging call is given."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    nodes = [node for each in given for node in ast.walk(each)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def test_no_call_logs_a_secret() -> None:
    (guilty,) = logging_calls(ast.parse("self._log.info('%s', region.rkey)"))
    assert names_in(guilty) & SECRET_NAMES == {"rkey"}
    calls = 0
    for path in Path(hurray_rdma.__file__).parent.rglob("*.py"):
        for call in logging_calls(ast.parse(path.read_text())):
            calls += 1
            assert not names_in(call) & SECRET_NAMES, f"{path}:{call.lineno}"
    assert calls > 0


def test_a_wrong_token_is_logged_by_neither_side(logged: pytest.LogCaptureFixture) -> None:
    def config(token: str) -> SessionConfig:
        return SessionConfig(engine_name="e", token=token, host_id=b"h", worker_address=b"w")

    async def run() -> None:
        listener = await serve("127.0.0.1", 0, config("the-right-one"), on_session=lambda _: lambda _: None)
        try:
            host, port = str(listener.addresses[0]).rsplit(":", 1)
            with pytest.raises(AuthenticationError):
                await open_channel(host, int(port), config("the-wrong-one"), timeout_s=10, on_event=lambda _: None)
        finally:
            await listener.close()

    asyncio.run(run())
    told = [JsonFormatter().format(record) for record in logged.records if record.name.startswith("hurray_rdma")]
    assert any("refused" in line for line in told)
    assert not any(secret in line for line in told for secret in ("the-right-one", "the-wrong-one"))
