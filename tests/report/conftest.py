"""What the tests of the report share: run folders of real trajectories, and pages split as a browser does."""

import base64
import gzip
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from perturn.data.file_seals import seal
from perturn.data.group_account import CreditRow, write_credits
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, write_pairs
from perturn.report import write_report
from perturn.types import Action, PreferencePair, Status, Task, Trajectory, Turn

HOSTILE = "</script><script>alert('x')</script><!-- \"' \u2028 <img src=http://evil.example/a.png> ${7*7}"


def trajectory(
    task, score, *, kind="boil", valid=(True, True), failed=False, success=None, text="go", policy="sft"
):
    turns = tuple(
        Turn(({"role": "user", "content": f"you see {text}"},), Action(f"Action: {text} {i}"), valid=ok)
        for i, ok in enumerate(valid)
    )
    return Trajectory(
        Task(task, kind, "test"),
        turns,
        environment="toy-1",
        prompt=({"role": "system", "content": f"Play. {text}"},),
        total_reward=score,
        success=score == 1 if success is None else success,
        terminated=True,
        status=Status.FAILED if failed else Status.COMPLETED,
        error=f"EngineFailure: {text}" if failed else None,
        policy=policy,
    )


def put(path, trajectories):
    with TrajectoryStore(path) as store:
        for item in trajectories:
            store.append(item)


def put_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def put_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def evaluate(run):
    """Four tasks. tlm-dre against sft: +0.5, +0.25, -0.25, 0."""
    sft = [
        trajectory("t1", 0.5, valid=(True, False)),
        trajectory("t2", 0.5, kind="melt"),
        trajectory("t3", 1.0, kind="melt", valid=(True, True, True, False)),
        trajectory("t4", 0.9, failed=True, success=True, valid=()),
    ]
    aligned = [
        trajectory("t1", 1.0),
        trajectory("t2", 0.75, kind="melt"),
        trajectory("t3", 0.75, kind="melt"),
        trajectory("t4", 0.0),
    ]
    put(run / "evaluation" / "base.jsonl", [trajectory(f"t{i}", 0.0) for i in range(1, 5)])
    put(run / "evaluation" / "sft.jsonl", sft)
    put(run / "evaluation" / "tlm-dre.jsonl", aligned)
    put_json(
        run / "evaluation" / "protocol.json", {"name": "toy-protocol", "panel_sha256": "ab" * 32, "n": 4}
    )


def manifest(run, **changes):
    stages = {
        "sft": {"seconds": 100.5, "peak_memory_gb": 3.25, "counts": {"tokens": 1234567}},
        "rows": {
            "name": "expert-pairs",
            "seconds": 2.0,
            "peak_memory_gb": 0.5,
            "counts": {"pairs": 2, "dropped_small_gap": 7},
        },
        "align": {"seconds": 7200.0, "peak_memory_gb": 9.75, "counts": {}},
    }
    put_json(
        run / "manifest.json",
        {"recipe": "toy_tlm-dre", "seed": 3, "commit": "c0ffee" * 6, "stages": stages} | changes,
    )


