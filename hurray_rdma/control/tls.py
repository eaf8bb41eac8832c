"""TLS of the control channel, from the paths of PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

from hurray_rdma.errors import ConfigError

__all__ = ["SSLContext", "Tls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Who this engine is, and whom it believes. TLS 1.3 only.

    With ``certificate`` and ``authority`` on both sides each proves itself to the other (mutual TLS). Page bytes that
    UCX moves are not encrypted; those that travel on the control channel are.
    """

    certificate: str | Path | None = None
    """This engine's certificate chain; a listening engine needs one."""
    private_key: str | Path | None = None
    """Of ``certificate``; None if it is in the same file."""
    authority: str | Path | None = None
    """Certificates that sign the other side's: a listening engine with it asks for client certificates, a connecting
    one accepts only servers signed by it; None is the system's for connecting, and asks for none when listening."""
    server_name: str | None = None
    """What a server's certificate must hold; None is the host name that was connected to."""

    def server_context(self) -> SSLContext:
        """For listening.

        Raises:
            ConfigError: no certificate, or a file cannot be used.
        """
        if self.certificate is None:
            raise ConfigError(
                "an engine that listens needs one", field="tls.certificate", value=None, fix="Give its PEM file"
            )
        context = SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> SSLContext:
        """For connecting.

        Raises:
            ConfigError: a file cannot be used.
        """
        context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.authority is None:
            context.load_default_certs()
        return self._loaded(context)

    def _loaded(self, context: SSLContext) -> SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.private_key)
        except (OSError, ValueError) as error:
            fix = "Its private key must be in the same file, or given, too" if self.private_key is None else None
            raise ConfigError(
                f"cannot be used: {error}", field="tls.certificate", value=str(self.certificate), fix=fix
            ) from error
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be used: {error}", field="tls.authority", value=str(self.authority)) from error
        return context
