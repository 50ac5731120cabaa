"""Budgets, and the ledger that remembers what was bought."""

import json
import threading

import pytest

from engines.api.chat import SAMPLING, completion, heard, prompt, prompts, put
from perturn.errors import BudgetError, RunError
from perturn.types import Action


def test_the_token_budget_stops_and_a_higher_one_goes_on(open_engine, server, tmp_path):
    """15 tokens a request: of a budget of 40 the third request takes the rest, and what it cost is remembered."""
    ledger = tmp_path / "api.jsonl"
    first = open_engine(ledger=ledger, max_tokens_total=40, concurrency=1)
    with pytest.raises(
        BudgetError, match=r"spent: 45 of engine.max_tokens_total=40 after 3 requests.*_total=90\."
    ):
        first.generate(prompts(5), SAMPLING)
    first.close()

    again = open_engine(ledger=ledger, max_tokens_total=40)
    with pytest.raises(BudgetError):
        again.generate(prompts(5), SAMPLING)
    again.close()
    found = open_engine(ledger=ledger, max_tokens_total=80).generate(prompts(5), SAMPLING)

    assert len(found) == 5
    assert sorted(map(heard, server.bodies)) == [f"go {number}" for number in range(5)]


def test_the_budget_in_money_is_tokens_times_prices(open_engine, server):
    """10 prompt tokens at 2 and 5 of the answer at 8 a million are 60e-6 a request, so 0.00012 is two of them."""
    engine = open_engine(max_cost=0.00012, prompt_price=2, completion_price=8, concurrency=1)

    with pytest.raises(
        BudgetError, match=r"spent: 0.00012 of engine.max_cost=0.00012 after 2 .*engine.max_cost=0.00024"
    ):
        engine.generate(prompts(4), SAMPLING)

    assert len(server.bodies) == 2


def test_requests_under_way_when_the_budget_ends_are_counted_and_kept(open_engine, server, tmp_path):
    """Three at once are sent before the first has cost anything; all three are paid for."""
    ledger, together = tmp_path / "api.jsonl", threading.Barrier(3, timeout=60)

    def reply(body, number):
        together.wait()
        return completion()

    server.reply = reply

    with pytest.raises(BudgetError, match=r"spent: 45 of .*=1 after 3 requests"):
        open_engine(ledger=ledger, max_tokens_total=1, concurrency=3).generate(prompts(9), SAMPLING)

    assert len(ledger.read_text().splitlines()) == len(server.bodies) == 3


def test_a_budget_needs_a_server_that_says_what_an_answer_cost(open_engine, server):
    """Without a budget its answers are taken."""
    status, body = completion()
    del body["usage"]
    server.reply = lambda *_: (status, body)

    assert isinstance(open_engine().generate([prompt()], SAMPLING)[0], Action)
    with pytest.raises(RunError, match="no budget can be kept"):
        open_engine(max_tokens_total=100).generate([prompt()], SAMPLING)


@pytest.mark.parametrize("wrong", [float("nan"), -5, "12", 1e999, 1.5, True, None, 10**30])
@pytest.mark.parametrize("count", ["prompt_tokens", "completion_tokens"])
def test_a_cost_that_cannot_be_keeps_no_budget(open_engine, server, tmp_path, count, wrong):
    """With a budget the run ends, since none could be kept; what was spent before is not forgotten."""
    replies = [completion(), (200, put(completion()[1], ("usage", count), wrong))]
    server.reply = lambda body, number: replies[number]
    ledger = tmp_path / "api.jsonl"
    engine = open_engine(ledger=ledger, max_cost=1, prompt_price=1, completion_price=1)
    first, second = prompts(2)
    engine.generate([first], SAMPLING)

    with pytest.raises(RunError, match="no budget can be kept"):
        engine.generate([second], SAMPLING)
    assert sum(json.loads(line)["prompt_tokens"] for line in ledger.read_text().splitlines()) == 10


def test_another_sample_of_the_same_task_is_asked_anew(open_engine, server, tmp_path):
    """Only the same prompt of the same conversation with the same seed is known, even where no seed is sent."""
    engine = open_engine(ledger=tmp_path / "api.jsonl", request={"seed": None})

    for name, seed in [("a", 1), ("b", 1), ("a", 2), ("a", 1)]:
        engine.generate([prompt(name, seed=seed)], SAMPLING)

    assert len(server.bodies) == 3


def test_a_ledger_that_a_kill_cut_short_is_read_to_its_last_whole_line(open_engine, server, tmp_path):
    """The torn line is dropped, and what comes after it is whole again."""
    ledger = tmp_path / "api.jsonl"
    engine = open_engine(ledger=ledger)
    engine.generate(prompts(2), SAMPLING)
    engine.close()
    ledger.write_bytes(ledger.read_bytes()[:-7])

    for _ in range(2):
        engine = open_engine(ledger=ledger)
        engine.generate(prompts(2), SAMPLING)
        engine.close()

    assert len(server.bodies) == 3
    assert len([json.loads(line) for line in ledger.read_text().splitlines()]) == 2


def test_a_ledger_that_is_damaged_or_in_use_is_refused(open_engine, tmp_path):
    """Money is not guessed at, nor counted by two at once."""
    ledger = tmp_path / "api.jsonl"
    open_engine(ledger=ledger)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"request": 1}\n')

    with pytest.raises(RunError, match="in use: another process"):
        open_engine(ledger=ledger)
    with pytest.raises(RunError, match=r"damaged.jsonl:1: request: expected text, got 1"):
        open_engine(ledger=damaged)
    with pytest.raises(RunError, match="cannot be written: Is a directory"):
        open_engine(ledger=tmp_path)


def test_a_budget_error_counts_the_requests_of_other_calls(open_engine, server):
    """The third request finds the budget spent by the second, while the first is in flight."""
    engine, sent, may_end = (
        open_engine(max_tokens_total=1, concurrency=2),
        threading.Event(),
        threading.Event(),
    )

    def reply(body, number):
        if number == 0:
            sent.set()
            assert may_end.wait(60)
        return completion()

    server.reply = reply
    first, second, third = prompts(3)
    slow = threading.Thread(target=engine.generate, args=([first], SAMPLING))
    slow.start()
    assert sent.wait(60)
    engine.generate([second], SAMPLING)
    threading.Timer(0.3, may_end.set).start()

    with pytest.raises(BudgetError, match=r"spent: 30 of .* after 2 requests"):
        engine.generate([third], SAMPLING)
    slow.join()
