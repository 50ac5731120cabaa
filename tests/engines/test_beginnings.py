"""What conversations begin with in common: the tree, and engines that compute it once."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from perturn.engines.local.engine import LocalEngine
from perturn.engines.local.prefix_tree import Beginnings
from perturn.types import Prompt, Sampling, Turn

from .playing import Numbers

SAMPLED = Sampling(temperature=1.0, max_new_tokens=6)
WORDS = 90


class History:
    """Stands for a conversation's."""


def join(tree, ids):
    """A conversation that begins so: it, and the node where its prompt ends."""
    history = History()
    history.end = tree.join(ids, history)
    return history


def numbers(start, tokens):
    """So many tokens that no other start has at the same index."""
    return [(start + 7 * k) % WORDS for k in range(tokens)]


def spans(nodes):
    return [len(node.ids) for node in nodes]


def test_two_share_the_whole_pages_that_they_begin_with():
    """100 tokens in common are three pages of 32; each goes on for itself, less a last token."""
    tree, common = Beginnings(), numbers(0, 100)
    one, two = join(tree, common + numbers(1, 60)), join(tree, common + numbers(2, 29))

    assert spans(one.end.shared) == spans(two.end.shared) == [96]
    assert one.end.shared == two.end.shared
    assert (spans(one.end.path), spans(two.end.path)) == ([96, 32], [96, 32])
    assert one.end.shared[0].ids == common[:96]


def test_equal_prompts_share_all_but_a_token():
    """Something must be fed for the next token: of 65 tokens two pages, of 64 one."""
    for tokens, pages in ((65, 2), (64, 1), (32, 0)):
        tree = Beginnings()
        one, two = (join(tree, numbers(0, tokens)) for _ in range(2))

        assert one.end is two.end
        assert spans(one.end.shared) == ([32 * pages] if pages else [])


def test_one_alone_shares_nothing():
    assert join(Beginnings(), numbers(0, 500)).end.shared == []


def test_a_beginning_is_divided_where_a_third_parts_and_keeps_its_values():
    """Keys are the token's index, values its negative; after the split each part has its own."""
    tree, common = Beginnings(), numbers(0, 129)
    one, two = join(tree, common), join(tree, common)
    index = torch.arange(128.0)[None, :, None].expand(2, 128, 4)
    tree.keep(one.end, {0: (index, -index), 1: (index, -index)})
    before = tree.nbytes
    third = join(tree, common[:70] + numbers(1, 60))

    assert spans(one.end.path) == [64, 64]
    assert one.end is two.end
    assert third.end.before is one.end.before
    assert len(one.end.before.members) == 3
    for node, start in ((one.end.before, 0), (one.end, 64)):
        for key, value in node.held.values():
            assert key.eq(index[:, start : start + 64]).all()
            assert value.eq(-index[:, start : start + 64]).all()
    assert tree.nbytes == before == 2 * 2 * 2 * 128 * 4 * 4, "counted once"


def test_nothing_stays_when_nobody_holds_it():
    """The common part lives as long as one of them, another's tail does not; then nothing is left."""
    tree, common = Beginnings(), numbers(0, 65)
    one, two = join(tree, common + numbers(1, 60)), join(tree, common + numbers(2, 60))
    gone = id(two.end)
    del two
    gc.collect()

    assert spans(one.end.path) == [64, 32]
    assert one.end.shared == []
    assert gone not in {id(node) for node in one.end.before.after.values()}
    del one
    gc.collect()
    assert len(tree._root.after) == 0


CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
MODELS = {
    "llama": {},
    "gemma3_text": {
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
    },
    "mistral": {"sliding_window": 8},
}


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIG | MODELS[kind]))
    return model.to(dtype).eval()


def counted(model):
    """Numbers of tokens that the model is given from now on, a pass each."""
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def texts(tasks, samples, worked=100, own=70):
    """First observations of groups: a worked example, a task, and after the first turn each its own."""
    return {
        f"{task}/{sample}": numbers(0, worked) + numbers(1 + task, own)
        for task in range(tasks)
        for sample in range(samples)
    }


