"""Names that a quantity may import besides `perturn.extend`: its interface, loaded policies, and forward passes."""

from perturn.chat.tokens import NO_TURN, Encoded, Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.credit_check.processes import Episodes, Outcome, Process, Step
from perturn.envs.abilities import abilities_of, ability, check_abilities, lacks
from perturn.envs.hotpotqa.answer_scores import PUNCTUATION, normalize_answer
from perturn.episodes.prompts import context_of
from perturn.episodes.tool_calls import NO_CALL, ToolCall, call_similarity, expert_action, understand
from perturn.io.plain_data import named_error
from perturn.io.user_code import load_object
from perturn.policy.logprobs import exact_length, hidden_states, logprobs_and_entropy, pack_by_pack
from perturn.policy.packing import Batch
from perturn.policy.reference import compute_logprobs, frozen
from perturn.policy.value_heads import (
    action_features,
    cross_fit,
    cross_fit_sums,
    explained_variance,
    first_tokens,
    fit_values,
    folds_by,
    turn_features,
    turn_values,
)
from perturn.quantities.answer import check_gold, own_answer_logprobs
from perturn.quantities.answer_turns import MARK, gold_answer
from perturn.quantities.protocol import (
    ACTED,
    EXPLORER,
    REFERENCE,
    REWARD,
    START,
    Computed,
    Ground,
    Planned,
    Quantity,
    QuantityTraits,
    Source,
    State,
)
from perturn.quantities.readers import Reader, encoded, in_order
from perturn.stats.matching import greedy_matches, hard_matches, soft_matches

__all__ = [
    "ACTED",
    "EXPLORER",
    "MARK",
    "NO_CALL",
    "NO_TURN",
    "PUNCTUATION",
    "REFERENCE",
    "REWARD",
    "START",
    "TOKEN_BUDGET",
    "Batch",
    "Computed",
    "Encoded",
    "Episodes",
    "Ground",
    "Outcome",
    "Planned",
    "Process",
    "Quantity",
    "QuantityTraits",
    "Reader",
    "Renderer",
    "Source",
    "State",
    "Step",
    "ToolCall",
    "abilities_of",
    "ability",
    "action_features",
    "call_similarity",
    "check_abilities",
    "check_gold",
    "compute_logprobs",
    "context_of",
    "cross_fit",
    "cross_fit_sums",
    "encoded",
    "exact_length",
    "expert_action",
    "explained_variance",
    "first_tokens",
    "fit_values",
    "folds_by",
    "frozen",
    "gold_answer",
    "greedy_matches",
    "hard_matches",
    "hidden_states",
    "in_order",
    "lacks",
    "load_object",
    "logprobs_and_entropy",
    "named_error",
    "normalize_answer",
    "own_answer_logprobs",
    "pack_by_pack",
    "soft_matches",
    "turn_features",
    "turn_values",
    "understand",
]
