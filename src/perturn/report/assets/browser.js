// The browser of episodes: filters, the list, and the episode that is open.

let browser = null;

/** Show the list under filters, or an episode. */
async function openBrowser(view, params) {
  await loadCatalogue();
  browser ??= buildBrowser();
  const isEpisode = view !== "episodes";
  document.body.dataset.open = isEpisode ? "episode" : "list";
  const before = browser.filters && hashOfList();
  if (!isEpisode || !browser.filters) {
    const given = { episode: {}, group: { mode: "groups" } }[view] ?? params;
    browser.filters = Object.fromEntries(FILTERS.map((name) => [name, given[name] ?? ""]));
    completeSides(browser.filters);
    fillForm(browser.form, browser.filters);
    await applyFilters();
  }
  if (!isEpisode && hashOfList() === before) {
    const shown = browser.rows.findIndex(isShown);
    if (shown >= 0) browser.list.reveal(shown); // on a narrow screen, the list comes back where the reader left it
  }
  if (view === "group") await openGroup(groupNamed(params));
  else if (isEpisode) await openEpisode(episodeNamed(params), episodeNamed(params, "2"), params.turn ?? null);
  else if (browser.number === null) browser.detail.replaceChildren(hint());
}

/** Which sets are side by side, if the link does not say. */
function completeSides(filters) {
  const keys = catalogue.sets.map(setKey);
  const [a, b] = catalogue.compare[0] ?? [keys[1] ?? keys[0], keys[0]];
  if (!keys.includes(filters.a)) filters.a = a;
  if (!keys.includes(filters.b)) filters.b = b;
}

function buildBrowser() {
  const form = buildForm();
  const place = element("div", { class: "list", tabindex: "0", "aria-label": "Episodes; arrow keys move", role: "region" });
  const detail = element("section", { class: "detail", "aria-label": "Episode", tabindex: "-1" });
  const found = element("p", { class: "found soft", role: "status" });
  byId("browser").append(
    element("h1", { class: "hidden" }, "Episodes"),
    element("section", { class: "side", "aria-label": "List of episodes" }, form, found, place),
    detail,
  );
  const made = { form, detail, found, filters: null, number: null, other: null, isGroup: false, rows: [], search: 0 };
  made.list = new LongList(place, (row) => listRow(row));
  form.addEventListener("input", () => changeFilters(readForm(form)));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    location.hash = "#episodes";
  });
  byId("browser").addEventListener("keydown", onKey);
  return made;
}

function hint() {
  return element("div", { class: "hint soft" }, element("p", {}, "Choose an episode."),
    element("p", {}, "Keys: arrows in the list; n and p for the next and the previous episode, j and k for turns, Escape for the list."));
}

const select = (name, label, options) =>
  element("label", { class: `field ${name}` }, element("span", {}, label),
    element("select", { name }, ...options.map(([key, text]) => element("option", { value: key }, text))));

const input = (name, label, attributes) =>
  element("label", { class: `field ${name}` }, element("span", {}, label), element("input", { name, ...attributes }));

function buildForm() {
  const sets = catalogue.sets.map((set) => [setKey(set), labelOfSet(set) + (set.part ? ` (${set.part})` : "")]);
  const kinds = catalogue.kinds.map((kind) => [kind, kind || "(no kind)"]);
  const orders = [["", "as recorded"], ["-score", "highest score"], ["score", "lowest score"], ["-difference", "largest gain"], ["difference", "largest loss"],
    ["-turns", "most turns"], ["turns", "fewest turns"], ["-invalid", "most invalid actions"], ["-tokens", "most tokens"], ["task", "task"]];
  const modes = [["", "one by one"], ...(catalogue.pairs.length ? [["pairs", "preference pairs"]] : []), ...(sets.length > 1 ? [["compare", "side by side"]] : []), ...(groupRows("").length ? [["groups", "groups"]] : [])];
  return element(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter episodes" },
    input("q", "Search", { type: "search", placeholder: "task, kind, set", autocomplete: "off", spellcheck: "false" }),
    element("label", { class: "field deep check" }, element("input", { name: "deep", type: "checkbox", value: "1" }), element("span", {}, "in the conversations")),
    select("mode", "Show", modes),
    select("set", "Set", [["", "all sets"], ...sets]),
    select("a", "Left", sets),
    select("b", "Right", sets),
    element("details", { class: "further" },
      element("summary", {}, "Filters and order"),
      element("div", { class: "fields" },
        select("kind", "Kind of task", [["", "all"], ...kinds]),
        select("outcome", "Outcome", [["", "all"], ["success", "success"], ["no-success", "no success"], ["limit", "ended by a limit"], ["failed", "FAILED"], ["goes-on", "goes on"]]),
        select("signal", "Signal", [["", "all"], ...catalogue.signals.map(({ name }) => [name, name])]),
        select("sort", "Order", orders),
        catalogue.runs.length > 1 ? select("run", "Run", [["", "all"], ...catalogue.runs.map((name) => [name, name])]) : element("input", { type: "hidden", name: "run" }),
        input("low", "Score from", { type: "number", step: "any" }),
        input("high", "to", { type: "number", step: "any" }),
        element("button", { type: "reset", class: "quiet" }, "clear")),
    ),
  );
}

