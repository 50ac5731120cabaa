"""An engine whose answers a test writes."""

import time

from perturn.episodes.engine_abilities import EngineAbilities
from perturn.types import Action


class Scripted:
    """Answers each prompt by a function of it; an answer of None never comes."""

    name = "scripted"

    def __new__(cls, *_):
        """Open an engine; its abilities stay as they are when a test begins it anew."""
        made = super().__new__(cls)
        made._prompt_tokens = {}
        made.abilities = EngineAbilities(prompt_tokens=made._prompt_tokens)
        return made

    def __init__(self, answer=lambda prompt: "ok"):
        """Answer by a function; its result is an action, an error, text, or None."""
        self.answer = answer
        self.asked, self.samplings, self.cancelled, self.forgotten = [], [], [], []
        self._open = {}

    def submit(self, prompts, sampling):
        """Take prompts on."""
        for prompt in prompts:
            assert prompt.conversation not in self._open
            self.asked.append(prompt)
            self.samplings.append(sampling)
            self._prompt_tokens[prompt.conversation] = 10 * (1 + len(prompt.turns))
            self._open[prompt.conversation] = prompt

    def advance(self):
        """Answer what has an answer."""
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
        """Not asked for."""
        raise NotImplementedError

    def cancel(self, conversation):
        """Stop answering."""
        del self._open[conversation]
        self.cancelled.append(conversation)

    def forget(self, conversation):
        """Release a conversation."""
        self.forgotten.append(conversation)

    def close(self):
        """Nothing is held."""


def action(text, *, ended=True, **more):
    """An action with token ids, one a word."""
    words = text.split() or [""]
    ids = tuple(range(5, 5 + len(words) + ended))
    return Action(text, ids, tuple(-0.5 for _ in ids), ended, **more)
