"""``hurray-rdma inspect``: what it reads, what it draws, what it writes, and its exit code."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hurray_rdma.cli.inspect import inspect
from hurray_rdma.errors import ConfigError
from hurray_rdma.format import Descriptor, KvRole, encode, encode_many

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(inspect)

ONE = Descriptor.paged(
    element_type="float16",
    total_tokens=9,
    num_heads=2,
    head_dim=8,
    page_size=4,
    num_pages=5,
    num_seqs=2,
    block_table_length=3,
    kv_role="key",
    layer_index=3,
)
DATA = encode(ONE)


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_file_a_pipe_and_hex_say_the_same(tmp_path: Path) -> None:
    binary, text = tmp_path / "one.bin", tmp_path / "one.hex"
    binary.write_bytes(DATA)
    text.write_text("0x" + DATA.hex(" ", 16) + "\n")
    code, told = run(str(binary))
    assert code == 0
    assert "key of layer 3" in told
    assert "page_size" in told
    assert "4 tokens" in told
    assert "accept" in told
    assert "reject" not in told
    for others in (run(DATA.hex()), run("-", stdin=DATA), run("-", stdin=DATA.hex().encode()), run(str(text))):
        assert others == (code, told)


def test_a_named_pipe_is_a_file_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(DATA,), daemon=True)
    writer.start()
    code, told = run(str(pipe))
    writer.join(timeout=10)
    assert code == 0
    assert told == run("0X" + DATA.hex())[1]


def test_a_broken_rule_is_shown_in_its_row_and_fails_the_command() -> None:
    bad = bytearray(DATA)
    bad[72] = 3
    code, told = run(bad.hex())
    assert code == 1
    (row,) = (line for line in told.splitlines() if line.split()[:1] == ["72"])
    assert row.split()[:3] == ["72", "03", "kv_role"]
    assert "must be 0 (key), 1 (value) or 2 (fused)" in row
    assert "reject: at byte 72" in told


def test_a_stream_of_descriptors_as_json(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    stream = encode_many(ONE.for_tensors([(KvRole.KEY, 0), (KvRole.VALUE, 0)]), dialect="hurray-0.2")
    code, _ = run(stream.hex(), "--json", str(out))
    told = json.loads(out.read_text())
    assert code == 0
    assert [(each["kind"], each["offset"], each["nbytes"], each["verdict"]) for each in told] == [
        ("descriptor", 0, 133, "accept"),
        ("descriptor", 133, 133, "accept"),
    ]
    for each in told:
        assert "".join(field["bytes"] for field in each["fields"]) == stream[each["offset"] :][:133].hex()
    assert told[1]["fields"][0] == {
        "offset": 133,
        "bytes": "48525259",
        "field": "magic",
        "meaning": "b'HRRY'",
        "rule": None,
    }


def test_messages_with_the_names_of_our_private_ones() -> None:
    message = b"\xf2\0\0\0" + b"\x02\0\0\0" + b"\x03\0\0\0" + b"abc"
    code, told = run("-", stdin=message)
    assert code == 0
    assert "OFFER on stream 2" in told
    assert "3 bytes, private" in told


def test_a_peers_text_cannot_drive_the_terminal_or_the_markup() -> None:
    text = "[red]\x1b[31mé".encode()
    message = b"\x09\0\0\0" + b"\x01\0\0\0" + (8 + len(text)).to_bytes(4, "little")
    message += b"\x02\0\0\0" + len(text).to_bytes(4, "little") + text
    _, told = run("-", stdin=message)
    assert "\x1b" not in told
    assert "[red]" in told
    assert "UNKNOWN_TENSOR" in told


@pytest.mark.parametrize("source", ["no-such-file", "abc", "4852zz", "/"])
def test_what_cannot_be_read(source: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        run(source)


def test_nothing_to_inspect() -> None:
    with pytest.raises(ConfigError, match="nothing to inspect"):
        run("-")


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="json"):
        run(DATA.hex(), "--json", str(tmp_path / "none" / "told.json"))


def test_long_hex_is_not_taken_for_a_file_name() -> None:
    many = encode_many(ONE.for_tensors([(KvRole.KEY, layer) for layer in range(40)]))
    code, told = run(many.hex())
    assert code == 0
    assert told.count("accept") == 40
