"""A Docker daemon that could as well be on another machine: none of this one's files and sockets are in its sight.

It has mount, network, host-name and pid namespaces of its own, its own data, and listens with TLS on a socket of this
loopback that it was handed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PROGRAM = """
exec 3<&{fd}
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /run
ip link set lo up
export LISTEN_FDS=1 LISTEN_PID=$$
exec dockerd -H fd:// -H unix://{folder}/docker.sock --tlsverify \\
    --tlscacert {folder}/server/ca.pem --tlscert {folder}/server/cert.pem --tlskey {folder}/server/key.pem \\
    --data-root {folder}/data --exec-root {folder}/exec --pidfile {folder}/pid \\
    --bridge none --iptables=false --ip6tables=false --ip-masq=false --ip-forward=false
"""


@dataclass
class RemoteDaemon:
    """What a client must know of it."""

    port: int
    folder: Path

    @property
    def host(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def socket(self) -> str:
        return f"{self.folder}/docker.sock"

    @property
    def environment(self) -> dict[str, str]:
        return {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": f"{self.folder}/client"}


@contextlib.contextmanager
def remote_daemon() -> Iterator[RemoteDaemon]:
    """Started for the block; needs root and dockerd."""
    folder = Path(tempfile.mkdtemp(prefix="forge-remote-", dir="/var/tmp"))
    certificates(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener, open(folder / "log", "wb") as log:
        daemon = RemoteDaemon(listener.getsockname()[1], folder)
        program = PROGRAM.format(folder=folder, fd=listener.fileno())
        apart = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child"]
        process = subprocess.Popen(
            [*apart, "bash", "-c", program], stdout=log, stderr=log, pass_fds=(listener.fileno(),)
        )
    try:
        yield daemon
    finally:
        (dockerd,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(dockerd, signal.SIGTERM)  # it ends its containers; unshare itself passes no signal on
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def certificates(folder: Path) -> None:
    """A root for both sides, and a certificate for each: `server/` and `client/`, as Docker names the files."""
    root_key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forge-env tests")])

    def issue(
        name: x509.Name, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier | None
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder(root, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
        )
        if usage is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
            builder = builder.add_extension(names, critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(root_key, hashes.SHA256())

    ca = issue(root, root_key, None).public_bytes(serialization.Encoding.PEM)
    for side, usage in (("server", ExtendedKeyUsageOID.SERVER_AUTH), ("client", ExtendedKeyUsageOID.CLIENT_AUTH)):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = issue(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, side)]), key, usage)
        (folder / side).mkdir(parents=True)
        (folder / side / "ca.pem").write_bytes(ca)
        (folder / side / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / side / "key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
