"""The environment variables that worlds get: all but those that look like keys.

A world may show its variables to the policy (a shell does), and what a policy sees is stored and published.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_NAME = re.compile(
    r"(KEYS?|TOKENS?)(_|\d|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(AUTH|PASS|PAT|COOKIES?|DSN)(_|$)|_PWD(_|$)",
    re.IGNORECASE,
)
_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY")
"""An address with a password in it, and a key in a text."""


def without_secrets(environ: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """The variables without those whose name or value looks like a key, but for those that are passed by name."""
    return {
        name: value
        for name, value in environ.items()
        if name in passed or not (_NAME.search(name) or _VALUE.search(value))
    }
