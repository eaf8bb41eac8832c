"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Tests in the background of a script ignore Ctrl-C, and so would what they start; but Ctrl-C is tested."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
