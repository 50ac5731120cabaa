"""The section `engine:` of a recipe with `name: api`. The API key is not a setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from perturn.bounds import EFFORT, SECONDS, Bound, check_bounds
from perturn.data.run_paths import RunPaths
from perturn.engines.api_keys import key_in
from perturn.engines.protocol import Serving
from perturn.errors import ConfigError
from perturn.table import locate, require_library
from perturn.traits import EngineTraits
from perturn.types import Engine

_OWN = {"model", "messages", "tools", "stop", "stream", "n"}
"""Parameters of a request that `request` cannot replace; `stop` has its own setting."""


@dataclass(frozen=True)
class ApiSettings:
    """Any server of the chat-completions protocol: OpenAI, vLLM, llama.cpp and others."""

    SECRET_LENGTH: ClassVar[int] = 8
    """Smallest number of characters of a secret key; shorter keys are placeholders, such as EMPTY."""

    base_url: str = "https://api.openai.com/v1"
    """Address of the server's API, version included, such as `https://host/v1`."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the API key; None: the server asks for no key. The key itself is no setting."""
    concurrency: Annotated[int, Bound(least=1), EFFORT] = 16
    """Largest number of requests at the same time."""
    requests_per_minute: Annotated[float, Bound(above=0), EFFORT] | None = None
    """Largest number of requests per minute, retries included, evenly spaced. None: no limit by Perturn."""
    max_retries: Annotated[int, Bound(least=0), EFFORT] = 6
    """Largest number of retries of one request after a connection error or HTTP status 408, 409, 429 or 5xx."""
    timeout: Annotated[float, SECONDS, EFFORT] = 120.0
    """Time limit of each request in seconds, from sending it to the last byte of its answer."""
    stop: list[str] | None = None
    """Stop texts: an answer ends before the first of them. None: the prompt format's stop texts; []: none."""
    keep_thoughts: bool = True
    """Whether to record the reasoning that the server returns with an answer. Set it to false to train a model whose
    chat template does not read reasoning."""
    max_tokens_total: Annotated[int, Bound(least=1), EFFORT] | None = None
    """Budget of the run in tokens, prompts and answers together. Requests in flight are still finished."""
    max_cost: Annotated[float, Bound(above=0), EFFORT] | None = None
    """Budget of the run in the currency of the prices. Requests in flight are still finished."""
    prompt_price: Annotated[float, Bound(least=0), EFFORT] | None = None
    """Price of a million prompt tokens. Discounts for cached tokens are not counted."""
    completion_price: Annotated[float, Bound(least=0), EFFORT] | None = None
    """Price of a million answer tokens."""
    request: dict[str, Any] = field(default_factory=dict)
    """Extra request parameters, which override Perturn's; null removes a parameter, such as `{max_tokens: null}`. With
    a seed here, all samples of a prompt may be equal."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_cost is not None and None in (self.prompt_price, self.completion_price):
            raise ValueError(
                "max_cost needs prices; set prompt_price and completion_price, per million tokens."
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env):
            raise ValueError(
                "api_key_env must be the name of an environment variable in capitals, such as OPENAI_API_KEY, "
                "not the key itself; what was given is not shown."
            )
        address = urlsplit(self.base_url)
        if (
            address.scheme not in ("http", "https")
            or not address.hostname
            or "@" in address.netloc
            or address.query
        ):
            raise ValueError("base_url must be like https://host/v1, without user, password or query.")
        if taken := sorted(_OWN & self.request.keys()):
            raise ValueError(f"request cannot set {', '.join(taken)}, which the engine sets itself.")

    def check(self, empty_model: Callable[[], Any], recipe: str) -> None:
        """Check that the library is installed, the key is set, and the recipe does not hold it; send nothing."""
        require_library("openai", "engine api", "api")
        key = self.read_key()
        if key and len(key) >= self.SECRET_LENGTH and key in recipe:
            raise ConfigError(f"the recipe holds the key that is in {self.api_key_env}; take it out.")

    def open(self, serving: Serving) -> Engine:
        """Open an engine that asks the server; paid answers are stored in the run folder."""
        require_library("openai", "engine api", "api")
        ledger = RunPaths(serving.folder).ledger if serving.folder else None
        engine: Engine = locate("perturn.engines.api.engine:ApiEngine")(
            serving.model, self, stop=serving.stop, ledger=ledger
        )
        return engine

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine: it serves no checkpoints, and it spends money."""
        most = self.max_cost or self.max_tokens_total
        spending = (
            f"engine's bound: {most}" if most else "no bound: set engine.max_cost or engine.max_tokens_total"
        )
        prompt, completion = self.prompt_price, self.completion_price
        return EngineTraits(
            serves_checkpoints=False,
            distributions=("openai",),
            spending=spending,
            prices=None if prompt is None or completion is None else (prompt, completion),
            request=self.request,
        )

    @property
    def host(self) -> str:
        """Host name of the server."""
        return urlsplit(self.base_url).hostname or ""

    def read_key(self) -> str | None:
        """Return the API key from the environment variable; None if the server asks for no key.

        Raises:
            ConfigError: If the variable is not set or holds no key.
        """
        if self.api_key_env is None:
            return None
        return key_in(self.api_key_env, self.host)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of numbers of tokens, in the currency of the prices."""
        return (
            prompt_tokens * (self.prompt_price or 0) + completion_tokens * (self.completion_price or 0)
        ) / 1e6
