"""Arrays of other libraries as pools: torch, DLPack, and the array interfaces, without a copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.cache.views import strided_view
from hurray_rdma.errors import GeometryError, TransportError

SPEC = CacheSpec(num_layers=1, num_heads=2, head_dim=4, page_size=3, dtype="float32", roles=("fused",))


class OnlyDLPack:
    """Shows nothing but a capsule, as a library that NumPy does not know would; an old one knows no ``max_version``."""

    def __init__(self, array: np.ndarray, *, old: bool) -> None:
        self._array = array
        self._old = old

    def __dlpack__(self, **options: Any) -> object:
        if self._old and options:
            raise TypeError("unexpected keyword argument")
        return self._array.__dlpack__(**options)


class OnlyArrayInterface:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class OnCuda:
    """What CuPy shows of an array on the second GPU."""

    class Device:
        id = 1

    device = Device()
    dtype = np.dtype(ml_dtypes.bfloat16)

    def __init__(self, *, strides: tuple[int, ...] | None = None, read_only: bool = False, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "data": (4096, read_only),
            "shape": (5, 3, 2, 4),
            "typestr": "<V2",
            "strides": strides,
            "version": 3,
        } | more


@pytest.mark.parametrize(
    "wrap",
    [lambda a: OnlyDLPack(a, old=False), lambda a: OnlyDLPack(a, old=True), OnlyArrayInterface],
    ids=["dlpack", "old dlpack", "array interface"],
)
def test_other_libraries_arrays_are_pools_in_place(wrap: Any) -> None:
    memory = np.zeros((5, 2, 3, 2, 4), np.float32)
    mine = wrap(memory[:, 1])
    with PagePool.from_arrays(SPEC, {"fused": [mine]}) as pool:
        assert pool.pages("fused", 0) is mine
        assert pool.segment("fused", 0).page_stride_nbytes == memory.strides[0]
        (region,) = pool.regions
        assert region.address == memory[:, 1].ctypes.data
        region.array().view(np.float32)[:4] = [1, 2, 3, 4]
        assert memory[0, 1, 0, 0].tolist() == [1, 2, 3, 4]


def test_a_dlpack_capsule_says_shape_strides_and_dtype() -> None:
    array = np.zeros((6, 4, 2), np.float16)[::2, :, :1]
    view = strided_view(OnlyDLPack(array, old=False), name="a")
    assert (view.shape, view.strides_nbytes, view.dtype_name, view.itemsize, view.device) == (
        (3, 4, 1),
        array.strides,
        "float16",
        2,
        "cpu",
    )


def test_read_only_capsules_are_refused() -> None:
    array = np.zeros(4, np.float32)
    array.setflags(write=False)
    with pytest.raises(GeometryError, match=r"a = .*: is read-only"):
        strided_view(OnlyDLPack(array, old=False), name="a")


def test_types_that_no_page_holds_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"a\.dtype = 'code 5, 64 bits, 1 lanes'"):
        strided_view(OnlyDLPack(np.zeros(4, np.complex64), old=False), name="a")


def test_device_arrays_keep_their_device_and_strides() -> None:
    view = strided_view(OnCuda(), name="a")
    assert (view.address, view.device, view.dtype_name) == (4096, "cuda:1", "bfloat16")
    assert view.strides_nbytes == (48, 16, 8, 2)
    assert strided_view(OnCuda(strides=(96, 16, 8, 2)), name="a").strides_nbytes == (96, 16, 8, 2)
    with pytest.raises(GeometryError, match="is read-only"):
        strided_view(OnCuda(read_only=True), name="a")


def test_every_version_of_the_cuda_interface_is_read() -> None:
    old = OnCuda()
    del old.__cuda_array_interface__["strides"]
    old.__cuda_array_interface__["version"] = 0
    assert strided_view(old, name="a").strides_nbytes == (48, 16, 8, 2)
    assert strided_view(OnCuda(version=2, mask=None), name="a").strides_nbytes == (48, 16, 8, 2)
    assert strided_view(OnCuda(stream=2), name="a").address == 4096
    with pytest.raises(GeometryError, match=r"a\.mask = 'given'"):
        strided_view(OnCuda(mask=OnCuda()), name="a")


def test_an_array_that_does_not_tell_its_gpu_needs_the_driver() -> None:
    array = OnCuda()
    array.device = None  # type: ignore[assignment]
    with pytest.raises((TransportError, GeometryError), match=r"no CUDA driver|CUDA does not know"):
        strided_view(array, name="a")


@pytest.mark.parametrize(("kind", "stream"), [(2, -1), (13, -1), (1, None), (3, None)])
def test_a_producer_on_a_device_need_not_wait_for_any_stream(kind: int, stream: int | None) -> None:
    asked: list[int | None] = []

    class Producer(OnlyDLPack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, 0

        def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
            asked.append(stream)
            return super().__dlpack__(max_version=max_version)

    strided_view(Producer(np.zeros(4, np.float32), old=False), name="a")
    assert asked == [stream]


def test_raw_bits_of_the_right_size_are_accepted() -> None:
    spec = CacheSpec(num_layers=1, num_heads=2, head_dim=4, page_size=3, dtype="bfloat16", roles=("fused",))
    with PagePool.from_arrays(spec, {"fused": [np.zeros((5, 3, 2, 4), np.uint16)]}) as pool:
        assert pool.num_pages == 5
    with pytest.raises(GeometryError, match="dtype = 'float16': must be bfloat16"):
        PagePool.from_arrays(spec, {"fused": [np.zeros((5, 3, 2, 4), np.float16)]})


@pytest.mark.llm
def test_torch_tensors_are_pools_in_place() -> None:
    torch = pytest.importorskip("torch")
    spec = CacheSpec(num_layers=2, num_heads=2, head_dim=8, page_size=3, dtype="bfloat16", roles=("fused",))
    # vLLM's CPU cache: all layers in one allocation, heads before tokens, keys and values packed.
    cache = torch.arange(2 * 5 * 2 * 3 * 8, dtype=torch.float32).to(torch.bfloat16).reshape(2, 5, 2, 3, 8)
    with PagePool.from_arrays(spec, {"fused": [cache[0], cache[1]]}, order="HND") as pool:
        (region,) = pool.regions
        assert (region.address, region.nbytes) == (cache.data_ptr(), cache.numel() * 2)
        snapshot = Snapshot.from_block_tables(pool, [[4, 1]], seq_lens=[5])
        tokens = snapshot.tokens("fused", layer=1, seq=0)
        expected = torch.cat([cache[1, 4], cache[1, 1]], dim=1).swapaxes(0, 1)[:5]
        assert torch.equal(tokens, expected)
