"""--llm as a whole: the decode process continues texts whose prompts it never saw, with a tiny and a real model."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from hurray_rdma.demo import LlmReport, MismatchError, load_config, num_llm_steps, run_llm
from hurray_rdma.demo.llm_batch import pack
from hurray_rdma.demo.llm_messages import Generated, Reread
from hurray_rdma.demo.llm_plan import Move, Variant, moves, variants
from hurray_rdma.demo.llm_report import print_llm_report
from hurray_rdma.demo.llm_run import check_reread, check_texts, default_model, missing_extra
from hurray_rdma.demo.llm_workers import _Sender, check_room
from hurray_rdma.errors import ConfigError, GeometryError, TransferAbortedError
from tests.demo.tiny_llm import save_tiny_model

EXTRA = pytest.mark.skipif(
    bool(missing_extra()), reason=f"the [llm] extra is not installed: {', '.join(missing_extra())}"
)
MODEL = pytest.mark.skipif(
    not default_model().is_file(), reason=f"no model at {default_model()}: run scripts/get-model"
)
SHORT = {
    "new_tokens": 6,
    "rounds": 1,
    "page_size": 8,
    "decode_page_size": 32,
    "system_prompt": "You keep the light of a small town by the sea.",  # 46 characters and two line ends: six pages
    "prompts": ["Hi!", "Who are you, and where do you live?", "Tell me a story of whales."],
}


def printed(report: LlmReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_llm_report(report, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.llm
@EXTRA
def test_a_tiny_models_batch_is_moved_in_every_way_and_continued_as_in_one_process(tmp_path: Path) -> None:
    config = load_config(overrides={"llm": SHORT})
    steps: list[str] = []
    report = run_llm(config, model=save_tiny_model(tmp_path), on_step=steps.append)
    assert len(steps) == num_llm_steps(config) == 7
    assert report.prefix_tokens == 48
    assert [prompt.prompt_tokens for prompt in report.prompts] == [48 + 3, 48 + 35, 48 + 26]
    assert [(each.dtype, each.src_page_size, each.dst_page_size) for each in report.variants] == [
        ("float32", 8, 8),
        ("float32", 8, 32),
        ("int8", 8, 8),
        ("int8", 8, 32),
    ]
    assert all(each.num_texts_equal == len(report.prompts) for each in report.variants)
    like, unlike, int8, _ = report.variants
    # Pages of 8: 6 shared ones and 1, 5 and 4 of each sequence's own. Pages of 32: 1 shared; 1, 2 and 2.
    assert [each.num_pages for each in report.variants] == [16, 6, 16, 6]
    assert like.num_table_entries == 7 + 11 + 10
    page_nbytes, num_tensors = 8 * 2 * 16, 3 * 2
    assert (like.sent_nbytes, like.logical_nbytes) == (
        16 * page_nbytes * 4 * num_tensors,
        28 * page_nbytes * 4 * num_tensors,
    )
    assert int8.sent_nbytes == 16 * (page_nbytes + 8 * 4) * num_tensors
    assert like.sent_nbytes < unlike.sent_nbytes < unlike.logical_nbytes
    assert like.num_texts_as_computed == 3
    assert report.reread.num_same == report.reread.num_tokens == like.num_tokens
    for times in (report.layer_by_layer, report.after_the_last):
        assert 0 <= times.exposed_s < times.first_token_s
        assert 0 < times.reading_s < times.first_token_s
    assert report.prompts[1].decode_text == report.prompts[1].single_text != ""

    text = printed(report)
    for fact in (
        "3 prompts of 51 to 83 tokens",
        "in 6 pages",
        "to the last bit",
        "8 -> 32",
        report.prompts[1].decode_text,
    ):
        assert fact in text
    facts = msgspec.json.decode(msgspec.json.encode(report))
    assert facts["variants"][0]["sent_nbytes"] == like.sent_nbytes
    assert facts["prompts"][1]["single_text"] == report.prompts[1].single_text


@pytest.mark.llm
@EXTRA
@MODEL
def test_a_real_models_texts_are_those_of_one_process() -> None:
    config = load_config(overrides={"llm": {"new_tokens": 12, "rounds": 1, "deadline_s": 900}})
    report = run_llm(config, model=None, on_step=lambda _: None)
    assert (report.num_layers, report.num_heads, report.head_dim) == (30, 3, 64)
    assert report.prefix_tokens >= 64
    assert len({prompt.prompt_tokens for prompt in report.prompts}) == len(report.prompts) == 4
    assert all(each.num_texts_equal == len(report.prompts) for each in report.variants)
    assert [each.num_texts_as_computed for each in report.variants[:2]] == [4, 4]
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[report.dtype]
    first = report.variants[0]
    assert first.num_pages == first.num_table_entries - 3 * report.prefix_tokens // 16
    assert first.sent_nbytes == first.num_pages * 16 * 3 * 64 * itemsize * 30 * 2
    assert first.logical_nbytes == first.num_table_entries * 16 * 3 * 64 * itemsize * 30 * 2
    assert report.reread.max_shortfall < 0.01  # no token but the likeliest, or one as likely but for rounding
    assert report.drift.mean_abs < 0.1 * report.drift.spread
    assert report.drift.num_same > 0.8 * report.drift.num_tokens
    assert all(prompt.decode_text.strip() for prompt in report.prompts)
    assert "emulated" not in report.lane


def test_the_plan_is_like_pages_timed_in_turn_and_then_each_other_kind_once() -> None:
    config = load_config(overrides={"llm": {"rounds": 2, "page_size": 16, "decode_page_size": 64}})
    assert variants(config.llm) == (
        Variant(16, 16, quantized=False),
        Variant(16, 64, quantized=False),
        Variant(16, 16, quantized=True),
        Variant(16, 64, quantized=True),
    )
    late, early = Move(0, layer_by_layer=False), Move(0, layer_by_layer=True)
    assert moves(config) == (late, early, late, early, *(Move(n, layer_by_layer=True) for n in (1, 2, 3)))
    alike = load_config(overrides={"llm": {"page_size": 16, "decode_page_size": 16}})
    assert [kind.quantized for kind in variants(alike.llm)] == [False, True]


def test_a_differing_token_is_an_error_with_its_place() -> None:
    def check(*texts: tuple[int, ...]) -> None:
        alone = Generated(((1, 2), (5, 6, 7)), logits_digest="")
        check_texts(Generated(texts, logits_digest=""), alone, variant=Variant(16, 64, quantized=True))

    check((1, 2), (5, 6, 7))
    with pytest.raises(MismatchError, match=r"texts\[1\]\[1\] = \(9,\): a single process generates \(6,\) .*int8-64"):
        check((1, 2), (5, 9, 7))
    with pytest.raises(MismatchError, match=r"texts\[1\]\[2\] = \(\): a single process generates \(7,\) there"):
        check((1, 2), (5, 6))


def test_logits_that_differ_are_an_error_though_the_texts_do_not() -> None:
    with pytest.raises(MismatchError, match=r"logits = 'aa': a single process has logits of digest bb.*int8-64"):
        check_texts(
            Generated(((1, 2),), logits_digest="aa"),
            Generated(((1, 2),), logits_digest="bb"),
            variant=Variant(16, 64, quantized=True),
        )


@pytest.mark.parametrize("shortfall", [0.011, float("nan")])
def test_a_text_that_the_model_would_not_choose_alone_is_an_error(shortfall: float) -> None:
    check_reread(Reread(num_same=19, num_tokens=20, max_shortfall=0.009), dtype="float32")
    with pytest.raises(MismatchError, match=r"max_shortfall = (0\.011|nan): must be at most 0\.01"):
        check_reread(Reread(num_same=19, num_tokens=20, max_shortfall=shortfall), dtype="float32")


def test_what_the_model_raises_while_layers_are_sent_is_what_leaves() -> None:
    class Transfer:
        stats = None

        async def __aenter__(self) -> Transfer:
            return self

        async def __aexit__(self, kind: object, *_: object) -> None:
            if kind is None:
                raise TransferAbortedError("not all layers were sent")

        async def send_layer(self, layer: int) -> None:
            pass

    async def job() -> None:
        written: asyncio.Queue[int | None] = asyncio.Queue()

        def read() -> Any:
            written.put_nowait(0)
            raise ZeroDivisionError("on_layer")

        reading = asyncio.create_task(asyncio.to_thread(read))
        reading.add_done_callback(lambda _: written.put_nowait(None))
        nothing: Any = None
        peer: Any = SimpleNamespace(begin=lambda *_, **__: Transfer())
        snapshot: Any = SimpleNamespace(pool=SimpleNamespace(spec=SimpleNamespace(num_layers=3)))
        sender = _Sender(nothing, peer, nothing, nothing, nothing)
        await sender._send_layers(snapshot, written, reading, key="batch-0", into=None)

    with pytest.raises(ZeroDivisionError, match="on_layer"):
        asyncio.run(job())


@pytest.mark.parametrize(
    "wrong", [{"new_tokens": 1}, {"prompts": []}, {"prompts": [""]}, {"system_prompt": ""}, {"rounds": 0}]
)
def test_a_wrong_setting_of_the_batch_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"llm\.{next(iter(wrong))}"):
        load_config(overrides={"llm": wrong})


def test_prompts_for_which_there_is_no_room_are_refused() -> None:
    prompts = pack([list(range(length)) for length in (51, 83, 74)], page_size=8)  # 2, 3 and 3 pages of 32
    check_room(prompts, load_config(overrides={"llm": SHORT | {"max_prompt_tokens": 256}}).llm)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens = 255: must be at least the 256 tokens of 3 prompts"):
        check_room(prompts, load_config(overrides={"llm": SHORT | {"max_prompt_tokens": 255}}).llm)


@pytest.mark.skipif(not missing_extra(), reason="the [llm] extra is installed")
def test_a_missing_extra_is_named_with_the_command_that_gets_it() -> None:
    with pytest.raises(ConfigError, match=r"torch.*pip install \"hurray-rdma\[llm\]\""):
        run_llm(load_config(), model=None, on_step=lambda _: None)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"page_size": 16, "decode_page_size": 24}, "page_size = 16: must divide the destination's 24"),
        ({"page_size": 12, "decode_page_size": 24}, "page_size = 12: must be a power of two"),
    ],
)
def test_page_sizes_that_do_not_fit_are_refused_before_a_model_is_loaded(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(GeometryError, match=told):
        run_llm(load_config(overrides={"llm": sizes}), model=Path("unread"), on_step=lambda _: None)


@EXTRA
def test_a_missing_model_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf.*scripts/get-model"):
        run_llm(load_config(), model=tmp_path / "absent.gguf", on_step=lambda _: None)
