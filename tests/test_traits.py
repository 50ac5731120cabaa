"""Entries of tables, environments and engines say what they can in typed traits: nothing is looked for by its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from perturn.engines import ENGINES
from perturn.envs import ENVIRONMENTS, abilities
from perturn.envs.abilities import ABILITIES
from perturn.envs.user_environment import lacking
from perturn.errors import ConfigError
from perturn.table import check_names
from perturn.traits import EngineTraits, EnvironmentTraits

SOURCE = Path(abilities.__file__).parents[1]

_MODEL = "a transformers model, layer or config, which need not have it"
_PLAIN = "a value of the user's: a number, text, list, tensor or array"
_ERROR = "an exception of another library"
_SYSTEM = "a function that only some systems have"
_CALLER = "a callable of the user's, which need not have a name"
_CLOSED = "a world of the user's, which need not be closed"
_SCALA = "a name of Scala with a dollar sign, which Python's syntax does not allow"
_BORDER = "an entry of a package before its members are checked, which may lack them"

ALLOWED = {
    "config/outside_files.py:_of_needs": "a class of the user's, which may lack needs and is checked later",
    "api/row_making.py:_maker": "an argument, which may be a row maker, its name or a section",
    "bounds.py:bounded": "a dataclass, which may have checks of its own",
    "bounds.py:marks": "a type hint",
    "cli/__init__.py:main": "whatever ended the command",
    "cluster/ray_connection.py:Connection.get": _ERROR,
    "formats/column_names.py:_holds": _PLAIN,
    "formats/column_names.py:_may_be": _PLAIN,
    "formats/column_names.py:_plain": _PLAIN,
    "formats/json_stream.py:_Values._value": _ERROR,
    "formats/trl_rows.py:label_of": _PLAIN,
    "engines/api/engine.py:ApiEngine._failure": _ERROR,
    "engines/api/engine.py:ApiEngine._said": _ERROR,
    "engines/local/served_models.py:check_layers": _MODEL,
    "engines/local/packed_linear.py:_can_be_packed": "an operation that only some builds of torch have",
    "engines/local/packed_linear.py:_gated": _MODEL,
    "envs/async_worlds.py:AwaitedWorld.close": _CLOSED,
    "envs/async_worlds.py:_is_async": "a world of the user's, all of whose methods are looked at",
    "envs/environment_check.py:check_environment": _CALLER,
    "envs/die_with_parent.py:die_with_parent": _SYSTEM,
    "envs/gymnasium.py:Gymnasium.close": _CLOSED,
    "envs/mcp/mcp_servers.py:_text": "a part of a result of an MCP server",
    "envs/scienceworld/jvm.py:Jvm.random": _SCALA,
    "envs/scienceworld/jvm.py:Simulator._change": _SCALA,
    "envs/tau3/domains.py:methods_of": "a method of tau2-bench, which marks its tools",
    "envs/tau3/environment.py:Tau3._call": "a method of tau2-bench, which marks what changes the database",
    "envs/tau3/environment.py:_plain": "what a tool of tau2-bench returned, which may be a pydantic model",
    "io/user_code.py:_module_of_file": "a module, which need not have a file",
    "envs/adapter_values.py:schema_of": _CALLER,
    "faults.py:plain_scalar": _PLAIN,
    "io/read_input.py:_yaml_reason": _ERROR,
    "losses/nested_lists.py:turn_lengths": _PLAIN,
    "losses/protocol.py:check_loss": _BORDER,
    "losses/protocol.py:_misfits": _BORDER,
    "losses/protocol.py:default_traits": _BORDER,
    "needs.py:check_declarations": _BORDER,
    "run/stages/selection.py:_plain": _PLAIN,
    "quantities/__init__.py:kind_of": _BORDER,
    "table.py:check_members": _BORDER,
    "free_memory.py:_trim": _SYSTEM,
    "free_memory.py:_used": _SYSTEM,
    "policy/attention.py:forest_attention": _MODEL,
    "training/sharding.py:divide": _MODEL,
    "training/sharding.py:ShardedTrainer._load_divided_optimizer": "an optimizer, which accelerate may wrap",
    "training/turn_config.py:TurnConfig._check_optimizer": "an enum of transformers, or its value",
    "training/turn_config.py:_reentrant": _MODEL,
    "chat/control_tokens.py:declared_ends": _MODEL,
    "chat/control_tokens.py:keep_ends": _MODEL,
    "policy/head.py:_last_layer": _MODEL,
    "policy/head.py:spare_last_layer": _MODEL,
    "policy/logprobs.py:_head": _MODEL,
    "policy/logprobs.py:check_architecture": _MODEL,
    "policy/logprobs.py:prepare": _MODEL,
    "policy/models.py:add_adapters": "a config or a layer of peft",
    "policy/models.py:context_length": _MODEL,
    "chat/model_names.py:tokenizer_of": _MODEL,
    "policy/models.py:vocabulary": _MODEL,
    "policy/packing.py:Filled.set_epoch": "a sampler of torch",
    "training/credit_choice.py:_faults": _BORDER,
    "training/turn_trainer.py:TurnTrainer._get_dataloader": "a loader of torch or accelerate",
    "training/trainer_evaluation.py:EvaluatingTrainer.evaluation_loop": "an optimizer, which need not have modes",
    "training/turn_trainer.py:TurnTrainer.training_step": "an optimizer, which need not have modes",
    "rotary.py:steady_length": _MODEL,
    "rotary.py:usable_length": _MODEL,
    "rotary.py:window": _MODEL,
    "api/collect_and_evaluate.py:_maker": _CALLER,
    "train_processes.py:usable_cores": _SYSTEM,
    "estimate/memory.py:model_shape": _MODEL,
    "envs/agent/adapters/openenv_adapter.py:_call": "an observation of OpenEnv, which has kinds of its own",
    "engines/tinker/service.py:Service.failure": "an error of the client, or of what it is made of",
    "config/parsing.py:_value": "a section of a recipe, which may be written as one setting",
    "traits.py:traits_of": "a class of the user's, which needs no traits",
}
"""`getattr` and `hasattr` with a literal name, and `dir`, by module and function: on what foreign object, and why."""


def _lookups(node: ast.AST, function: str = "") -> Iterator[str]:
    """The function of each `getattr` or `hasattr` with a literal name, and of each `dir`, below a node."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        within = f"{function}.{child.name}".lstrip(".") if named else function
        match child:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str()), *_]):
                yield function
            case ast.Call(func=ast.Name(id="dir")):
                yield function
        yield from _lookups(child, within)


