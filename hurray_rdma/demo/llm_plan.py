"""What ``--llm`` does, in order, as values that follow from the settings: supervisor and both processes go by them.

Knows settings; knows no models, no memory and no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hurray_rdma.cache import CacheSpec
from hurray_rdma.demo.config import DemoConfig, LlmConfig
from hurray_rdma.plan import check_pair

__all__ = ["Move", "Variant", "check_variants", "moves", "variants"]

_SCALE_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of keeping the same keys and values in the pages of the two sides."""

    src_page_size: int
    dst_page_size: int
    quantized: bool
    """int8 with a scale in each page slot, or as the model computes."""

    @property
    def pool(self) -> str:
        """Name of the receive pool; that of the first variant is the engine's own, which has none."""
        return f"{'int8' if self.quantized else 'computed'}-{self.dst_page_size}"

    def source(self, spec: CacheSpec) -> CacheSpec:
        """The sending side's cache of a model that needs ``spec``."""
        return self._stored(spec, self.src_page_size)

    def dest(self, spec: CacheSpec) -> CacheSpec:
        """The receiving side's cache of a model that needs ``spec``."""
        return self._stored(spec, self.dst_page_size)

    def _stored(self, spec: CacheSpec, page_size: int) -> CacheSpec:
        if not self.quantized:
            return replace(spec, page_size=page_size)
        return replace(spec, page_size=page_size, dtype="int8", scale_dtype=_SCALE_DTYPE)


@dataclass(frozen=True, slots=True)
class Move:
    """One time that the batch is read and sent."""

    variant: int
    """Index into `variants`."""
    layer_by_layer: bool
    """Each layer leaves as soon as it is computed, or all of them after the last one."""


def variants(config: LlmConfig) -> tuple[Variant, ...]:
    """The first is like on both sides and as the model computes; the others follow from it."""
    return tuple(
        Variant(config.page_size, dst_page_size, quantized)
        for quantized in (False, True)
        for dst_page_size in dict.fromkeys((config.page_size, config.decode_page_size))
    )


def check_variants(config: LlmConfig) -> None:
    """Raises GeometryError where pages of such sizes cannot be exchanged: better known before a model is loaded."""
    spec = CacheSpec(num_layers=1, num_heads=1, head_dim=1, page_size=config.page_size, dtype="float32")
    for kind in variants(config):
        check_pair(kind.source(spec), kind.dest(spec))


def moves(config: DemoConfig) -> tuple[Move, ...]:
    """What is sent: the first variant in rounds, with and without overlap in turn, then each of the others once."""
    timed = (Move(0, layer_by_layer=False), Move(0, layer_by_layer=True)) * config.llm.rounds
    return (*timed, *(Move(index, layer_by_layer=True) for index in range(1, len(variants(config.llm)))))
