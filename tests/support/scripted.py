"""Engine with answers from a test."""

import time

from perturn.episodes.engine_abilities import EngineAbilities
from perturn.types import Action


class Scripted:
    """Engine that answers each prompt by a function. If the function returns None, the answer never comes."""

    name = "scripted"

    def __new__(cls, *_):
        """Open an engine. Its abilities are kept if a test initializes it again."""
        made = super().__new__(cls)
        made._prompt_tokens = {}
        made.abilities = EngineAbilities(prompt_tokens=made._prompt_tokens)
        return made

    def __init__(self, answer=lambda prompt: "ok"):
        """Set the function of the prompt, which returns an action, an error, a text, or None."""
        self.answer = answer
        self.asked, self.samplings, self.cancelled, self.forgotten = [], [], [], []
        self._open = {}

    def submit(self, prompts, sampling):
        """Accept prompts."""
        for prompt in prompts:
            assert prompt.conversation not in self._open
            self.asked.append(prompt)
            self.samplings.append(sampling)
            self._prompt_tokens[prompt.conversation] = 10 * (1 + len(prompt.turns))
            self._open[prompt.conversation] = prompt

    def advance(self):
        """Return the answers to all prompts that have one."""
        found = []
        for prompt in list(self._open.values()):
            said = self.answer(prompt)
            if said is None:
                time.sleep(0.001)
                continue
            del self._open[prompt.conversation]
            found.append((prompt, action(said) if isinstance(said, str) else said))
        return found

    def generate(self, prompts, sampling):
        """Raise an error, since tests do not use this."""
        raise NotImplementedError

    def cancel(self, conversation):
        """Stop answering a conversation."""
        del self._open[conversation]
        self.cancelled.append(conversation)

    def forget(self, conversation):
        """Release a conversation."""
        self.forgotten.append(conversation)

    def close(self):
        """Do nothing."""


def action(text, *, ended=True, **more):
    """Return an action with one token id for each word."""
    words = text.split() or [""]
    ids = tuple(range(5, 5 + len(words) + ended))
    return Action(text, ids, tuple(-0.5 for _ in ids), ended, **more)
