"""tau3-bench, airline and retail: an agent talks with a simulated user and changes a database with tools.

Yao et al. 2024, "tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains", arXiv:2406.12045;
Barres et al. 2025, "tau2-bench", arXiv:2506.07982. The tasks come from github.com/sierra-research/tau2-bench.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from perturn.bounds import PATH
from perturn.engines.judging.judge_engine import JudgeSettings
from perturn.envs.benchmark import NO_EPISODE, check_known, short_hash
from perturn.envs.tau3.assertions import AssertionJudge
from perturn.envs.tau3.domains import DOMAINS, Row, files_of, methods_of, open_domain, schema, state_of
from perturn.envs.user_talk import UserTalk
from perturn.episodes.tool_calls import ToolAction, ToolCall, read_action, write_action
from perturn.errors import ConfigError, EnvironmentFailure, check_belongs, did_you_mean
from perturn.io.plain_data import mended
from perturn.traits import EnvironmentTraits
from perturn.types import Message, Observation, Task

ASSERTED = "NL_ASSERTION"
"""Reward component of tasks with assertions in plain language."""
MOST_ERRORS = 10
"""Number of failed calls after which the episode ends with reward 0."""
_GREETING = "Hi! How can I help you today?"
_NO_ACTION = "That is not an action: call a tool, or write a message to the user."
_SYSTEM = """You are an agent of customer service. Help the user, and keep to the policy below.
In each turn you either write a message to the user or call a tool. You cannot do both at the same time.

<policy>
{policy}
</policy>"""
_USER = """You play a customer who talks with an agent of customer service.
Write one message at a time, in your own words.
Keep to the scenario: do not make up what it does not say, and tell things only as the agent asks for them.
Write ###STOP### once the goal of the scenario is reached, ###TRANSFER### once you are transferred to another agent, and
###OUT-OF-SCOPE### if the scenario does not say enough to go on.

