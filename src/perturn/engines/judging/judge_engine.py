"""Settings of an environment's judge, and the judge's engine, which all environments of a process share."""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from perturn.bounds import Bound, bounded
from perturn.engines.api.settings import ApiSettings
from perturn.engines.judging.judge import Judge
from perturn.table import require_library
from perturn.types import Engine, Sampling

_SAMPLING = Sampling(temperature=0.0, max_new_tokens=2048)
_SETTINGS = "environment.judge has model.name as model, and engine as server"


@dataclass(frozen=True)
@bounded
class JudgeSettings:
    """The section `judge` of an environment."""

    model: str
    """Name of the judge's model at the server."""
    server: ApiSettings = field(default_factory=ApiSettings)
    """The server of the judge's model; the settings are the engine `api`'s."""
    tries: Annotated[int, Bound(least=1)] = 3
    """Largest number of judgments for one answer or episode. If none has a readable grade, the episode fails."""

    def open(self, scale: tuple[float, float], reader: str) -> Judge:
        """Return a judge at temperature 0; read the key from an environment variable, and send nothing yet.

        Args:
            scale: Lowest and highest grade.
            reader: Name of the part that uses the judge; named in error messages.

        Raises:
            ConfigError: If the key or the package `openai` is missing.
        """
        server = json.dumps(asdict(self.server), sort_keys=True)
        engine = open_engine(self.model, server, reader)
        return Judge(engine, _SAMPLING, scale, _SETTINGS, tries=self.tries)

    @contextmanager
    def open_recorded(self, verdicts: Mapping[str, float], file: Path, reader: str) -> Iterator[Judge]:
        """Open a judge of verdicts at temperature 0 that writes each answer to a file as soon as it arrives.

        Answers that the file already holds are not asked for again. Their tokens count towards the budget.

        Args:
            verdicts: Verdict in double brackets -> its rating.
            file: The file of answers and spent tokens.
            reader: Name of the part that uses the judge; named in error messages.

        Raises:
            ConfigError: If the key or the package `openai` is missing.
            RunError: If another process has the file open.
        """
        engine = _new_engine(self.model, self.server, reader, file)
        scale = (min(verdicts.values()), max(verdicts.values()))
        try:
            yield Judge(engine, _SAMPLING, scale, _SETTINGS, tries=self.tries, verdicts=verdicts)
        finally:
            engine.close()


@cache
def open_engine(model: str, server: str, reader: str) -> Engine:
    """Return the engine of a judge's model.

    All environments of a process share one engine, so they share its request rate, budget and stored answers.

    Args:
        model: Name of the model at the server.
        server: `ApiSettings` as JSON.
        reader: Name of the part that uses the judge; named in error messages.

    Raises:
        ConfigError: If the key or the package `openai` is missing.
    """
    engine = _new_engine(model, ApiSettings(**json.loads(server)), reader, None)
    atexit.register(engine.close)
    return engine


def _new_engine(model: str, server: ApiSettings, reader: str, file: Path | None) -> Engine:
    """Return a new engine; `file` is its ledger."""
    require_library("openai", reader, "api")
    from perturn.engines.api.engine import ApiEngine

    return ApiEngine(model, server, ledger=file)
