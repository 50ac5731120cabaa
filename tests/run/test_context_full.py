"""Episodes that fill the model's context: truncated there as at the turn limit, scored, counted, and trained on."""

from dataclasses import replace

import pytest

import perturn
from perturn.data.episode_outcomes import outcomes
from perturn.data.origins import ending_at
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.episodes.episode import Job, episode
from perturn.errors import ContextFull, EngineFailure, JudgeFailure, NotComeBack, WorldLost
from perturn.io.plain_data import named_error
from perturn.report.episode_view import body
from perturn.run.failure_limits import Failures
from perturn.types import (
    Action,
    EpisodeProtocol,
    Observation,
    Sampling,
    Status,
    Task,
    came_elsewhere,
    failed,
    filled_context,
    score,
    unjudged,
)

PLAIN = EpisodeProtocol("p", format="plain", max_turns=10)
SHORT = Sampling(temperature=1.0, max_new_tokens=4)


class Steps:
    """Each step pays 0.2 and is answered by thirty words; so many steps solve the task."""

    name = "steps-1"

    def __init__(self, text="Room", solved_at=99):
        self.text, self.solved_at, self.taken = text, solved_at, 0

    def tasks(self, split):
        """Two."""
        return [Task("a", split=split), Task("b", split=split)]

    def reset(self, task, seed):
        """No step is taken."""
        self.taken = 0
        return Observation(self.text)

    def step(self, action):
        """Thirty words."""
        self.taken += 1
        return Observation("word " * 30, reward=0.2, success=self.taken >= self.solved_at)

    def close(self):
        """Nothing is held."""


@pytest.fixture
def small(tiny_model):
    """A model with a context of 128 tokens."""
    tiny_model.config.max_position_embeddings = 128
    return tiny_model


def play(steps, error, turns=2):
    """An episode by hand: some turns, and what the engine then answers."""
    next(steps)
    for _ in range(turns):
        steps.send(Action("go"))
    with pytest.raises(StopIteration) as end:
        steps.throw(error)
    return end.value.value


def test_a_full_context_ends_an_episode_as_the_turn_limit_does():
    """Its rewards and its success so far stay; the record says which limit it was."""
    found = play(episode(Steps(solved_at=2), Job(Task("a"), 0), protocol=PLAIN), ContextFull("full"))

    assert (found.status, found.error) == (Status.COMPLETED, "ContextFull: full")
    assert (found.terminated, found.truncated, filled_context(found)) == (False, True, True)
    assert found.success
    assert len(found.turns) == 2
    assert score(found) == found.total_reward == pytest.approx(0.4)


def test_the_report_says_what_the_error_did():
    """A full context truncates the episode; another failure fails it."""
    errors = [ContextFull("full"), EngineFailure("broken")]
    found = [play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), error) for error in errors]
    found.append(replace(found[0], truncated=False, terminated=True))

    assert [body(one, 0, {})["error"] for one in found] == [
        "Truncated: ContextFull: full",
        "FAILED: EngineFailure: broken",
        "Error: ContextFull: full",
    ]


@pytest.mark.parametrize(
    "differs",
    [{"status": Status.FAILED}, {"truncated": False}, {"error": "ContextFuller: full"}, {"error": None}],
)
def test_other_episodes_filled_no_context(differs):
    """An imported episode can have failed, with any error."""
    full = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), ContextFull("full"))

    assert not filled_context(replace(full, **differs))


@pytest.mark.parametrize("own", [ContextFull, JudgeFailure, NotComeBack, WorldLost])
def test_an_environments_exception_is_none_of_ours(own):
    """The name of one of ours decides what becomes of an episode, so another type of this name gets its module."""
    theirs = type(own.__name__, (Exception,), {"__module__": "my_env"})

    class Broken(Steps):
        def step(self, action):
            raise theirs("x")

    steps = episode(Broken(), Job(Task("a"), 0), protocol=PLAIN)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(Action("go"))
    found = end.value.value

    assert (found.status, found.error) == (Status.FAILED, f"my_env.{own.__name__}: x")
    assert named_error(own("x")) == f"{own.__name__}: x"
    assert [unjudged(found), came_elsewhere(found), filled_context(found)] == [False] * 3


