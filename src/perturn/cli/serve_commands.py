"""Command `serve`, which serves a policy through the protocols of agent programs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from perturn.cli._base import command, existing, results
from perturn.display.progress_bars import at_work
from perturn.display.progress_bars import console as notices

KEY = "PERTURN_API_KEY"
"""Environment variable that holds the clients' API key."""


@command(
    "serve",
    "tiny-agent serve.max_new_tokens=2048 serve.idle_seconds=3600",
    "runs/demo:base --record episodes --port 8000",
    "gpt-4.1-mini engine.name=api --record episodes --reward my_package.rewards:judge",
    panel="The loop",
)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL-or-RUN[:POLICY]", help="Hub id, model folder, bundled name, or run folder."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE ...]", help="Settings, such as serve.max_turns=50."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Folder for recorded sessions; it can be read as a run folder.", callback=existing),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0: any free port.", min=0, max=65535)] = 8000,
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Function that returns the reward of an episode."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed that the seeds of sessions are derived from.")] = 0,
) -> None:
    """Serve a policy to agent programs, and record what they do."""
    from perturn.engines.engine_process import EngineProcess
    from perturn.run.served_policy import begin_record, open_beside, recipe_of_record, reward_function
    from perturn.serve import Endpoint, check_address
    from perturn.serve.settings import read_settings

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: open sessions are recorded
    settings, others = read_settings(overrides or [], host, port)
    judge = None if reward is None else reward_function(reward)
    key = os.environ.get(KEY) or None
    recipe = None if record is None else recipe_of_record(record, model, others)  # before the model is loaded
    check_address(settings, key)
    with at_work(f"opening {model}"):
        engine = open_beside(model, others, notices.print)
    try:
        with Endpoint(engine, settings, key=key, record=record, reward=judge, seed=seed) as endpoint:
            if record is not None and recipe is not None:
                begin_record(record, recipe)
            results.print(f"policy:  {engine.name}", markup=False, soft_wrap=True)
            results.print(f"OpenAI:  OPENAI_BASE_URL={endpoint.url()}", markup=False, soft_wrap=True)
            results.print(f"Claude:  ANTHROPIC_BASE_URL={endpoint.address}", markup=False, soft_wrap=True)
            shown = f"in {KEY}" if key else endpoint.key
            results.print(f"key:     {shown}", markup=False, soft_wrap=True)
            address = f"session: {endpoint.address}/s/ID/v1, or KEY.ID as the key"
            results.print(address, markup=False, soft_wrap=True)
            if endpoint.lost:
                results.print(
                    f"{endpoint.lost} sessions of an endpoint that was killed are recorded as failed"
                )
            results.print("Ctrl-C ends it.")
            sys.stdout.flush()
            if isinstance(engine, EngineProcess):
                raise engine.lost()
            threading.Event().wait()
    finally:
        engine.close()
