"""Engine that answers by a function, for judges and simulated users."""

from perturn.errors import EngineFailure
from perturn.types import Action


class Examiner:
    """Engine that answers by a function of the text and the seed, and records its prompts."""

    name = "examiner"

    def __init__(self, say):
        self.say, self.asked, self.open = say, [], set()

    def generate(self, prompts, sampling):
        """Answer each prompt."""
        found = []
        for prompt in prompts:
            self.open.add(prompt.conversation)
            text = prompt.observation[0]["content"]
            self.asked.append((text, prompt.seed))
            said = self.say(text, prompt.seed)
            found.append(said if isinstance(said, EngineFailure) else Action(said))
        return found

    def forget(self, conversation):
        """Record that a conversation is over."""
        self.open.discard(conversation)

    def close(self):
        """Do nothing."""
