"""Whatever an environment says stays text: fuzzed episodes in a real browser, under the page's own policy."""

import random
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from perturn.data.store import write_pairs
from perturn.report import write_report
from perturn.types import Action, PreferencePair, Turn

PAYLOADS = [
    "<script>pwned=1</script>",
    "</script><script>pwned=1</script>",
    "</style><style>*{display:none!important}</style>",
    "<img src=x onerror=pwned=1>",
    "<svg/onload=pwned=1>",
    "<iframe srcdoc='<script>top.pwned=1</script>'></iframe>",
    "<a href='javascript:pwned=1' autofocus onfocus=pwned=1>go</a>",
    "<form action=http://evil.example><input name=q></form>",
    "<link rel=stylesheet href=http://evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<base href=http://evil.example/>",
    "javascript:pwned=1",
    '" onmouseover=pwned=1 x="',
    "' onmouseover=pwned=1 '",
    "${pwned=1}{{pwned=1}}{% raw %}",
    "<!--<script>",
    "]]><![CDATA[",
    "&lt;b&gt;&#x3c;script>",
    "__proto__",
    "constructor",
    "\u2028\u2029\u202e\u0000\ufeff\U0001f3f4",
    "%{customdata[0]}<extra></extra><b>bold</b>",
    "x?run=a&set=b#episode\n\n",
]
FORBIDDEN = "img, iframe, object, embed, link, base, script, style, svg, math, [onerror], [onload], [onfocus]"


def fuzz(seed):
    """Some of the payloads, cut anywhere and joined."""
    draw = random.Random(seed)
    picked = draw.choices(PAYLOADS, k=draw.randint(1, 4))
    return "".join(text if draw.random() < 0.6 else text[: draw.randint(1, len(text))] for text in picked)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, make):
    """A run whose every text is hostile, with an episode for each payload and forty fuzzed ones."""
    run = make.whole_run(tmp_path_factory.mktemp("hostile") / "run")
    make.spoil(run)
    texts = [*PAYLOADS, *(fuzz(seed) for seed in range(40))]
    episodes = []
    for number, text in enumerate(texts):
        said = Action(f"Thought: {text}\nAction: {text}", (5,), (-1.0,), tool_calls=({text: text},))
        turn = Turn(({"role": text or "user", "content": text},), said, valid=number % 2 == 0)
        episode = make.trajectory(f"{number} {text}", number / len(texts), kind=text, text=text, policy=text)
        episodes.append(replace(episode, turns=(turn, turn), prompt=({"role": "system", "content": text},)))
    (run / "trajectories" / "explore.jsonl").unlink()
    make.put(run / "trajectories" / "explore.jsonl", episodes)
    write_pairs(
        run / "pairs.jsonl", [PreferencePair(one, replace(one, total_reward=0.0)) for one in episodes[:9]]
    )
    make.put_json(run / "tokens.json", {"5": "<script>pwned=1</script>"})
    return write_report(run), texts


def assert_harmless(tab):
    """Nothing ran, and nothing in the browser of episodes is an element that we do not make."""
    assert tab.evaluate(
        "() => [typeof window.pwned, document.querySelectorAll('base, meta[http-equiv]').length]"
    ) == [
        "undefined",
        1,
    ]
    assert tab.locator("#browser").locator(FORBIDDEN).count() == 0
    links = tab.evaluate(
        "() => [...document.querySelectorAll('#browser a, #report a')].map(a => a.getAttribute('href'))"
    )
    assert [link for link in links if not link.startswith("#")] == []


@pytest.mark.slow
def test_the_report_of_hostile_text_runs_none_of_it(visit, hostile):
    with visit(hostile[0]) as tab:
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        tab.wait_for_selector("[data-figure]:not([data-drawn])", state="detached")
        tab.locator("#result").hover()

        assert_harmless(tab)
        assert tab.locator("#report").locator("img, iframe, object, embed, link").count() == 0
        assert tab.evaluate("() => [...document.querySelectorAll('.plot a')].length") == 0


@pytest.mark.slow
def test_hostile_episodes_are_shown_letter_by_letter(visit, hostile):
    """Each is opened by its link; observation, thought, action and call hold the text and nothing else."""
    file, texts = hostile
    with visit(file, "#episodes?set=run%2Ftrajectories%2Fexplore") as tab:
        assert tab.locator(".found").text_content().startswith(f"{len(texts)} of ")
        for number, text in enumerate(texts):
            tab.evaluate("(link) => { location.hash = link; }", _link(number, text))
            tab.wait_for_function(
                "(n) => document.querySelector('.detail h2')?.textContent.startsWith(`${n} `)", arg=number
            )
            shown = (
                tab.locator(".turn").first.locator(".observation .text, .action .text").all_text_contents()
            )
            assert text.strip() in shown[0]
            assert shown[1].strip() == text.strip()
        assert_harmless(tab)


def _link(number, text):
    wanted = {"run": "run", "set": "trajectories/explore", "task": f"{number} {text}", "sample": 0}
    return f"#episode?{urlencode(wanted)}"


@pytest.mark.parametrize(
    "place", ["#episodes?mode=pairs", "#episodes?mode=compare", "#episodes?q=script&deep=1"]
)
def test_hostile_lists_pairs_and_searches_run_none_of_it(visit, hostile, place):
    with visit(hostile[0], place) as tab:
        tab.locator(".row").first.click()
        tab.wait_for_selector(".comparison, .conversation")
        for button in tab.locator(".more button").all():
            button.click()
        tab.wait_for_timeout(100)

        assert_harmless(tab)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hash",
    ["#episode?run=<script>&task=x", "#episode?task=__proto__", "#episodes?mode=constructor&sort=__proto__",
     "#episodes?set=%00&low=x&high=<b>", "#%E0%A4%A", "#episode?task=%E0%A4%A&turn=%22%3E"],
)  # fmt: skip
def test_hostile_links_do_no_harm(visit, hostile, hash):
    """A link may come from anyone."""
    with visit(hostile[0], hash) as tab:
        assert_harmless(tab)
