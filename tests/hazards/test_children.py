"""Processes of tests: what one raised is told also to who speaks to it only afterwards."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from hurray_rdma.testing.processes import Child, ChildFailedError


def fail(connection: Connection) -> None:
    connection.send("up")
    raise ZeroDivisionError("by hand")


def test_a_message_to_a_child_that_failed_raises_what_it_raised() -> None:
    with pytest.raises(ChildFailedError, match="ZeroDivisionError: by hand"), Child(fail) as child:
        assert child.join() == 1
        child.send("anything")