def play(engine, observations, turns=2, batched=True):
    """Conversations, all at once or each alone, turn by turn: their turns."""
    found = {name: [] for name in observations}
    for k in range(turns):
        asked = [
            Prompt((), tuple(found[name]), said(ids if k == 0 else numbers(k, 5 + n)), 10 * k + n, name)
            for n, (name, ids) in enumerate(observations.items())
        ]
        batches = [asked] if batched else [[one] for one in asked]
        answers = [each for batch in batches for each in engine.generate(batch, SAMPLED)]
        for one, answer in zip(asked, answers, strict=True):
            found[one.conversation].append(Turn(one.observation, answer))
    return found


def said(ids):
    return ({"role": "user", "content": " ".join(map(str, ids))},)


def ids_of(played):
    return {name: [turn.action.token_ids for turn in turns] for name, turns in played.items()}


def logprobs_of(played):
    return torch.tensor([x for turns in played.values() for turn in turns for x in turn.action.logprobs])


@pytest.fixture(params=["apart", "copied"])
def lies(request, monkeypatch):
    """Whether beginnings are read where they lie for all, however short, or copied, however long."""
    monkeypatch.setattr("perturn.engines.local.engine.CALL_BYTES", 0 if request.param == "apart" else 2**60)
    return request.param


@pytest.mark.usefixtures("lies")
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_conversations_that_share_nothing(kind, monkeypatch):
    """Two groups of four under one worked example, windows shorter and longer than what is shared; 1e-4 nats."""
    model = make(kind)
    shared = LocalEngine(model, Numbers())
    found = play(shared, texts(2, 4))
    shared.close()
    monkeypatch.setattr(LocalEngine, "_begin", lambda *_: None)
    alone = play(LocalEngine(make(kind), Numbers()), texts(2, 4))

    assert ids_of(found) == ids_of(alone)
    assert_close(logprobs_of(found), logprobs_of(alone), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("lies")
def test_a_group_computes_its_beginning_once():
    """170 tokens: 96 of all, 64 of a task's, and 10 of each conversation's own; then a pass a token."""
    model = make("llama")
    engine = LocalEngine(model, Numbers(), speculate=False)
    seen = counted(model)
    play(engine, texts(2, 4), turns=1)

    assert seen[:4] == [96, 64, 64, 8 * 10]


@pytest.mark.usefixtures("lies")
def test_who_comes_later_finds_what_is_computed():
    """While a conversation is there; the second of a group computes what the first had for itself alone."""
    model = make("llama")
    engine = LocalEngine(model, Numbers(), speculate=False)
    seen, fed = counted(model), []
    for name, ids in texts(1, 3).items():
        play(engine, {name: ids}, turns=1)
        fed.append([each for each in seen if each > 1])
        seen.clear()

    assert fed == [[170], [160, 10], [10]]


def test_a_long_beginning_is_computed_in_passes(monkeypatch):
    """50 tokens a pass at most, the answers as in one."""
    whole = play(LocalEngine(make("llama"), Numbers(), speculate=False), texts(2, 2))
    monkeypatch.setattr("perturn.engines.local.engine._PASS", 50)
    model = make("llama")
    engine = LocalEngine(model, Numbers(), speculate=False)
    seen = counted(model)
    parts = play(engine, texts(2, 2))

    assert max(seen) == 50
    assert ids_of(parts) == ids_of(whole)


@pytest.mark.usefixtures("lies")
def test_a_play_leaves_nothing_to_the_next():
    """So that an answer is one of its own play: which others were before does not move its last bit."""
    engine = LocalEngine(make("llama"), Numbers(), speculate=False)
    first = play(engine, texts(2, 4))
    for name in first:
        engine.forget(name)
    gc.collect()

    assert engine._beginnings.nbytes == 0
    assert play(engine, texts(2, 4)) == first


@pytest.mark.usefixtures("lies")
def test_new_weights_take_nothing_over(tmp_path):
    """The next group begins with the new weights' keys and values."""
    engine, other = LocalEngine(make("llama"), Numbers(), speculate=False), make("llama")
    play(engine, texts(1, 4), turns=1)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
    other.save_pretrained(tmp_path)
    engine.update_weights(tmp_path, "new")

    assert engine._beginnings.nbytes == 0
    assert play(engine, texts(1, 4)) == play(LocalEngine(other, Numbers(), speculate=False), texts(1, 4))


@pytest.mark.usefixtures("lies")
@pytest.mark.parametrize("tokens", [0, 200, 450, 900])
def test_memory_is_bounded_with_what_is_shared(tokens):
    """In bytes of so many tokens; a single conversation may exceed it, and shares nothing then."""
    free = play(LocalEngine(make("llama"), Numbers(), speculate=False), texts(2, 4))
    engine = LocalEngine(make("llama"), Numbers(), speculate=False)
    engine._budget = tokens * engine._token_bytes
    most, advance = [], engine.advance

    def watched():
        found = advance()
        running = [row.history for row in engine._running]
        held = sum(each.nbytes for each in [*running, *engine._kept.values()]) + engine._beginnings.nbytes
        most.append((held, len(running)))
        return found

    engine.advance = watched

    assert ids_of(play(engine, texts(2, 4))) == ids_of(free)
    assert all(held <= engine._budget for held, running in most if running > 1)
    assert max(held for held, _ in most) <= max(engine._budget, 192 * engine._token_bytes)


def test_a_conversation_that_outgrows_the_budget_alone_no_longer_shares(monkeypatch):
    """Its beginning is freed, so it computes all again: the answer is that of an engine with room."""
    monkeypatch.setattr("perturn.engines.local.engine.CALL_BYTES", 0)
    answers = []
    for tokens in (400, 4000):
        engine = LocalEngine(make("llama"), Numbers(), speculate=False)
        engine._budget = tokens * engine._token_bytes
        found = play(
            engine, {name: numbers(0, 200) + numbers(n, 20) for n, name in enumerate("ab", start=1)}, turns=1
        )
        assert engine._kept["b"].tokens_apart == 192
        later = Prompt((), tuple(found["b"]), said(numbers(5, 200)), 3, "b")
        answers.append(engine.generate([later], SAMPLED)[0].token_ids)

    assert answers[0] == answers[1]


def test_values_of_another_size_than_keys_are_copied(monkeypatch):
    """Torch's kernel that gives log-sum-exps does not take them (DeepSeek)."""
    monkeypatch.setattr("perturn.engines.local.engine.CALL_BYTES", 0)
    more = {
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    }
    config = CONFIG | more | experts | {"first_k_dense_replace": 2, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **config)).eval()
    engine = LocalEngine(model, Numbers(), speculate=False)
    play(engine, texts(1, 4), turns=1)

    assert {each.tokens_apart for each in engine._kept.values()} == {0}


