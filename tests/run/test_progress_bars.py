"""Progress: rate and time left of work that ends in bursts, lines without a terminal, a picture with one."""

import io
import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from perturn.display import progress_bars
from perturn.display.episode_progress import Turns, episode_bar
from perturn.display.progress_bars import Pace, Screen, Tokens, Work, clock
from perturn.display.visible_console import VisibleConsole
from perturn.episodes.episode import Job
from perturn.types import Action, EpisodeProtocol, Prompt, Task, Trajectory, Turn

PROTOCOL = EpisodeProtocol("test", max_turns=30)
TURN = Turn(({"role": "user", "content": "Go on."},), Action("look"))


def jobs(count):
    """Jobs of so many tasks."""
    return [Job(Task(f"t/{n}", "", "train"), seed=0) for n in range(count)]


def prompt(job):
    """A prompt of a job's episode; its content says nothing to a bar."""
    return Prompt((), (), (), 0, job.conversation)


def ended(job, turns):
    """The end of a job's episode after so many turns."""
    return Trajectory(job.task, (TURN,) * turns, sample=job.sample, seed=job.seed)


def test_a_rate_spans_bursts():
    """16 every 30 s are 16/30 a second at any moment after the first burst, not 16 in the moment of a burst."""
    pace = Pace(0.0)
    found = []
    for burst in (30, 60, 90, 120):
        for item in range(16):
            pace.note(burst + item / 1000, (burst // 30 - 1) * 16 + item + 1)
        found += [pace.rate(burst + 0.02), pace.rate(burst + 25)]

    assert found == pytest.approx([16 / 30] * 8, rel=0.01)
    assert Pace(0.0).rate(5.0) is None


def test_a_rate_falls_while_nothing_comes():
    """10 a second for 100 s, then nothing for 100 s: the rate of the last half of the time has halved."""
    pace = Pace(0.0)
    for second in range(1, 101):
        pace.note(second, 10.0 * second)

    assert pace.rate(101) == pytest.approx(10, rel=0.05)
    assert pace.rate(200) < 6
    assert pace.seconds_left(101, 50.0) == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("concurrency", [16, 200])
def test_time_left_is_right_before_the_first_episode_ends(concurrency):
    """200 episodes of 5 to 29 turns or the limit of 30, at 40 turns per second.

    The forecast of the whole time is never far off, although the first episodes to end are the short ones.
    """
    random.seed(0)
    todo = jobs(200)
    lengths = {job.conversation: random.choice([*range(5, 30), 30, 30, 30, 30, 30]) for job in todo}
    turns, pace, waiting, running, now = Turns(todo, PROTOCOL), Pace(0.0), list(todo), {}, 0.0
    whole = sum(lengths.values()) / 40
    forecasts = []
    while waiting or running:
        while waiting and len(running) < concurrency:
            job = waiting.pop(0)
            running[job.conversation] = job, 0
            turns.hear(prompt(job))
        now += len(running) / 40
        for name, (job, played) in list(running.items()):
            running[name] = job, played + 1
            if played + 1 == lengths[name]:
                turns.hear(ended(job, played + 1))
                del running[name]
            else:
                turns.hear(prompt(job))
        pace.note(now, turns.amount)
        if now > 5 and (left := pace.seconds_left(now, turns.left)):
            forecasts.append((now + left) / whole)

    assert turns.amount == sum(lengths.values())
    assert turns.left == 0
    assert min(forecasts) > 0.7
    assert max(forecasts) < 1.5


def test_episodes_that_end_alike_are_expected_to():
    """After 20 of 40 episodes of 10 turns, 20 more take 10 turns each, however high the limit is."""
    todo = jobs(40)
    turns = Turns(todo, PROTOCOL)
    for job in todo[:20]:
        for _ in range(10):
            turns.hear(prompt(job))
        turns.hear(ended(job, 10))

    assert turns.amount == 200
    assert turns.left == pytest.approx(200, rel=0.15)


def test_a_begun_episode_has_fewer_turns_left():
    """Of 30 turns 28 were played elsewhere: 2 at most are left, and these alone count."""
    (plain,) = jobs(1)
    begun = Job(plain.task, 0, 0, begun=ended(plain, 28))
    turns = Turns([begun], PROTOCOL)
    left = turns.left
    turns.hear(prompt(begun))
    turns.hear(ended(begun, 29))

    assert 1 < left <= 2
    assert (turns.amount, turns.left) == (1, 0)


def test_tokens_count_within_a_step():
    """Two steps of 100 tokens are done, and 60 of the third: 40 and 7 steps of 100 are left of 10."""
    passed = 0
    tokens = Tokens(lambda: passed, steps=10, a_step=150)

    first = tokens.left
    for passed in (100, 200):  # noqa: B007  read by the function above
        tokens.stepped()
    passed = 260

    assert (first, tokens.amount, tokens.left) == (1500, 260, 740)


@pytest.fixture
def shown(monkeypatch):
    """A screen without a terminal that says a line every 0.2 s, and what it has said."""
    monkeypatch.setattr(progress_bars, "EVERY", 0.2)
    file = io.StringIO()
    return Screen(Console(file=file, width=40)), file


def until_said(file, pattern):
    """Wait until it is said."""
    until = time.monotonic() + 60
    while not re.search(pattern, file.getvalue(), re.MULTILINE):
        assert time.monotonic() < until, file.getvalue()
        time.sleep(0.02)


def test_a_log_never_stays_silent(shown):
    """Work without items is heard of too; of nested works the innermost one; a long line is not wrapped."""
    screen, file = shown
    with screen.showing(Work("a stage")):
        until_said(file, "so far")
        with screen.showing(Work("evaluating a policy with a long name", 4, 0, "episodes")) as work:
            work.advance(2)
            until_said(file, "^evaluating a policy with a long name: 2/4 episodes, ")
    lines = file.getvalue().splitlines()

    assert re.fullmatch(r"a stage: 0:00:\d\d so far", lines[0])
    within = [
        line for line in lines if line.startswith("evaluating a policy with a long name: 2/4 episodes, ")
    ]
    assert len(within) >= 2
    assert "left" in within[0]
    assert "left" not in within[-1]  # the last one, when it ended
    assert "\x1b" not in file.getvalue()


def test_work_that_ended_has_its_whole_time(shown):
    """2 episodes in half a second are 4 a second or fewer, not as many as in the burst in which they ended."""
    screen, file = shown
    began = time.monotonic()
    with screen.showing(Work("evaluating", 2, 0, "episodes")) as work:
        time.sleep(0.5)
        work.advance(2)
    took = time.monotonic() - began
    last = file.getvalue().splitlines()[-1]

    rate = float(last.partition(" episodes/s")[0].rpartition(" ")[2])
    assert 2 / took - 0.05 <= rate <= 4  # printed with one decimal


def test_short_parts_of_a_larger_work_leave_no_line(shown):
    """The line of the larger work says it all; what runs long is heard of with it."""

    class Larger:
        def picture(self):
            return ""

        def line(self):
            return "iteration 2 of 3"

    screen, file = shown
    with screen.showing(Work("run")), screen.part_of(Larger()):
        with screen.showing(Work("short", 1)) as work:
            work.advance()
        short = file.getvalue()
        with screen.showing(Work("long", 2)):
            until_said(file, r"^long: 0/2, 0:00:\d\d; iteration 2 of 3$")

    assert short == ""


def test_a_terminal_shows_a_bar_and_keeps_a_line():
    """Bar, rate and time left while it runs; then one line stays."""
    file = io.StringIO()
    screen = Screen(Console(file=file, width=120, force_terminal=True))
    with screen.showing(Work("collecting", 4, 0, "episodes")) as work:
        until_said(file, "━")
        work.advance(2)
        until_said(file, "left")

    assert "collecting: 2/4 episodes" in file.getvalue()  # the picture says it without a colon


def test_clock():
    """Hours, minutes, seconds."""
    assert [clock(seconds) for seconds in (0.4, 59.6, 3725)] == ["0:00:00", "0:01:00", "1:02:05"]


def test_the_success_of_episodes_is_a_rate_at_the_end_alone(shown):
    """Of four, the two short ones end first and are solved: that is 2 solved, not 100 %."""
    four = jobs(4)
    notes = []
    with episode_bar("exploring", 0, four, PROTOCOL) as (work, hear):
        for job, solved in zip(four, (True, True, False, False), strict=True):
            hear(prompt(job))
            hear(replace(ended(job, 3), success=solved))
            notes.append(work.note)

    assert notes == ["1 solved so far", "2 solved so far", "2 solved so far", "success 50%"]


def test_a_resumed_stage_shows_no_success_rate_of_its_last_episodes(shown):
    """Three of four episodes were played before, and how many of them were solved is not known here."""
    (last,) = jobs(4)[3:]
    with episode_bar("exploring", 3, [last], PROTOCOL) as (work, hear):
        hear(prompt(last))
        hear(replace(ended(last, 3), success=False))

        assert work.note == "0 solved in this call"


def test_a_file_has_no_live_display_although_colours_are_forced(monkeypatch):
    """Rich takes any stream for a terminal then."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = VisibleConsole(file=io.StringIO())

    assert (console.is_terminal, console.is_interactive) == (True, False)


def test_a_closed_stream_and_a_logger_are_no_terminals(monkeypatch):
    """A logger in the place of stderr may have `write` and `flush` alone; a setting of the caller stays."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    closed, logger = io.StringIO(), SimpleNamespace(write=print, flush=print)
    closed.close()

    assert [VisibleConsole(file=each).is_interactive for each in (closed, logger)] == [False, False]
    assert VisibleConsole(file=logger, force_interactive=True).is_interactive