<scenario>
{scenario}
</scenario>"""


class Tau3:
    """tau3-bench as an `Environment` and an `Expert`; play it under `protocol.format=tools` with a section `user`.

    An action either calls tools or is a message to the user. The model of the section `user` plays the user. Without
    such a model, a scripted user says why they call, and then ends the conversation. The user ends the conversation
    with `###STOP###`, `###TRANSFER###` or `###OUT-OF-SCOPE###`.

    The final reward is 1 if the database equals its state after the gold actions, and the agent's messages contain all
    required texts; else 0. The reward is also 0 if the user has not ended the conversation, or after `MOST_ERRORS`
    failed calls.

    Some tasks of retail also have assertions in plain language (`NL_ASSERTION`), which a model must check. The section
    `judge` names this model. Without a judge, splits with such tasks are rejected, since episodes that violate an
    assertion would count as solved. With `assertions: leave-out`, these tasks are skipped instead.

    Differs from tau2-bench: The guidelines for the user, the agent's instruction and the question to the judge have our
    own wording. So scores are comparable only within Perturn. The judge gives one grade for all assertions of a task.
    The judge is asked only if the other reward components are met.
    """

    format: ClassVar[str] = "tools"
    max_turns: ClassVar[int] = 100
    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        reads=lambda settings: files_of(settings.get("domain", "airline"), settings.get("data")),
    )

    def __init__(
        self,
        domain: str = "airline",
        data: Annotated[str | None, PATH] = None,
        assertions: Literal["reject", "leave-out"] = "reject",
        judge: JudgeSettings | None = None,
    ) -> None:
        """Read the files of a domain.

        Args:
            domain: `airline` or `retail`.
            data: Folder of domains: `data/tau2/domains` of a clone of tau2-bench. None: `$TAU2_DATA_DIR/tau2/domains`,
                or else the folder of an installed package.
            assertions: Treatment of tasks with assertions in plain language if there is no judge. `reject` raises an
                error for their splits, and `leave-out` skips these tasks.
            judge: Settings of the model that checks these assertions. None: no judge.
        """
        check_known("domain", domain, DOMAINS, "tau3")
        check_known("assertions", assertions, ("reject", "leave-out"), "tau3")
        self._domain = open_domain(domain, data)
        digest = short_hash(json.dumps([self._domain.policy, *self._domain.rows.values()], sort_keys=True))
        judged, remedy = {"environment.judge": judge}, "leave one of the two settings out"
        check_belongs(judged, assertions == "reject", "environment.assertions=reject", remedy)
        asserted = {key for key, row in self._domain.rows.items() if _assertions(row)}
        self._judge = AssertionJudge(judge) if judge is not None and asserted else None
        self._left_out = asserted if assertions == "leave-out" else set[str]()
        self._rejected = set[str]() if self._judge else asserted - self._left_out
        part = "-without-assertions" if self._left_out else f"-{judge.model}" if judge and self._judge else ""
        self.name = f"tau3-{domain}-{digest[:8]}{part}"
        self.system = _SYSTEM.format(policy=self._domain.policy.strip())
        self._row: Row | None = None
        self._gold: dict[str, str] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of an official split: `train`, `test`, or `base` for both.

        Raises:
            ConfigError: If tasks have assertions in plain language, there is no judge, and `assertions` is `reject`.
        """
        splits = {"base": list(self._domain.rows), **self._domain.splits}
        check_known("split", split, tuple(splits), self.name)
        if rejected := self._rejected.intersection(splits[split]):
            raise ConfigError(
                f"{self.name}: the reward of {len(rejected)} of {len(splits[split])} tasks of split {split!r} is also "
                f"for assertions in plain language ({ASSERTED}), which a judge must check. Set "
                "environment.judge.model, or environment.assertions=leave-out to play the other tasks alone."
            )
        return [Task(key, "", split) for key in splits[split] if key not in self._left_out]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Restore the database, greet the user, and wait for the user's message; the seed has no effect."""
        self._row = row = self._find(task)
        self._tools = self._domain.open()
        self._methods = methods_of(self._tools)
        self._errors, self._to_user, self._changes = 0, list[str](), list[ToolCall]()
        self._said = list[Message]()
        scenario = _scenario(row)
        opening = row["user_scenario"]["instructions"]
        script = "\n".join(filter(None, (opening["reason_for_call"], opening.get("known_info"))))
        self._talk = UserTalk(_USER.format(scenario=scenario), _GREETING, [script])
        handed = self._talk.hand_over()
        return Observation("", tools=tuple(map(schema, self._methods.values())), user=handed.user)

    def step(self, action: str) -> Observation:
        """Take one action of the policy, or the user's message if the episode waits for it."""
        if self._row is None:
            raise EnvironmentFailure(NO_EPISODE)
        if self._talk.waits:
            self._talk.hear(action)
            self._said.append({"role": "user", "content": action})
            return self._end(self._row) if self._talk.over else Observation(action, state_key=self._key())
        said = read_action(action)
        if said is None or not (said.calls or said.text.strip()):
            return Observation(_NO_ACTION, valid=False, state_key=self._key())
        self._to_user.append(said.text)
        calls = [{"name": each.name, "arguments": dict(each.arguments)} for each in said.calls]
        self._said.append({"role": "assistant", "content": said.text, "tool_calls": calls})
        if not said.calls:
            return self._talk.hand_over(said.text)
        results, valid = zip(*map(self._call, said.calls), strict=True)
        self._said += [{"role": "tool", "content": each} for each in results]
        self._errors += valid.count(False)
        over = self._errors >= MOST_ERRORS
        self._row = None if over else self._row
        return Observation("", results=results, valid=all(valid), terminated=over, state_key=self._key())

    def expert(self, task: Task) -> Sequence[str]:
        """Return the gold actions, one per turn, and a final message with all texts that the user must get."""
        criteria = self._find(task)["evaluation_criteria"]
        calls = [
            ToolAction("", (ToolCall(each["name"], each["arguments"]),)) for each in criteria["actions"] or ()
        ]
        communicated = " ".join(["That is done.", *(criteria.get("communicate_info") or ())])
        return [write_action(each) for each in (*calls, ToolAction(communicated))]

    def close(self) -> None:
        """Release the database."""
        self._row = None

    def _find(self, task: Task) -> Row:
        if task.id not in self._domain.rows:
            raise EnvironmentFailure(
                f"{self.name} has no task {task.id!r}.{did_you_mean(task.id, self._domain.rows)}"
            )
        if task.id in self._rejected | self._left_out:
            raise EnvironmentFailure(
                f"{self.name}: the reward of task {task.id!r} is also for assertions in plain language ({ASSERTED}), "
                "which nobody checks here; set environment.judge.model."
            )
        return self._domain.rows[task.id]

    def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Execute a call; return its result in tau2-bench's wording, and whether it succeeded."""
        found = _called(self._methods, call.name, call.arguments)
        if found[1] and getattr(self._methods[call.name], "__mutates_state__", True):
            self._changes.append(call)
        return found

    def _key(self) -> str:
        """Return the `state_key`: a hash of the conversation and of the calls that may have changed the database."""
        return short_hash(repr([self._changes, self._talk.heard]))

    def _gold_state(self, row: Row) -> str:
        """Return the digest of the database after the gold actions."""
        if row["id"] not in self._gold:
            tools = self._domain.open()
            for each in row["evaluation_criteria"]["actions"] or ():
                _called(methods_of(tools), each["name"], each["arguments"])
            self._gold[row["id"]] = state_of(tools)
        return self._gold[row["id"]]

    def _end(self, row: Row) -> Observation:
        """End the episode, check all components of the reward, and return the last observation."""
        self._row, criteria = None, row["evaluation_criteria"]
        met = "COMMUNICATE" not in _basis(row) or _is_sent(
            criteria.get("communicate_info") or (), self._to_user
        )
        met = met and ("DB" not in _basis(row) or self._gold_state(row) == state_of(self._tools))
        if met and self._judge is not None and (assertions := _assertions(row)):
            met = self._judge.holds(row["id"], self._said, assertions)
        return Observation("", reward=float(met), terminated=True, success=met)