function fillForm(form, filters) {
  for (const name of FILTERS) {
    const field = form.elements[name];
    if (field.type === "checkbox") field.checked = filters[name] === "1";
    else field.value = filters[name];
  }
  const further = ["kind", "outcome", "signal", "low", "high", "sort"].some((name) => filters[name]);
  form.querySelector(".further").open ||= further;
  form.dataset.mode = filters.mode || "one";
}

const readForm = (form) => Object.fromEntries(
  FILTERS.map((name) => [name, form.elements[name].type === "checkbox" ? (form.elements[name].checked ? "1" : "") : form.elements[name].value]));

/** The hash of the list under the filters of this moment. */
function hashOfList() {
  return hashOf("episodes", browser.filters.mode === "compare" ? browser.filters : { ...browser.filters, a: "", b: "" });
}

/** The filters go into the hash, without a step of the history for each letter. */
async function changeFilters(filters) {
  browser.filters = filters;
  browser.form.dataset.mode = filters.mode || "one";
  if (document.body.dataset.open === "list") history.replaceState(null, "", hashOfList());
  await applyFilters();
}

async function applyFilters() {
  const search = (browser.search += 1);
  const rows = rowsOf(browser.filters);
  const words = wordsOf(browser.filters.q);
  const noun = { "": "episode", groups: "group" }[browser.filters.mode] ?? "pair";
  const whole = rowsOfMode({ ...browser.filters, set: "" }).length;
  const say = (found) => {
    browser.found.textContent = found.length === whole ? plural(whole, noun) : `${count(found.length)} of ${plural(whole, noun)}`;
    browser.rows = found;
    browser.list.set(found);
  };
  if (!browser.filters.deep || !words.length) return say(rows);
  const found = await searchedRows(rows, words, (done, all) => {
    if (search === browser.search) browser.found.textContent = `searching: ${count(done)} of ${count(all)}`;
    return search === browser.search;
  });
  return found && search === browser.search ? say(found) : null;
}

function listRow(row) {
  const { number, other } = row;
  const isOpen = isShown(row);
  if (row.group) return listedGroup(row, isOpen);
  const labels = other === null ? [labelOfSet(setOf(number))] : [setOf(number).label, setOf(other).label].map((text) => text.replace(/, evaluated$/, ""));
  const numbers = other === null
    ? element("span", { class: "figure" }, show(value("score", number), 2))
    : element("span", { class: "figure" }, `${show(value("score", number), 2)} → ${show(value("score", other), 2)}`);
  const chips = numbersOf(row).flatMap(signalsOf).filter((name, place, all) => all.indexOf(name) === place);
  const isGood = value("success", other ?? number) === 1;
  return element(
    "a",
    { class: `row${isOpen ? " open" : ""}`, href: hashOfEpisode(number, { other }), "aria-current": isOpen ? "true" : null },
    element("span", { class: `dot ${isGood ? "good" : "none"}`, "aria-hidden": "true" }),
    element("span", { class: "name" }, taskOf(number), value("sample", number) ? ` #${value("sample", number)}` : ""),
    numbers,
    element("span", { class: "about" }, [labels.join(" → "), other === null ? plural(value("turns", number), "turn") : signed(row.difference, 2), ...chips].join(" · ")),
    element("span", { class: "hidden" }, isGood ? "success" : "no success"),
  );
}

/** A group in the list: how many of its samples succeeded. */
function listedGroup(row, isOpen) {
  const { number, group } = row;
  const good = group.filter((one) => value("success", one) === 1).length;
  return element(
    "a",
    { class: `row${isOpen ? " open" : ""}`, href: hashOfGroup(number), "aria-current": isOpen ? "true" : null },
    element("span", { class: `dot ${good ? "good" : "none"}`, "aria-hidden": "true" }),
    element("span", { class: "name" }, taskOf(number)),
    element("span", { class: "figure" }, `${good} of ${group.length}`),
    element("span", { class: "about" }, [labelOfSet(setOf(number)), sizeOf(row)].join(" · ")),
    element("span", { class: "hidden" }, "succeeded"),
  );
}

const isShown = (row) => row.number === browser.number && row.other === browser.other && Boolean(row.group) === browser.isGroup;

