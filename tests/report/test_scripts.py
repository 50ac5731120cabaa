"""The page's scripts are sound before a browser sees them."""

import shutil
import subprocess

import pytest

from perturn.report.report_page import ASSETS, CODE, script


@pytest.fixture
def node():
    """Path of node."""
    return shutil.which("node") or pytest.skip("node is not installed")


@pytest.fixture
def printed(node):
    """Runs some scripts of the page and then a text; gives the printed lines."""

    def run(names, text, before=""):
        code = "\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in names.split())
        done = subprocess.run([node, "-e", before + code + text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_the_joined_script_parses(node, tmp_path):
    """All files share one scope, so a name that two of them declare is an error here."""
    (tmp_path / "page.js").write_text(script(CODE), encoding="utf-8")

    checked = subprocess.run([node, "--check", tmp_path / "page.js"], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("]
)
def test_no_script_parses_markup_or_fetches(word):
    """Text enters the page as text nodes alone."""
    assert [file.name for file in ASSETS.glob("*.js") if word in file.read_text(encoding="utf-8")] == []


SORTED = """
const cell = (text, value) => ({ textContent: text, dataset: value === undefined ? {} : { value } });
const row = (name, ...at) => ({ name, cells: [cell(...at)] });
const heads = [{ attributes: {}, textContent: "kl",
  getAttribute(name) { return this.attributes[name] ?? null; },
  setAttribute(name, value) { this.attributes[name] = value; },
  removeAttribute(name) { delete this.attributes[name]; } }];
const rows = [row("none", "–", ""), row("high", "2", "2"), row("low", "-1", "-1"), row("dash", "–")];
const body = { rows, append(...sorted) { console.log(sorted.map((each) => each.name).join(" ")); } };
const table = { querySelectorAll: () => heads, tBodies: [body] };
const announce = () => {};
sortTable(table, 0);
sortTable(table, 0);
"""


def test_missing_values_are_last_in_both_directions(printed):
    """An empty value and a dash; a negative number is below zero, and neither of them is zero."""
    assert printed("tables", SORTED) == ["high low none dash", "low high none dash"]


CATALOGUE = """
catalogue = { runs: ["r"], sets: [{ run: 0, name: "s", label: "s", samples: { 1: 8 } }], tasks: ["a", "b", "c"],
  kinds: ["k"], signals: [], pairs: [[0, 0, 1]], size: 5, piece: 48,
  columns: { set: [0, 0, 0, 0, 0], task: [0, 0, 1, 1, 2], kind: [0, 0, 0, 0, 0], score: [0.75, 0.25, 1, 0, null],
    turns: [1, 1, 1, 1, 1] } };
"""


def test_groups_that_are_shown_in_part_say_so_and_come_last(printed):
    """Two of eight samples of task b are shown, with the widest spread of scores."""
    told = CATALOGUE + 'for (const row of groupRows("")) console.log(taskOf(row.number), sizeOf(row));'

    assert printed("core data group", told) == ["a 2 samples", "b 2 of 8 samples shown"]


def test_a_score_in_a_range_is_the_score_of_one_episode(printed):
    """The pair 0.75 and 0.25 has no score from 0.4 to 0.6; an unknown score is in no range."""
    told = """
    for (const row of [["pairs", 0.4, 0.6], ["pairs", 0.2, 0.3], ["", -1, 0.3]]) {
      const [mode, low, high] = row.map(String);
      console.log(rowsOf({ mode, low, high }).map(({ number }) => number).join(" "));
    }
    """

    assert printed("core data group", CATALOGUE + told) == ["", "0", "1 3"]


def test_a_search_in_conversations_reads_texts_and_no_names_of_fields(printed):
    told = r"""
    const call = ['{"city": "Bern"}'];
    const turns = [{ o: "a pan", a: "take", bad: 1 }, { h: "cut it", a: 'say "hi"' }, { o: "x", call, r: 1 }];
    bodyOf = async (number) => ({ turns: [turns[number]] });
    catalogue = { piece: 48 };
    const rows = [0, 1, 2].map((number) => ({ number, other: null }));
    (async () => {
      for (const q of ["bad", "cut", 'say "hi"', "call", "bern"]) {
        console.log(q, ...(await searchedRows(rows, wordsOf(q), () => true)).map((row) => row.number));
      }
    })();
    """

    assert printed("core data", told) == ["bad", "cut 1", 'say "hi" 1', "call", "bern 2"]


def test_the_list_comes_back_at_the_shown_episode(printed):
    """Another list opens at its start. The link to the list has the filters of the moment of the click."""
    told = """
    globalThis.document = { body: { dataset: {} } };
    globalThis.location = {};
    catalogue = { compare: [], sets: [] };
    loadCatalogue = fillForm = completeSides = () => {};
    const rows = [4, 7, 9].map((number) => ({ number, other: null }));
    const list = { reveal: (index) => console.log("row", index) };
    const filters = Object.fromEntries(FILTERS.map((name) => [name, ""]));
    browser = { filters, number: 9, other: null, isGroup: false, rows: [], list };
    applyFilters = async () => { browser.rows = rows; };
    openBrowser("episodes", {}).then(async () => {
      await openBrowser("episodes", { sort: "turns" });
      document.body.dataset.open = "episode";
      browser.filters = { ...browser.filters, q: "new" };
      leaveEpisode();
      console.log(location.hash);
    });
    """

    assert printed("core route data browser", told) == ["row 2", "#episodes?q=new&sort=turns"]


FIGURES = """
globalThis.window = { matchMedia: () => ({}) };
globalThis.document = { documentElement: { dataset: {} } };
var embedded = () => ({ layout: {}, data: [], light: null });
"""
PLOTLY = """
const fit = (place) => {
  if (place.clientWidth) place._fullLayout = { width: place.clientWidth };
  console.log("fit", place.name, place.clientWidth);
};
const react = async (place) => {
  place._fullLayout ??= { width: place.clientWidth };
  console.log("draw", place.name, place.clientWidth);
};
window.Plotly = { react, Plots: { resize: async (place) => { await null; fit(place); } } };
plotly = async () => window.Plotly;
const [one, other] = ["one", "other"].map((name) => ({ name, clientWidth: 700, dataset: {} }));
"""


def test_figures_fit_a_window_that_changed_while_they_were_hidden(printed):
    """One was drawn at 700 pixels; the other was asked for while the report was hidden, and is drawn later."""
    told = """
    (async () => {
      await draw(one);
      one.clientWidth = other.clientWidth = 0;
      await draw(other);
      one.clientWidth = other.clientWidth = 400;
      await fitFigures();
      await fitFigures();
    })();
    """

    said = printed("figures", PLOTLY + told, FIGURES)
    assert said == ["draw one 700", "fit one 400", "draw other 400"]


def test_figures_fit_by_their_own_width(printed):
    """Plotly's width of the figure changed, then the reader left during a fit. Plotly does not round its width."""
    told = """
    (async () => {
      await draw(one);
      one._fullLayout.width = 500;
      await fitFigures();
      one.clientWidth = 400;
      const left = fitFigures();
      one.clientWidth = 0;
      await left;
      one.clientWidth = 400;
      await fitFigures();
      one._fullLayout.width = 399.656;
      await fitFigures();
    })();
    """

    said = printed("figures", PLOTLY + told, FIGURES)
    assert said == ["draw one 700", "fit one 700", "fit one 0", "fit one 400"]


def test_a_cell_of_a_group_shows_a_thought_without_an_action(printed):
    told = """
    globalThis.hashOfEpisode = () => "#";
    const made = () => ({ texts: [], setAttribute() {}, style: { setProperty() {} },
      append(...more) { this.texts.push(...more.map((each) => each.texts?.join("") ?? each)); } });
    globalThis.document = { createElement: made };
    for (const said of [{ h: "hm", a: "go" }, { h: "hm" }, {}]) {
      console.log(groupCell(0, { turns: [said] }, 0, { weight: 1 }).texts[0]);
    }
    """

    assert printed("core data group", told) == ["go", "hm", "(empty)"]


def test_every_script_is_in_the_page():
    assert all(file.read_text(encoding="utf-8") in script(CODE) for file in ASSETS.glob("*.js"))
