"""What two engines prove themselves with, from files: on a command line everybody on the machine could read a secret.

It knows the options' names and that the files can be read; what TLS makes of them is `control`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hurray_rdma.errors import ConfigError

if TYPE_CHECKING:
    from hurray_rdma.control import Tls

__all__ = ["Authority", "Certificate", "PrivateKey", "read_tls", "read_token"]

Certificate = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="PEM", help="Speak TLS: this side's certificate chain.")
]
PrivateKey = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="PEM", help="The certificate's private key, if not in the same file."),
]
Authority = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="PEM", help="Speak TLS: who must have signed the other side's.")
]


def read_token(path: Path | None) -> str | None:
    """The file's text without white space around it; None without a file.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    token = _read("--token-file", path).strip()
    if not token:
        raise ConfigError(
            "must hold a token", field="--token-file", value=str(path), fix="Make one: openssl rand -hex 32 > FILE"
        )
    return token


def read_tls(
    *, certificate: Path | None, private_key: Path | None, authority: Path | None, listens: bool
) -> Tls | None:
    """Who this side is, and whom it believes; None without any of the options.

    Raises:
        ConfigError: a file cannot be read, or an option needs another one.
    """
    from hurray_rdma.control import Tls  # noqa: PLC0415 - keeps --help quick

    files = {"--tls-cert": certificate, "--tls-key": private_key, "--tls-ca": authority}
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        _read(option, path)
    if given and certificate is None and (listens or private_key is not None):
        needing = "--tls-key" if private_key is not None else "--tls-ca"
        raise ConfigError("needs --tls-cert", field=needing, value=str(given[needing]), fix="Add --tls-cert PEM")
    return Tls(certificate=certificate, private_key=private_key, authority=authority) if given else None


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=option, value=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("cannot be read: it is no text", field=option, value=str(path)) from error