def _basis(row: Row) -> list[str]:
    """Return the reward components of a task."""
    return row["evaluation_criteria"]["reward_basis"]


def _assertions(row: Row) -> list[str]:
    """Return the assertions in plain language on which a task's reward depends; empty if there are none."""
    criteria = row["evaluation_criteria"]
    return (criteria.get("nl_assertions") or []) if ASSERTED in criteria["reward_basis"] else []


def _called(methods: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Call a tool; return its result as text, and whether it succeeded."""
    if name not in methods:
        return f"Error: Tool '{name}' not found.", False
    try:
        result = methods[name](**json.loads(json.dumps(dict(arguments))))
        return mended(_text(result)), True
    except Exception as error:  # noqa: BLE001  a tool may raise anything on a model's arguments
        return mended(f"Error: {error}"), False


def _text(result: Any) -> str:
    """Return the result of a tool as the text that the agent reads."""
    return result if isinstance(result, str) else json.dumps(_plain(result), default=str)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, int | float):  # bool is a subclass of int
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _is_sent(wanted: Sequence[str], texts: Sequence[str]) -> bool:
    """Return whether each wanted text is in some message, ignoring case and the commas of messages."""
    plain = [text.lower().replace(",", "") for text in texts]
    return all(any(each.lower() in text for text in plain) for each in wanted)


def _scenario(row: Row) -> str:
    """Return the description of the user and of the user's goal, for the model that plays the user."""
    scenario = row["user_scenario"]
    instructions = scenario["instructions"]
    parts = (
        ("Persona", scenario.get("persona")),
        ("Reason for call", instructions["reason_for_call"]),
        ("Known info", instructions.get("known_info")),
        ("Unknown info", instructions.get("unknown_info")),
        ("Task instructions", instructions["task_instructions"]),
    )
    return "\n\n".join(f"{name}:\n{text}" for name, text in parts if text)
