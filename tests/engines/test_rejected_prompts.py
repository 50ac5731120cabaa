"""A prompt that cannot be written."""

from perturn.engines.local.engine import LocalEngine
from perturn.errors import ModelError, PromptRejected
from perturn.types import Action, Prompt, Sampling


def test_a_conversation_that_the_template_rejects_fails_alone(tiny_model, renderer, monkeypatch):
    """Such as two system messages of an agent's program; the others are answered."""
    whole = renderer.prompt_ids

    def prompt_ids(asked):
        if asked.conversation == "b":
            raise ModelError("the chat template cannot render this conversation: one system message, please")
        return whole(asked)

    monkeypatch.setattr(renderer, "prompt_ids", prompt_ids)

    answers = LocalEngine(tiny_model, renderer).generate(
        [Prompt((), (), ({"role": "user", "content": "go"},), 0, name) for name in "abc"],
        Sampling(max_new_tokens=4),
    )

    assert [type(each) for each in answers] == [Action, PromptRejected, Action]
    assert "one system message, please" in str(answers[1])
