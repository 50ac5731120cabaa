"""Trajectories to write and read: a small one, and random ones."""

from hypothesis import strategies as st

from perturn.data import records
from perturn.data.records import trajectory_to_dict
from perturn.types import Action, Status, Task, Trajectory, Turn

TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "a\nb", "\r\n", "\u2028\u2029\x85", "né 漢 🙂", '"\\', "\x00"]
)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
MESSAGE = st.builds(
    lambda role, content, rest: {**rest, "role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT | st.none(),
    OBJECT,
)
NUMBER = st.floats(-records.LARGEST, records.LARGEST)
TOKENS = st.lists(st.tuples(st.integers(0, 10**6), NUMBER), min_size=1, max_size=4)


@st.composite
def actions(draw):
    tokens = draw(st.none() | TOKENS)
    ids = None if tokens is None else tuple(token for token, _ in tokens)
    logprobs = None if tokens is None or draw(st.booleans()) else tuple(value for _, value in tokens)
    return Action(draw(TEXT), ids, logprobs, draw(st.booleans()), tuple(draw(st.lists(OBJECT, max_size=2))))


TURN = st.builds(
    Turn, st.lists(MESSAGE, max_size=2).map(tuple), actions(), NUMBER, st.booleans(), st.none() | TEXT
)


TRAJECTORY = st.builds(
    Trajectory,
    task=st.builds(Task, TEXT, TEXT, TEXT, OBJECT),
    turns=st.lists(TURN, max_size=3).map(tuple),
    environment=TEXT,
    protocol=TEXT,
    prompt=st.lists(MESSAGE, max_size=2).map(tuple),
    tools=st.lists(OBJECT, max_size=2).map(tuple),
    total_reward=NUMBER,
    success=st.booleans(),
    terminated=st.booleans(),
    truncated=st.booleans(),
    status=st.sampled_from(Status),
    error=st.none() | TEXT,
    sample=st.integers(0, 5),
    seed=st.integers(),
    policy=TEXT,
    history=st.none() | st.integers(0, 3),
    taken_over=st.integers(0, 3),
)


def trajectory(task="plant/1", sample=0, **changes):
    observation = ({"role": "user", "content": "You are in a hall."},)
    action = Action("open door", token_ids=(5, 7), logprobs=(-0.5, -0.25))
    turns = (Turn(observation, action), Turn(observation, Action("take pot")))
    return Trajectory(Task(task), turns, sample=sample, **changes)


def changed(path, value):
    """Return the record of `trajectory()` with the value at a path of keys and indices replaced."""
    record = trajectory_to_dict(trajectory())
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return record