def test_the_beginning_of_an_episode_filled_no_context():
    """The error truncated the whole episode; a FAILED episode stays one, with its error."""
    full, broken = (
        play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), error)
        for error in (ContextFull("full"), EngineFailure("broken"))
    )

    assert (ending_at(full, 1).error, ending_at(broken, 1).error) == (None, "EngineFailure: broken")
    assert ending_at(full, 2) is full


def test_another_failure_of_the_engine_is_none():
    """Whatever was earned."""
    found = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), EngineFailure("broken"))

    assert failed(found)
    assert (found.truncated, filled_context(found), score(found)) == (False, False, 0.0)


def test_an_episode_whose_first_prompt_does_not_fit_has_failed():
    """There is no turn to learn from; the error says what to shorten."""
    found = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), ContextFull("full"), turns=0)

    assert failed(found)
    assert found.error.startswith("ContextFull: full No turn was played")
    assert "shorten the task's text" in found.error


@pytest.mark.parametrize(("kept", "status"), [(None, Status.COMPLETED), (1, Status.FAILED)])
def test_an_episode_that_went_on_has_turns_and_a_branch_must_have_one_of_its_own(kept, status):
    """A branch without a turn of its own says nothing of the turn that it was to try."""
    begun = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), EngineFailure("over"), turns=1)
    steps = episode(Steps(), Job(Task("a"), 1, 1, begun, kept), protocol=PLAIN)
    found = play(steps, ContextFull("full"), turns=0)

    assert found.status is status
    assert len(found.turns) == 1
    assert ("let the branch begin at an earlier turn" in found.error) == failed(found)


def test_the_local_engine_cuts_at_the_context(small, tokenizer, caplog):
    """Both episodes are whole but for the limit; a warning counts them; training takes them."""
    found = perturn.collect(small, Steps, tokenizer=tokenizer, protocol=PLAIN, sampling=SHORT)

    assert [one.status for one in found] == [Status.COMPLETED] * 2
    assert all(one.truncated and filled_context(one) and 0 < len(one.turns) < 10 for one in found)
    assert all(score(one) == one.total_reward > 0 for one in found)
    assert "2 of 2 episodes filled the model's context" in caplog.text
    assert outcomes(found)["filled_context"] == 2
    perturn.train(small, found, loss="sft", tokenizer=tokenizer, use_cpu=True, disable_tqdm=True, max_steps=1)


def test_an_evaluation_scores_what_was_earned(small, tokenizer):
    """0.2 a turn, and nothing has failed."""
    found = perturn.evaluate(small, Steps, split="train", tokenizer=tokenizer, protocol=PLAIN, sampling=SHORT)

    assert found.failed == 0
    assert found.mean_score == pytest.approx(0.2 * found.mean_turns)


def test_a_task_that_does_not_fit_names_the_limit_and_stays_in_the_denominator(small, tokenizer):
    """200 words against 128 tokens."""
    found = perturn.evaluate(
        small,
        lambda: Steps("word " * 200),
        split="train",
        tokenizer=tokenizer,
        protocol=PLAIN,
        sampling=SHORT,
    )

    assert (found.n, found.failed, found.mean_score) == (2, 2, 0.0)
    assert "no room for an answer in the model's 128" in found.trajectories[0].error


def test_full_contexts_stop_no_run():
    """Not even where all end so."""
    one = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), ContextFull("full"))

    found = Failures(0.5, total=8).add([one] * 8)
    found.refuse("episodes")

    assert not found.too_many


def test_a_file_keeps_which_limit_it_was(tmp_path):
    """The error says so, and an episode that failed has filled no context."""
    full = play(episode(Steps(), Job(Task("a"), 0), protocol=PLAIN), ContextFull("full"))
    broken = play(episode(Steps(), Job(Task("b"), 0), protocol=PLAIN), NotComeBack("elsewhere"))
    with TrajectoryStore(tmp_path / "some.jsonl") as store:
        store.append(full)
        store.append(broken)

    found = list(read_trajectories(tmp_path / "some.jsonl"))
    assert found == [full, broken]
    assert [filled_context(one) for one in found] == [True, False]
