"""Settings of a connection to a service of the Tinker API. The API key is not a setting."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated
from urllib.parse import urlsplit

from perturn.bounds import EFFORT, SECONDS, check_bounds
from perturn.engines.api_keys import key_in
from perturn.errors import check_fit
from perturn.table import require_library

CLIENT = "0.16"
"""Version of the package `tinker` with which this code was tested."""
_NO_KEY = "tml-none"
"""Placeholder key for a service that asks for no key; the client always requires one."""


@dataclass(frozen=True)
class ServiceSettings:
    """A service of the Tinker API, such as SkyRL's server."""

    base_url: Annotated[str, EFFORT] = "http://localhost:8000"
    """Address of the service."""
    model: str | None = None
    """Name of the base model at the service. None: `model.name`, as in the recipe."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; None: the service asks for no key. The key itself is no setting."""
    timeout: Annotated[float, SECONDS, EFFORT] = 600.0
    """Time limit for the answer to one request in seconds, while the service can be reached."""
    patience: Annotated[float, SECONDS, EFFORT] = 30.0
    """Longest time in seconds that the service may be unreachable; after it the run stops."""

    def __post_init__(self) -> None:
        check_bounds(self)
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or "@" in address.netloc:
            raise ValueError(
                f"base_url must be like http://localhost:8000, without user or password, got {self.base_url!r}."
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise ValueError(
                "api_key_env must be the name of an environment variable in capitals, such as TINKER_API_KEY, not the "
                "key itself; what was given is not shown."
            )

    @property
    def host(self) -> str:
        """Name and port of the service, for messages."""
        return urlsplit(self.base_url).netloc

    def base(self, name: str) -> str:
        """Return the name of the base model at the service.

        Args:
            name: The setting `model.name`.
        """
        return self.model or name

    def read_key(self) -> str:
        """Return the API key from the environment variable, or a placeholder if the service asks for no key.

        Raises:
            ConfigError: If the variable is not set, or holds no key of the Tinker API.
        """
        if self.api_key_env is None:
            return _NO_KEY
        return key_in(self.api_key_env, self.host, "tml-")

    def check_client(self) -> None:
        """Check that the client package is installed and the key is set.

        Raises:
            ConfigError: If the package or the key is missing, or the package has an untested version.
        """
        require_library("tinker", "the Tinker API", "tinker")
        found = version("tinker")
        why = "with which Perturn was tested (SkyRL 0.3.0 answers what newer clients send with HTTP 500)"
        must, remedy = f"be {CLIENT}, {why}", f"Run: pip install 'tinker=={CLIENT}.*'"
        check_fit(found.rpartition(".")[0] == CLIENT, "the installed version of tinker", must, found, remedy)
        self.read_key()