def whole_run(folder):
    """A run with everything a report can show."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        "name: toy\nloss:\n  name: tlm-dre\n  pivot: 0.85\n", encoding="utf-8"
    )
    manifest(folder)
    experts = [trajectory(f"p{i}", 1.0, policy="expert", text=f"expert{i}") for i in range(2)]
    explored = [trajectory(f"p{i}", 0.25, valid=(True,) * 3, text=f"explored{i}") for i in range(2)]
    put(folder / "trajectories" / "expert.jsonl", experts)
    put(folder / "trajectories" / "explore.jsonl", explored)
    write_pairs(
        folder / "pairs.jsonl", [PreferencePair(*pair) for pair in zip(experts, explored, strict=True)]
    )
    sure = {"confidence": [0.95, 0.96], "weight": [0.2, 0.2]}
    reference = {"ids": [5, 6, 7], "turn": [0, 0, 1], "logprobs": [-0.5, 0.0, -0.001]}
    put_rows(folder / "metrics" / "reference.jsonl", [{"chosen": reference, "rejected": reference}] * 2)
    put_json(folder / "tokens.json", {"5": "go", "6": " 0", "7": "</b>"})
    rows = [
        {"chosen": sure, "rejected": {"confidence": [0.97, 0.98, 0.99], "weight": [0.2, 0.2, 0.2]}},
        {"chosen": sure, "rejected": {"confidence": [0.95, 0.375, 1.0000001], "weight": [0.2, 1.0, 0.2]}},
    ]
    put_rows(folder / "metrics" / "confidence.jsonl", rows)
    put_rows(
        folder / "metrics" / "sft.jsonl", [{"step": i, "loss": 2 / (i + 1), "mystery/a": i} for i in range(5)]
    )
    put_rows(
        folder / "metrics" / "align.jsonl",
        [
            {"step": i, "loss": 0.7, "rewards/margins": 0.125 * i, "coefficient": 10.0**-i, "clamped": 0,
             "log_ratio/chosen": float("nan") if i == 0 else 0.1 * i, "log_ratio/rejected": -0.1 * i}
            for i in range(6)
        ],
    )  # fmt: skip
    evaluate(folder)
    return folder


def online_run(folder, iterations=3):
    """A run of several iterations: two tasks of two samples each, weighed by `rloo`; every second policy is scored.

    Samples of task a score 1 and 0, those of task b both 0 in the first iteration and both 1 later.
    """
    folder.mkdir()
    settings = {
        "iterations": iterations,
        "rows": {"name": "groups"},
        "sft": None,
        "expert": None,
        "pair": None,
    }
    put_json(folder / "recipe.yaml", settings)
    paths, stages, files = RunPaths(folder), {}, {}
    put(paths.evaluation("base"), [trajectory(f"t{i}", 0.0) for i in range(4)])
    for number in range(1, iterations + 1):
        mark = f"-{number:03d}"
        solved = [1.0, 0.0, float(number > 1), float(number > 1)]
        by = f"ppo-clip-{number - 1:03d}@ab" if number > 1 else "base@ab"
        played = [
            replace(
                trajectory("ab"[i // 2], score, valid=(True, i > 0, True)[: 2 + i % 2], policy=by),
                sample=i % 2,
            )
            for i, score in enumerate(solved)
        ]
        put(paths.trajectories(f"explore{mark}"), played)
        rows = [
            CreditRow(
                *one.key,
                "trained" if i < 2 else "no_spread",
                tuple((0.5 - i) * (t + 1) * (i < 2) for t in range(len(one.turns))),
            )
            for i, one in enumerate(played)
        ]
        write_credits(paths.credit("rloo", mark), rows)
        put_rows(
            paths.metrics(f"align{mark}"),
            [
                {"step": step, "loss": 0.5, "grad_norm": float(step), "clip_share": 0.25 * (step - 1)}
                | {"behavior_kl": 0.01 * step, "entropy/chosen": 1.0 / number}
                | {"kl/turn_1": 0.1, "kl/turn_2": 0.5, "kl/turns": 0.3}
                for step in (1, 2)
            ],
        )
        counts = {"asked": 4, "trained": 2, "no_spread": 2, "failed": 0, "filtered": 0, "groups": 2, "alone": 0,
                  "equal_outcomes": 1, "zero_credit": 1}  # fmt: skip
        stages |= {
            f"explore{mark}": {"seconds": 2.0, "counts": {"episodes": 4}, "done": True},
            f"credit{mark}": {"seconds": 0.5, "counts": counts, "done": True},
            f"align{mark}": {
                "seconds": 1.5,
                "peak_memory_gb": number,
                "counts": {"tokens": 10},
                "done": True,
            },
        }
        files |= seal(folder, [paths.credit("rloo", mark)], f"credit{mark}")
        if number % 2 == 0:
            put(paths.evaluation(f"ppo-clip{mark}"), [trajectory(f"t{i}", float(i > 0)) for i in range(4)])
            stages[f"evaluate-ppo-clip{mark}"] = {"seconds": 1.0, "done": True}
    manifest(folder, stages=stages, files=files, commit="c0ffee12" * 5)
    return folder


def spoil(run):
    """Put hostile text wherever a run folder holds text."""
    bad = trajectory("t1", 1.0, kind=HOSTILE, text=HOSTILE, policy=HOSTILE)
    worse = trajectory("t1", 0.0, kind=HOSTILE, text=HOSTILE, policy=HOSTILE, failed=True)
    for name in ("sft", "tlm-dre"):
        (run / "evaluation" / f"{name}.jsonl").unlink()
    put(run / "evaluation" / "sft.jsonl", [worse])
    put(run / "evaluation" / "<b>&loss.jsonl", [bad])
    write_pairs(run / "pairs.jsonl", [PreferencePair(bad, worse)] * 2)
    put_rows(run / "metrics" / "align.jsonl", [{"step": 0, HOSTILE: 1.0, "x/" + HOSTILE: 2.0}])
    (run / "recipe.yaml").write_text("# " + HOSTILE.replace("\u2028", ""), encoding="utf-8")
    put_json(run / "evaluation" / "protocol.json", {HOSTILE: HOSTILE})
    stages = {HOSTILE: {"seconds": 1.0, "peak_memory_gb": 1.0, "counts": {HOSTILE: 1}}}
    manifest(run, recipe=HOSTILE, commit=HOSTILE, stages=stages, extra={HOSTILE: [HOSTILE]})


class Page(HTMLParser):
    """Elements and text of a page, as a browser would split it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.words, self._script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):  # noqa: D102
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append((dict(attrs), []))

    def handle_endtag(self, tag):  # noqa: D102
        self._script = False

    def handle_data(self, data):  # noqa: D102
        (self.scripts[-1][1] if self._script else self.words).append(data)

    @property
    def text(self):
        """Visible text in one line."""
        return " ".join(" ".join(self.words).split())

    def figure(self, name):
        """One plotly figure."""
        return next(
            json.loads("".join(body)) for attrs, body in self.scripts if attrs.get("id") == f"figure-{name}"
        )

    @property
    def figures(self):
        """Names of the figures."""
        ids = [attrs.get("id", "") for attrs, _ in self.scripts]
        return {name.removeprefix("figure-") for name in ids if name.startswith("figure-")}

    @property
    def code(self):
        """The scripts that run."""
        return ["".join(body) for attrs, body in self.scripts if "type" not in attrs]

    @property
    def content_policy(self):
        """The content-security policy."""
        return next(attrs["content"] for _, attrs in self.elements if attrs.get("http-equiv"))

    def piece(self, name):
        """A compressed piece, decoded."""
        body = next(body for attrs, body in self.scripts if attrs.get("id") == f"piece-{name}")
        return json.loads(gzip.decompress(base64.b64decode("".join(body))))

    def episode(self, **wanted):
        """(row of the index, turns and numbers, tokens) of the first episode with these values."""
        index = self.piece("index")
        columns = index["columns"]
        for number in range(len(columns["task"])):
            of = index["sets"][columns["set"][number]]
            row = {key: values[number] for key, values in columns.items()}
            row |= {"set": of["name"], "run": index["runs"][of["run"]], "task": index["tasks"][row["task"]]}
            if wanted.items() <= row.items():
                place, inside = divmod(number, index["piece"])
                tokens = self.piece(f"tokens-{place}")[inside] if index["has_tokens"][number] else None
                return row | {"number": number}, self.piece(f"episodes-{place}")[inside], tokens
        raise AssertionError(f"no episode has {wanted}")


