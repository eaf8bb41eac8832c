"""Whatever happens to one process of the demo, the supervisor says what it was and ends the others."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time

import pytest

from hurray_rdma.demo.child import Link, die_with
from hurray_rdma.demo.supervisor import Process, ProcessFailedError, Supervisor
from hurray_rdma.errors import DeadlineExceededError, GeometryError, PeerLostError, ProtocolError

FOREVER_S = 3600


async def echo(link: Link, word: str) -> None:
    link.send(word)
    link.send(await link.receive(int))


async def hang(link: Link) -> None:
    link.send("up")
    await asyncio.sleep(FOREVER_S)


async def fail_typed(link: Link) -> None:
    raise GeometryError("is not below num_pages 5", field="block_table[4]", value=9)


async def fail_in_a_group(link: Link) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hang(link))
        tasks.create_task(fail_typed(link))


async def impatient(link: Link) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await link.receive(int)
    link.send("tired")
    link.send(await link.receive(int))


async def fail_untyped(link: Link) -> None:
    raise ZeroDivisionError("by hand")


async def lose_peer_when_told(link: Link) -> None:
    link.send("up")
    await link.receive(str)
    raise PeerLostError("the other end hung up")


async def ignore_everything(link: Link) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link.send("up")
    time.sleep(FOREVER_S)  # noqa: ASYNC251 - a process that is stuck for good


def gone(process: Process) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_messages_go_both_ways_and_processes_end() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        child = supervisor.start("echo", echo, "hello")
        assert supervisor.receive(child, str) == "hello"
        child.send(17)
        assert supervisor.receive(child, int) == 17
        supervisor.finish(child)
    assert gone(child)


def test_a_typed_failure_arrives_whole_and_the_other_process_is_ended() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        other = supervisor.start("other", ignore_everything)
        supervisor.receive(other, str)
        failing = supervisor.start("failing", fail_typed)
        with pytest.raises(GeometryError, match=r"block_table\[4\] = 9: is not below num_pages 5") as caught:
            supervisor.receive(other, str)  # it is the failure of another process that is waited for
    assert caught.value.__notes__ == [f"in the failing process (pid {failing.pid})"]
    assert "fail_typed" in str(getattr(caught.value.__cause__, "text", ""))
    assert gone(failing)
    assert gone(other)


def test_any_other_failure_keeps_its_traceback() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        failing = supervisor.start("failing", fail_untyped)
        with pytest.raises(ProcessFailedError, match="failing process failed: ZeroDivisionError: by hand") as caught:
            supervisor.receive(failing, str)
    assert "fail_untyped" in caught.value.text


def test_a_killed_process_is_named_even_if_another_complains_first() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        victim = supervisor.start("victim", hang)
        witness = supervisor.start("witness", lose_peer_when_told)
        supervisor.receive(victim, str)
        supervisor.receive(witness, str)
        os.kill(victim.pid, signal.SIGKILL)
        witness.send("now")
        with pytest.raises(PeerLostError, match=r"the victim process \(pid \d+\) was killed by SIGKILL"):
            supervisor.receive(witness, str)
    assert gone(victim)
    assert gone(witness)


def test_a_process_that_is_stuck_or_stopped_costs_the_deadline_and_no_more() -> None:
    started = time.monotonic()
    with Supervisor(deadline_s=4) as supervisor:
        child = supervisor.start("stuck", ignore_everything)
        supervisor.receive(child, str)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceededError, match="waiting for the stuck process"):
            supervisor.receive(child, str)
    assert time.monotonic() - started < 60
    assert gone(child)


def test_of_several_whoever_speaks_is_heard() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        children = [supervisor.start(word, echo, word) for word in ("one", "two")]
        heard = dict(supervisor.receive_any(children, str) for _ in children)
        assert heard == {child: child.name for child in children}
        children[1].send(5)
        assert supervisor.receive_any(children, int) == (children[1], 5)
        children[0].send(6)
        for child in children:
            supervisor.finish(child)
        assert supervisor.receive_any(children, int) == (children[0], 6)


def test_a_process_killed_on_purpose_is_nobodys_failure() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        victim = supervisor.start("victim", hang)
        other = supervisor.start("other", echo, "hello")
        supervisor.receive(victim, str)
        supervisor.kill(victim)
        assert gone(victim)
        assert supervisor.receive(other, str) == "hello"
        other.send(3)
        assert supervisor.receive(other, int) == 3
        failing = supervisor.start("failing", fail_typed)
        with pytest.raises(GeometryError):
            supervisor.receive(failing, str)


def test_a_failure_in_a_group_of_tasks_is_that_failure() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        failing = supervisor.start("failing", fail_in_a_group)
        supervisor.receive(failing, str)
        with pytest.raises(GeometryError, match=r"block_table\[4\] = 9") as caught:
            supervisor.receive(failing, str)
    assert "ExceptionGroup" in str(getattr(caught.value.__cause__, "text", ""))


def test_a_wait_that_was_cancelled_loses_no_message() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        child = supervisor.start("impatient", impatient)
        supervisor.receive(child, str)
        child.send(7)
        assert supervisor.receive(child, int) == 7


def test_the_wrong_message_is_an_error() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        child = supervisor.start("echo", echo, "hello")
        with pytest.raises(ProtocolError, match="echo process must send int"):
            supervisor.receive(child, int)


def test_whose_parent_died_before_it_could_ask_for_its_own_death_ends_at_once() -> None:
    # It is told of another parent than it has.
    process = multiprocessing.get_context("spawn").Process(target=die_with, args=(os.getppid(),))
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 1
    finally:
        process.kill()


def test_a_process_of_a_scene_dies_with_whoever_started_it() -> None:
    """Its standard input stays open, so that nothing else ends it."""
    kept, theirs = os.pipe()
    start = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], stdin=int(sys.argv[2]),"
        " stdout=subprocess.PIPE); print(child.stdout.readline().decode(), child.pid, flush=True);"
        "sys.stdin.read()"
    )
    wait = (
        "import sys; from hurray_rdma.demo.child import die_with;"
        "die_with(int(sys.argv[1])); print('up', flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", start, wait, str(kept)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[kept],
    )
    assert parent.stdout is not None
    word, pid = parent.stdout.readline(), int(parent.stdout.readline())
    watched = os.pidfd_open(pid)
    try:
        assert word == b"up\n"
        parent.kill()
        ended, _, _ = select.select([watched], [], [], 60)
        assert ended, "it lives on"
    finally:
        parent.communicate()
        for each in (watched, kept, theirs):
            os.close(each)


def test_ctrl_c_is_the_supervisors_business() -> None:
    with Supervisor(deadline_s=30) as supervisor:
        child = supervisor.start("echo", echo, "hello")
        assert supervisor.receive(child, str) == "hello"
        os.kill(child.pid, signal.SIGINT)
        child.send(1)
        assert supervisor.receive(child, int) == 1
        supervisor.finish(child)


def test_who_has_ended_and_was_read_to_its_end_is_not_sent_to() -> None:
    with Supervisor(deadline_s=60) as supervisor:
        process = supervisor.start("first", echo, "hello")
        supervisor.receive(process, str)
        process.send(3)
        supervisor.receive(process, int)
        supervisor.finish(process)
        assert process.connection.closed
        with pytest.raises(PeerLostError, match=r"the first process \(pid \d+\) ended with exit code 0"):
            process.send("too late")