async function openGroup(row) {
  Object.assign(browser, { number: row?.number ?? null, other: null, isGroup: true });
  if (row === null) {
    browser.detail.replaceChildren(element("p", { class: "error" }, "This report holds no such group. The link may belong to another report."));
    return;
  }
  const view = await groupView(row);
  if (!isShown(row)) return; // the reader went on meanwhile
  browser.detail.replaceChildren(episodeHead(row.number, null), view);
  browser.detail.scrollTop = 0;
  browser.list.draw();
  announce(`Group of task ${taskOf(row.number)} opened.`);
  browser.detail.querySelector("h2").focus({ preventScroll: true });
}

async function openEpisode(number, other, turn) {
  const isNew = number !== browser.number || other !== browser.other || browser.isGroup;
  Object.assign(browser, { number, other, isGroup: false });
  if (number === null) {
    browser.detail.replaceChildren(element("p", { class: "error" }, "This report holds no such episode. The link may belong to another report."));
    return;
  }
  if (isNew) {
    const view = other === null ? await conversation(number) : await comparison(number, other);
    if (browser.number !== number || browser.other !== other || browser.isGroup) return; // the reader went on meanwhile
    browser.detail.replaceChildren(episodeHead(number, other), view);
    browser.detail.scrollTop = 0;
    browser.list.draw();
    announce(`Episode of task ${taskOf(number)} opened.`);
  }
  document.querySelectorAll(".turn.target").forEach((card) => card.classList.remove("target"));
  const card = turn === null ? null : targetTurn(turn);
  card?.classList.add("target");
  card?.scrollIntoView({ block: "start" });
  (card ?? browser.detail.querySelector("h2")).focus({ preventScroll: true });
}

/** The card of a turn; one that both sides share is opened first. */
function targetTurn(turn) {
  const shared = browser.detail.querySelector("details.shared");
  if (shared && !byId(`turn-${Number(turn)}`)) {
    shared.open = true;
    shared.dispatchEvent(new Event("toggle"));
  }
  return byId(`turn-${Number(turn)}`);
}

function episodeHead(number, other) {
  const others = catalogue.byTask.get(value("task", number)).filter((one) => one !== number);
  const options = others.map((one) => element("option", { value: one }, `${labelOfSet(setOf(one))}${value("sample", one) ? ` #${value("sample", one)}` : ""}, score ${show(value("score", one), 2)}`));
  const choice = element("select", { change: () => {
    location.hash = hashOfEpisode(number, { other: choice.value === "" ? null : Number(choice.value) });
  } }, element("option", { value: "" }, "nothing"), ...options);
  choice.value = other === null ? "" : String(other);
  return element(
    "div",
    { class: "episode-head" },
    element("div", { class: "buttons" },
      element("a", { class: "back button", href: hashOfList(), click: ({ currentTarget }) => currentTarget.setAttribute("href", hashOfList()) }, "← list"),
      element("button", { type: "button", class: "quiet", click: () => step(-1) }, "previous"),
      element("button", { type: "button", class: "quiet", click: () => step(1) }, "next"),
      element("button", { type: "button", class: "quiet", click: copyLink }, "copy link"),
      others.length ? element("label", { class: "beside" }, element("span", {}, "beside "), choice) : null),
    element("h2", { tabindex: "-1" }, taskOf(number), element("small", {}, kindOf(number))),
  );
}

async function copyLink(event) {
  try {
    await navigator.clipboard.writeText(location.href);
    event.target.textContent = "copied";
    announce("Link copied.");
  } catch {
    event.target.textContent = "copy it from the address bar";
  }
}

/** Go on by some rows of the list. */
function step(by) {
  const place = browser.rows.findIndex(isShown);
  const row = browser.rows[Math.min(browser.rows.length - 1, Math.max(0, place + by))];
  if (!row) return;
  browser.list.reveal(browser.rows.indexOf(row));
  location.hash = row.group ? hashOfGroup(row.number) : hashOfEpisode(row.number, { other: row.other });
}

function onKey(event) {
  const isTyping = event.target.matches("input, select, textarea");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { n: () => step(1), p: () => step(-1), j: () => nextTurn(1), k: () => nextTurn(-1), Escape: leaveEpisode };
  if (keys[event.key]) keys[event.key]();
}

function leaveEpisode() {
  if (document.body.dataset.open !== "episode") return;
  location.hash = hashOfList();
}

function nextTurn(by) {
  const cards = [...browser.detail.querySelectorAll(".turn[id]")];
  if (!cards.length) return;
  const now = cards.indexOf(document.activeElement?.closest?.(".turn[id]"));
  const card = cards[Math.min(cards.length - 1, Math.max(0, now + by))];
  card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "start" });
}
