"""The shared secret of two engines, read from a file: on a command line everybody on the machine could read it."""

from __future__ import annotations

from pathlib import Path

from hurray_rdma.errors import ConfigError

__all__ = ["read_token"]


def read_token(path: Path | None) -> str | None:
    """The file's text without white space around it; None without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="--token-file", value=str(path)) from error
    if not token:
        raise ConfigError("must hold a token", field="--token-file", value=str(path))
    return token
