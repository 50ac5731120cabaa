"""Shop whose customer is a simulated user: the agent asks, the user answers, and the agent sells."""

from typing import ClassVar

from perturn.types import Observation, Task, UserTurn


class Shop:
    """The customer wants one fruit. Selling it ends the episode with reward 1; a customer who leaves ends it with 0."""

    name = "shop-1.0"
    protocol: ClassVar = {"format": "plain", "system": "Sell one fruit.", "max_turns": 4}
    script = True

    def tasks(self, split):
        """Return two tasks."""
        return [Task(f"{split}/{fruit}", "", split, {"fruit": fruit}) for fruit in ("apple", "pear")]

    def reset(self, task, seed):
        """Begin with the customer, who speaks first."""
        self.task, self.heard = task, [{"role": "user", "content": "Hello!"}]
        return self._hand_over(f"I would like one {task.data['fruit']}.")

    def step(self, action):
        """Accept the user's text in the user's turn, and the agent's text in its own."""
        if self.users:
            self.users = False
            self.heard.append({"role": "assistant", "content": action})
            return Observation(
                action, reward=0.0, terminated=action == "Bye.", state_key=f"{len(self.heard)}"
            )
        self.heard.append({"role": "user", "content": action})
        if action.startswith("sell"):
            good = action == f"sell {self.task.data['fruit']}"
            return Observation("Sold.", reward=float(good), terminated=True, success=good)
        return self._hand_over("Bye." if "never" in action else "Please.")

    def _hand_over(self, says):
        self.users = True
        said = says if self.script else None
        return Observation(
            "", user=UserTurn(f"You want one {self.task.data['fruit']}.", tuple(self.heard), said)
        )

    def expert(self, task):
        """Return the actions of one sale."""
        return [f"sell {task.data['fruit']}"]

    def close(self):
        """Do nothing."""
