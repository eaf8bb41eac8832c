"""Tokens and certificates from files: what is read, what is refused, and by which option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hurray_rdma.cli.access import read_tls, read_token
from hurray_rdma.control import Tls
from hurray_rdma.errors import ConfigError


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    path = tmp_path / "some.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\n")
    return path


def test_a_token_is_the_files_text_without_white_space(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  a secret \n")
    assert read_token(path) == "a secret"
    assert read_token(None) is None


@pytest.mark.parametrize(
    ("content", "told"), [(b" \n", "must hold a token. Make one: "), (b"\xff", "it is no text"), (None, "No such file")]
)
def test_a_token_that_cannot_be_had_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--token-file = ") as caught:
        read_token(path)
    assert told in str(caught.value)


@pytest.mark.parametrize("listens", [True, False])
def test_no_option_is_no_tls_and_all_are_passed_on(pem: Path, listens: bool) -> None:
    assert read_tls(certificate=None, private_key=None, authority=None, listens=listens) is None
    told = read_tls(certificate=pem, private_key=pem, authority=pem, listens=listens)
    assert told == Tls(certificate=pem, private_key=pem, authority=pem)


def test_who_connects_needs_no_certificate_of_its_own_and_who_listens_does(pem: Path) -> None:
    assert read_tls(certificate=None, private_key=None, authority=pem, listens=False) == Tls(authority=pem)
    with pytest.raises(ConfigError, match=r"--tls-ca = .*: needs --tls-cert"):
        read_tls(certificate=None, private_key=None, authority=pem, listens=True)


def test_a_key_alone_proves_nothing(pem: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tls-key = .*: needs --tls-cert"):
        read_tls(certificate=None, private_key=pem, authority=None, listens=False)


@pytest.mark.parametrize("option", ["certificate", "private_key", "authority"])
def test_a_file_that_is_not_there_is_named_by_its_option(tmp_path: Path, option: str) -> None:
    files: dict[str, Path | None] = {"certificate": None, "private_key": None, "authority": None}
    with pytest.raises(ConfigError, match=r"--tls-(cert|key|ca) = '.*absent': cannot be read: No such file"):
        read_tls(**files | {option: tmp_path / "absent"}, listens=False)
