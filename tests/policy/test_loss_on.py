"""`loss_on: all`: loss on the tokens that were read too, one by one that of plain cross-entropy."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN, Renderer
from perturn.errors import ConfigError
from perturn.policy.examples import encode_example
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out

from .training import PAIRS, history, trajectory, turn_by_turn

EPISODES = [trajectory("north", "take lamp"), trajectory("north", "east"), trajectory("up")]


def encoded(row, tokenizer):
    return encode_example(row, Renderer(tokenizer), None, loss_on="all").chosen


@torch.no_grad()
def plain(model, ids):
    """Negative log-likelihood of each token after the first, in nats."""
    rows = torch.tensor([ids])
    return F.cross_entropy(model(input_ids=rows).logits[0, :-1], rows[0, 1:], reduction="none")


def test_a_token_that_was_read_is_of_the_turn_that_it_led_to(tokenizer):
    """Prompt and first observation are of turn 0, what follows its action of turn 1."""
    whole = encoded(EPISODES[0], tokenizer)
    actions = Renderer(tokenizer).encode(EPISODES[0])
    end = max(i for i, turn in enumerate(actions.turn) if turn == 0)

    assert whole.ids == actions.ids
    assert whole.turn == (NO_TURN, *[0] * end, *[1] * (len(whole.ids) - end - 1))


def test_each_sequence_of_a_shortened_history_has_loss_after_its_first_token(tokenizer):
    whole = encoded(turn_by_turn(EPISODES[0]), tokenizer)

    assert [set(whole.turn[span][1:]) for span in whole.sequences] == [{0}, {1}]
    assert [whole.turn[span][0] for span in whole.sequences] == [NO_TURN, NO_TURN]


def test_the_loss_of_each_token_is_plain_cross_entropy(tokenizer, tiny_model):
    """Packed, with two episodes that begin alike; to rounding of float32."""
    sides = [encoded(one, tokenizer) for one in EPISODES]
    logprobs = action_logprobs(tiny_model, lay_out(sides)).detach()

    assert_close(-logprobs, torch.cat([plain(tiny_model, side.ids) for side in sides]), atol=1e-4, rtol=1e-4)


def test_a_training_step_has_the_mean_of_the_episodes_means(train, tokenizer, tiny_model):
    """The first step that is logged is of the model as it came."""
    means = [plain(tiny_model, encoded(one, tokenizer).ids).mean() for one in EPISODES]
    trainer = train(EPISODES, loss="sft", loss_on="all", per_device_train_batch_size=3)
    trainer.train()

    assert_close(history(trainer)[0], float(torch.stack(means).mean()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["dpo", "ppo-clip"])
def test_a_loss_on_choices_has_none_on_what_was_read(train, loss):
    with pytest.raises(ConfigError, match="loss_on must be actions with a loss on pairs or groups, got all"):
        train(PAIRS, loss=loss, loss_on="all")


def test_an_unknown_value_is_refused(train):
    with pytest.raises(ConfigError, match="loss_on must be one of actions, all, got 'everything'"):
        train(PAIRS, loss="sft", loss_on="everything")
