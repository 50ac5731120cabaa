"""Run SkyRL's Tinker server on the CPU without `uv`, with a Python that has `skyrl[tinker,jax]`.

    python skyrl_server.py --base-model FOLDER --port 8000 [--checkpoints-base DIR] [--database-url URL] ...

SkyRL 0.3.0 expects `uv run` as its parent process. On Python 3.11, it also needs another `TypedDict`.
"""

import argparse
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def main(words: list[str]) -> None:
    """Serve the API, or run the process that computes for it."""
    if words[:1] == ["engine"]:
        from skyrl.tinker import engine

        sys.argv[1:] = words[1:]
        engine.main()
        return
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    given = vars(parser.parse_args(words))
    port = given.pop("port")
    api._build_uv_run_cmd_engine = lambda _, config: [
        sys.executable,
        __file__,
        "engine",
        *config_to_argv(config),
    ]
    api.app.state.engine_config = EngineConfig.model_validate(given)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
