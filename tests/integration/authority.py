"""Certificates for tests of TLS, from an authority that only they trust."""

import trustme


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder):
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self.cert = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.cert)

    def issue(self, *names):
        """Paths of a certificate and its key; names are host names or addresses."""
        issued = self._ca.issue_cert(*names)
        cert, key = (self._folder / f"{names[0]}.{end}" for end in ("pem", "key"))
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        return cert, key