def test_no_entry_environment_or_engine_is_asked_by_a_literal_name():
    """Every lookup is on a list, and no place on a list is without one."""
    found = {
        f"{file.relative_to(SOURCE).as_posix()}:{function}"
        for file in SOURCE.rglob("*.py")
        for function in _lookups(ast.parse(file.read_text(encoding="utf-8")))
    }

    assert found - ALLOWED.keys() == set(), "new: use a trait, or say why the object is foreign"
    assert ALLOWED.keys() - found == set(), "stale: take it off its list"


def test_a_lookup_is_found_wherever_it_stands():
    tree = ast.parse(
        "class A:\n def f(self): return [x for x in y if hasattr(x, 'a')]\ngetattr(z, 'b')\ngetattr(z, b)\n"
        "def g(z): return 'c' in dir(z)"
    )

    assert list(_lookups(tree)) == ["A.f", "", "g"]


@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_our_environments_have_traits_and_no_misspelt_name(name):
    entry = ENVIRONMENTS[name]

    assert isinstance(entry.__dict__["traits"], EnvironmentTraits)
    check_names(entry, kind="environment", known=ABILITIES, traits=EnvironmentTraits)


@pytest.mark.parametrize("name", list(ENGINES))
def test_our_engines_have_traits_and_no_misspelt_name(name):
    entry = ENGINES[name]

    assert isinstance(entry().traits, EngineTraits)
    check_names(entry, kind="engine", known=("check", "open"), traits=EngineTraits)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("experts", "expert"),
        ("answer_actions", "EnvironmentTraits(answer_action=...)"),
        ("answer_action", "EnvironmentTraits(answer_action=...)"),
        ("max_turn", "max_turns"),
    ],
)
def test_a_name_that_is_nearly_right_is_rejected_at_the_border(name, meant):
    """Also of a world with `async def` methods, whose object is behind another."""
    methods = {each: lambda self, value="": value for each in ("tasks", "reset", "step")}

    (problem,) = lacking(type("Game", (), {**methods, name: ""})(), "Game")

    assert problem == f"environment Game has {name!r}, which is never read. Did you mean `{meant}`?"
    assert (
        lacking(type("Game", (), {**methods, "close": 1, "closed": 1, "steps": 1, "export": 1})(), "Game")
        == []
    )


def test_an_ability_takes_what_its_protocol_says():
    """The two are written in one file; each field of the signature is counted."""
    protocols = [
        each for each in vars(abilities).values() if isinstance(each, type) and each.__name__ != "Table"
    ]
    methods = {name: getattr(each, name) for name in ABILITIES for each in protocols if name in vars(each)}

    assert methods.keys() == set(ABILITIES)
    for name, method in methods.items():
        assert len(ABILITIES[name].takes) == method.__code__.co_argcount - 1


def test_an_ability_cannot_have_the_name_of_what_every_environment_has():
    with pytest.raises(
        ConfigError, match=r"an environment has an ability 'reset', and that name is taken. Rename it"
    ):
        EnvironmentTraits(abilities={"step": ABILITIES["expert"], "reset": ABILITIES["expert"]})
