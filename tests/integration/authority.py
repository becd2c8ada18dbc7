"""Certificates for tests of TLS, from an authority that only they trust."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder):
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {folder.name}")])
        ca = x509.BasicConstraints(ca=True, path_length=None)
        self.cert = self._write("ca.pem", self._sign(self._name, self._key.public_key(), ca))

    def issue(self, *names):
        """Paths of a certificate and its key; names are host names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        cert = self._sign(subject, key.public_key(), x509.SubjectAlternativeName([_san(name) for name in names]))
        return self._write(f"{names[0]}.pem", cert), self._write(f"{names[0]}.key", key)

    def _sign(self, subject, public_key, extension):
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(public_key)
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).serial_number(x509.random_serial_number())
        builder = builder.not_valid_after(now + datetime.timedelta(hours=1)).add_extension(extension, critical=True)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name, content):
        path = self._folder / name
        path.write_bytes(pem_of_key(content) if name.endswith(".key") else content.public_bytes(PEM))
        return path


PEM = serialization.Encoding.PEM


def pem_of_key(key, encryption=None):
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption or serialization.NoEncryption())


def _san(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
