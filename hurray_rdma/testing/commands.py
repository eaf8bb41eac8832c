"""The command ``hurray-rdma`` in a process of its own for tests, without an interpreter that imports all of it anew."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from subprocess import CompletedProcess

from hurray_rdma.cli.main import main
from hurray_rdma.testing.processes import Child

__all__ = ["run_command"]


def run_command(*arguments: str, environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """What it printed, and its exit code.

    For calls that end soon: those that run something are started as a person does, so that their own processes are.

    Args:
        arguments: of the command line.
        environment: variables beside those of this process.
    """
    with Child(_run, arguments, dict(environment or {})) as child:
        code, printed, told = child.receive(timeout_s=60)
    return CompletedProcess(["hurray-rdma", *arguments], code, printed, told)


def _run(connection: Connection, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = ["hurray-rdma", *arguments]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as told:
        os.dup2(printed.fileno(), sys.stdout.fileno())
        os.dup2(told.fileno(), sys.stderr.fileno())
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        for each in (printed, told):
            each.seek(0)
        connection.send((code, printed.read(), told.read()))
