"""An environment with an ability that no other one has, and its rules."""

from perturn.extend import Ability, EnvironmentTraits, EpisodeProtocol, Observation, Task

DOORS = Ability(("task",), "plain")
RULES = EpisodeProtocol("guest-rules", format="action", system="Walk to the door.", max_turns=2)


class Corridor:
    """A door two steps to the left or to the right; a word of the first half of the alphabet is a step to the left."""

    traits = EnvironmentTraits(protocol="guest-rules", distributions=("pyyaml",))
    name = "guest-corridor-1.0"

    def tasks(self, split):
        """Four tasks of each kind."""
        return [Task(f"{split}-{kind}/{n}", kind, split) for kind in ("left", "right") for n in range(4)]

    def reset(self, task, seed):
        """Begin an episode."""
        self.kind, self.turns, self.walked = task.kind, 0, 0
        return Observation(f"The door is to the {task.kind}.")

    def step(self, action):
        """Walk; each step toward the door is rewarded."""
        self.turns += 1
        right_way = (action[:1].lower() in [*"abcdefghijklm"]) == (self.kind == "left")
        self.walked += right_way
        over = self.turns == 2
        return Observation("On.", reward=0.5 * right_way, terminated=over, success=over and self.walked == 2)

    def expert(self, task):
        """Walk to the door."""
        return ["go" if task.kind == "left" else "walk"] * 2

    def doors(self, task):
        """Return the steps to the door of a task, which its number says."""
        return 1 + int(task.id.rpartition("/")[2])

    def close(self):
        """Nothing is open."""