def test_what_many_begin_with_lies_apart_and_what_few_do_is_copied(monkeypatch):
    """A bound of 200 tokens: 96 that eight begin with are read seven times less, 64 of four three times less."""
    engine = LocalEngine(make("llama"), Numbers())
    layer_bytes = engine._token_bytes // CONFIG["num_hidden_layers"]
    monkeypatch.setattr("perturn.engines.local.engine.CALL_BYTES", 200 * layer_bytes)
    play(engine, texts(2, 4), turns=1)
    histories = engine._kept.values()

    assert {each.tokens_apart for each in histories} == {96}
    assert {each.end.tokens for each in histories} == {64}
    assert engine._beginnings.nbytes == (96 + 2 * 64) * engine._token_bytes, "held once"


def test_more_conversations_run_where_what_they_share_is_held_once(monkeypatch):
    """900 tokens hold 224 for all and a slot of 64 for each of eight; of those that copy, with slots of 192, three."""
    for bound, at_once in ((0, 8), (2**60, 3)):
        monkeypatch.setattr("perturn.engines.local.engine.CALL_BYTES", bound)
        engine = LocalEngine(make("llama"), Numbers(), speculate=False)
        engine._budget = 900 * engine._token_bytes
        engine.submit(
            [Prompt((), (), said(ids), n, name) for n, (name, ids) in enumerate(texts(2, 4).items())], SAMPLED
        )
        engine.advance()

        assert len(engine._running) == at_once


def test_on_a_gpu_all_is_copied(lies):
    """Torch's kernels there give no log-sum-exps under a mask."""
    engine = LocalEngine(make("llama"), Numbers())
    play(engine, texts(1, 4), turns=1)
    shared = engine._kept["0/0"].end.shared
    here = engine._apart(shared)
    engine._model = SimpleNamespace(device=torch.device("cuda"), config=engine._model.config)

    assert here == (lies == "apart")
    assert engine._apart(shared) == 0
