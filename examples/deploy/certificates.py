"""Make certificates for the SuperLink's machine, and a key for each site: `python certificates.py --host NAME`.

They are for a trial, or for machines of one organization. Otherwise, have your own authority sign the certificate.
"""

import argparse
import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAYS = 365
SITES = ("hospital-north", "hospital-south", "bank")


def make_certificates(folder: Path, hosts: Sequence[str], sites: Sequence[str] = SITES) -> None:
    """Write ``ca.crt``, ``server.pem``, ``server.key``, and ``<site>.key`` and ``<site>.pub`` for each site.

    Args:
        folder: The folder to write to. Only this user can read the private keys.
        hosts: Names and addresses that SuperNodes use to reach the SuperLink.
        sites: The sites.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own, authority = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lenders: authority")])
    ca = _signed(issuer, issuer, authority.public_key(), authority, x509.BasicConstraints(ca=True, path_length=0), [])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0])])
    not_ca = x509.BasicConstraints(ca=False, path_length=None)
    server = _signed(name, issuer, own.public_key(), authority, not_ca, hosts)
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / "server.key", own, serialization.PrivateFormat.TraditionalOpenSSL)
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_key(folder / f"{site}.key", key, serialization.PrivateFormat.OpenSSH)
        ssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{site}.pub").write_bytes(ssh + b"\n")


def _signed(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    constraints: x509.BasicConstraints,
    hosts: Sequence[str],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(constraints, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="append", default=[], help="A name or address of the SuperLink's machine.")
    make_certificates(Path("certificates"), [*parser.parse_args().host, "localhost", "127.0.0.1"])
