"""Fixtures of studies."""

import pytest

from support.models import write_tiny_policy


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tokenizer):
    """A tiny policy on disk with a small vocabulary, in which whole runs take half the time."""
    return write_tiny_policy(tmp_path_factory.mktemp("models") / "tiny", tokenizer)
