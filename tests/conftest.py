"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's business.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Tests in the background of a script ignore Ctrl-C, and so would what they start; but Ctrl-C is tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