def page_of(*runs):
    """The page of these runs."""
    return Page(write_report(*runs).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def make():
    """Builders of run folders and readers of pages, by name."""
    return SimpleNamespace(
        HOSTILE=HOSTILE, trajectory=trajectory, put=put, put_rows=put_rows, put_json=put_json, evaluate=evaluate,
        manifest=manifest, whole_run=whole_run, online_run=online_run, spoil=spoil, page_of=page_of, Page=Page,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A whole run."""
    return whole_run(tmp_path / "run")


CHROMIUM = os.environ.get("PERTURN_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = """
    --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync
""".split()  # noqa: SIM905  a line a flag would be as long


@pytest.fixture(scope="module")
def chromium():
    """A real browser; its profile is a fresh one each time.

    It is closed behind each file, since its event loop would be in the way of tests with their own.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium, or set PERTURN_CHROMIUM")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visit(chromium):
    """Opens a file at a hash and gives the tab, which must have no error and fetch nothing but the file."""

    @contextmanager
    def opened(file, hash="", *, width=1440, height=900, theme="light", **context):
        with_context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, **context
        )
        tab = with_context.new_page()
        said, fetched = [], []
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: fetched.append(request.url.partition("#")[0]))
        tab.goto(f"file://{file}{hash}")
        tab.wait_for_selector("html[data-ready]", state="attached")
        yield tab
        tab.wait_for_timeout(50)
        with_context.close()
        assert said == []
        assert set(fetched) == {f"file://{file}"}

    return opened
