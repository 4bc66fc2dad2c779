"""Whose request it is, and whether it is one that came before, without anybody's secret.

A tenant is a name that headway.toml gives to an API key, or a digest of the key; the key itself never leaves this
module. A request that is sent again has the digest that it had. Both digests are keyed with a salt that `headway serve`
draws at each start and shares with all API processes through the environment, so they cannot be reversed by guessing
nor matched between two starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

from headway.config import KEY_PREFIX, Tenant
from headway.engine.vllm.messages import ENV_TENANT_SALT

#: Digests are told apart by this many bytes; two of a thousand keys collide with a probability of 3e-14.
DIGEST_BYTES = 8


class Tenants:
    """API keys to tenants.

    Args:
        named: tables of headway.toml.
        salt: secret of the digests; None takes that of the environment, or one of this process alone.
    """

    def __init__(self, named: Mapping[str, Tenant], *, salt: bytes | None = None) -> None:
        self._names = {digest: name for name, tenant in named.items() for digest in tenant.keys_sha256}
        self._salt = salt or os.environ.get(ENV_TENANT_SALT, "").encode()[:64] or os.urandom(32)

    def of(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return the tenant of a request, None without an Authorization header."""
        value = next((value for name, value in headers if name.lower() == b"authorization"), None)
        if value is None:
            return None
        scheme, _, rest = value.strip().partition(b" ")
        key = rest.strip() if scheme.lower() == b"bearer" else value.strip()
        name = self._names.get(hashlib.sha256(key).hexdigest()) if self._names else None
        return name or KEY_PREFIX + hashlib.blake2b(key, key=self._salt, digest_size=DIGEST_BYTES).hexdigest()

    def fingerprint(self, tenant: str | None, body: bytes) -> str:
        """Return what is the same when a tenant sends the same body again."""
        digest = hashlib.blake2b((tenant or "").encode() + b"\0", key=self._salt, digest_size=12)
        digest.update(body)
        return digest.hexdigest()
