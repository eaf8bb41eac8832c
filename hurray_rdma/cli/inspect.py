"""``hurray-rdma inspect``: descriptors or captured control messages as a table of fields with their meaning.

It reads the input and draws; what the bytes mean and which rule they break is said by ``format``.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.errors import ConfigError
from hurray_rdma.format import Annotation, annotate

__all__ = ["inspect"]

_SHOWN_NBYTES = 8
_HEX = frozenset(string.hexdigits)
_SEPARATORS = str.maketrans("", "", string.whitespace + ":_")


def inspect(
    source: Annotated[str, typer.Argument(metavar="FILE|-|HEX", help="A file, - for standard input, or hex digits.")],
    *,
    json: JsonFile = None,
) -> None:
    """Explain block-paged descriptors, or captured control messages, byte by byte.

    Exit code 1 if a rule of the format is broken.
    """
    output = Output(json)
    annotations = annotate(_read(source), private_names=_private_names())
    if not annotations:
        raise ConfigError("there is nothing to inspect", field="source", value=source)
    for annotation in annotations:
        output.console.print(_table(annotation))
        output.console.print(_verdict(annotation), soft_wrap=True)
    output.write(_facts(annotations))
    if any(each.problem for each in annotations):
        raise typer.Exit(1)


def _private_names() -> dict[int, str]:
    from hurray_rdma.control import MessageType  # noqa: PLC0415 - keeps --help quick

    return {each.value: each.name for each in MessageType if each >= 0xF0}


def _read(source: str) -> bytes:
    """The bytes of the source; text of nothing but hex digits stands for the bytes it spells."""
    if source == "-":
        return _unhex(sys.stdin.buffer.read())
    path = Path(source)
    try:
        if path.exists() and not path.is_dir():  # a pipe is a file too
            return _unhex(path.read_bytes())
    except OSError as error:  # also a name too long for a file, as a long hex string is
        if not _spells_bytes(source):
            raise ConfigError(f"cannot be read: {error.strerror}", field="source", value=source) from error
    if not _spells_bytes(source):
        raise ConfigError("is neither a file, nor -, nor an even number of hex digits", field="source", value=source)
    return bytes.fromhex(_digits(source))


def _unhex(data: bytes) -> bytes:
    text = data.decode("ascii", "replace")
    return bytes.fromhex(_digits(text)) if _spells_bytes(text) else data


def _digits(text: str) -> str:
    return text.translate(_SEPARATORS).removeprefix("0x").removeprefix("0X")


def _spells_bytes(text: str) -> bool:
    digits = _digits(text)
    return bool(digits) and len(digits) % 2 == 0 and _HEX.issuperset(digits)


def _table(annotation: Annotation) -> Table:
    table = Table(title=f"{annotation.name} at byte {annotation.offset}", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("offset", justify="right", no_wrap=True)
    table.add_column("bytes", style="cyan", no_wrap=True)
    table.add_column("field", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for each in annotation.fields:
        raw = each.raw[:_SHOWN_NBYTES].hex() + (".." if len(each.raw) > _SHOWN_NBYTES else "")
        verdict = Text("ok", style="green") if each.problem is None else Text(each.problem, style="bold red")
        # Text, not str: bytes of a capture must not be taken for markup.
        table.add_row(str(each.offset), raw, Text(each.field), Text(_printable(each.meaning)), verdict)
    return table


def _verdict(annotation: Annotation) -> Text:
    if annotation.problem is None:
        return Text("accept\n", style="bold green")
    return Text(f"reject: {_printable(annotation.problem)}\n", style="bold red")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _facts(annotations: list[Annotation]) -> list[dict[str, Any]]:
    return [
        {
            "kind": each.kind,
            "name": each.name,
            "offset": each.offset,
            "nbytes": sum(len(row.raw) for row in each.fields),
            "verdict": each.verdict,
            "rule": each.problem,
            "fields": [
                {
                    "offset": row.offset,
                    "bytes": row.raw.hex(),
                    "field": row.field,
                    "meaning": row.meaning,
                    "rule": row.problem,
                }
                for row in each.fields
            ],
        }
        for each in annotations
    ]
