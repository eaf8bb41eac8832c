"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from hurray_rdma.testing.loops import LOOPS, event_loops

# How long an example takes is the machine's business.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Tests in the background of a script ignore Ctrl-C, and so would what they start; but Ctrl-C is tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--loop", choices=LOOPS, default="asyncio", help="event loop of tests that run on one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_loops") is not None:
        metafunc.parametrize("loop", LOOPS, indirect=True)


@pytest.fixture(autouse=True)
def loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kind of the event loop that `asyncio.run` makes, in this process and in each `Child`."""
    name: str = getattr(request, "param", request.config.getoption("--loop"))
    if name == "uvloop":
        pytest.importorskip("uvloop")
    with event_loops(name):
        yield name
