"""Registration: memory kept alive, views that never dangle, failures that raise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from hurray_rdma.errors import ConfigError, RegistrationError, TransportError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Backing, Context, Region, default_context
from hurray_rdma.transport.binding import BoundContext
from hurray_rdma.transport.mappings import ucx_copies
from tests.transport.recorded import RecordedDriver


def test_allocated_memory_is_zero_and_outlives_its_region_while_viewed() -> None:
    region = Context().allocate(1 << 20)
    array = region.array()
    assert array.shape == (1 << 20,)
    assert not array.any()
    region.close()
    region.close()
    array[:] = 7
    assert (array == 7).all()
    with pytest.raises(RegistrationError, match="closed"):
        region.array()
    with pytest.raises(RegistrationError, match="closed"):
        region.remote()


def test_registered_memory_is_the_callers() -> None:
    array = np.arange(4096, dtype=np.uint8)
    region = Context().register(array.ctypes.data, array.nbytes, owner=array)
    assert region.address == array.ctypes.data
    array[3] = 99
    assert region.array()[3] == 99
    region.close()


@pytest.mark.parametrize(("address", "nbytes"), [(0, 4096), (4096, 0), (-1, 10)])
def test_spans_that_cannot_be_are_refused(address: int, nbytes: int) -> None:
    with pytest.raises(RegistrationError):
        Context().register(address, nbytes, owner=None)


def test_allocation_that_cannot_be_is_an_error_with_the_size() -> None:
    with pytest.raises(RegistrationError) as caught:
        Context().allocate(1 << 60)
    assert caught.value.value == 1 << 60


def test_device_names_are_checked() -> None:
    for device in ("gpu", "cuda", "cuda:x", ""):
        with pytest.raises(ConfigError) as caught:
            Context().register(4096, 4096, owner=None, device=device)
        assert caught.value.value == device


def test_host_memory_is_not_taken_for_a_gpus() -> None:
    array = np.zeros(4096, np.uint8)
    with pytest.raises(RegistrationError, match=r"there is no CUDA driver|CUDA knows no device memory"):
        Context().register(array.ctypes.data, array.nbytes, owner=array, device="cuda:0")


def test_unknown_transport_is_an_error() -> None:
    with pytest.raises((TransportError, RegistrationError)):
        Context({"TLS": "carrier_pigeon"}).open_worker()


def contradict(connection: Connection) -> None:
    first = default_context({"TLS": "tcp"})
    assert default_context() is first
    assert default_context({"TLS": "tcp"}) is first
    with pytest.raises(ConfigError):
        default_context({"TLS": "cma"})
    connection.send("done")


def test_default_context_is_made_once_and_contradictions_are_errors() -> None:
    with Child(contradict) as child:
        assert child.receive() == "done"


def fork_after_init(connection: Connection) -> None:
    context = Context()
    pid = os.fork()
    if pid == 0:
        try:
            context.allocate(4096)
        except TransportError as error:
            os._exit(0 if "spawn" in str(error) else 3)
        os._exit(4)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_forked_child_is_refused_with_the_way_out() -> None:
    with Child(fork_after_init) as child:
        assert child.receive() == 0


def test_importing_the_package_loads_no_ucx_and_the_environment_stays() -> None:
    script = (
        "import os, sys; before = dict(os.environ); import hurray_rdma; assert 'libucx' not in sys.modules;"
        "import hurray_rdma.transport; assert dict(os.environ) == before, set(os.environ) - set(before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_renewed_memory_keeps_its_content_and_its_arrays() -> None:
    region = Context().allocate(1 << 20)
    array = region.array()
    array[:] = np.arange(1 << 20) % 251
    before = array.copy()
    keys = {region.remote()}
    for _ in range(3):
        region.renew()
        keys.add(region.remote())
        assert np.array_equal(array, before)
        array[7] += 1
        assert region.array()[7] == array[7]
        array[7] -= 1
    assert len(keys) == 4
    region.close()
    assert np.array_equal(array, before)


def test_a_callers_memory_is_renewed_in_place() -> None:
    array = np.arange(4096, dtype=np.uint8)
    region = Context().register(array.ctypes.data, array.nbytes, owner=array)
    region.renew()
    assert region.address == array.ctypes.data
    view = region.array()
    with pytest.raises(RegistrationError, match="keeps it registered"):
        region.renew()
    del view
    region.renew()
    region.close()
    with pytest.raises(RegistrationError, match="closed"):
        region.renew()


def load_a_second_copy(connection: Connection, path: str) -> None:
    default = ucx_copies()
    ctypes.CDLL(path)
    with pytest.raises(TransportError, match="2 copies of UCX") as caught:
        Context()
    connection.send((default, str(caught.value)))


def test_second_copy_of_ucx_is_refused_by_name(tmp_path: Path) -> None:
    [first] = ucx_copies()
    second = tmp_path / "libucp-of-another.so.0"
    second.write_bytes(Path(first).read_bytes())
    with Child(load_a_second_copy, str(second)) as child:
        default, text = child.receive()
    assert default == [first]
    assert str(second) in text
    assert first in text


def test_the_progress_thread_does_what_it_is_told_before_anything_else() -> None:
    started: list[str] = []
    worker = BoundContext({}).open_worker(lambda: started.append(threading.current_thread().name))
    worker.close()
    assert len(started) == 1
    assert started[0] != threading.current_thread().name


def test_a_pinned_region_needs_a_driver_and_leaves_nothing_without_one() -> None:
    context = Context()
    if "cuda" in context.device_kinds:
        pytest.skip("there is a GPU here")
    with pytest.raises(TransportError, match="there is no CUDA driver"):
        context.allocate(1 << 20, pinned=True)


def pinned_region(driver: RecordedDriver) -> Region:
    context = Context()
    context.__dict__["driver"] = driver  # in the place of the machine's
    return context.allocate(1 << 16, pinned=True)


def test_memory_that_cannot_be_pinned_again_is_renewed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    driver = RecordedDriver()
    region = pinned_region(driver)
    old, array = region.remote(), region.array()
    array[:] = 7
    driver.refuses = {"pin"}
    region.renew()
    assert (region.num_renewals, region.backing) == (1, Backing.PLAIN)
    assert region.remote() != old
    assert (array == 7).all()
    assert "page-locked no more" in caplog.text
    region.close()
    assert [call[0] for call in driver.calls] == ["pin", "unpin", "pin"]


def test_memory_that_ucx_cannot_replace_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RecordedDriver()
    region = pinned_region(driver)
    old = region.remote()

    def refuse(*_: object) -> NoReturn:
        raise RegistrationError("no memory")

    monkeypatch.setattr(Context, "remake", refuse)
    with pytest.raises(RegistrationError, match="no memory"):
        region.renew()
    assert (region.num_renewals, region.backing) == (0, Backing.PINNED)
    assert region.remote() == old
    region.close()
    assert [call[0] for call in driver.calls] == ["pin", "unpin", "pin", "unpin"]


def test_memory_that_cuda_does_not_let_go_of_is_deregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RecordedDriver()
    region = pinned_region(driver)
    driver.refuses = {"unpin"}
    with pytest.raises(TransportError, match="unpin"):
        region.close()
    assert region.closed
    region.close()
