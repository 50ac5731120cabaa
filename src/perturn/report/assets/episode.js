// One episode as a conversation: what was said on the left, what each turn carries in one margin on the right.

const DEEPEST = 6; // of the sequences of an episode that are drawn further to the right
const LINES = 16; // of an observation that are shown before a reader asks for more

/** The numbers a turn carries, in the order of the margin: [name, value, lowest, highest]. */
function barsOf(body, turn, scale) {
  const bars = [];
  const add = (name, found, low, high) => {
    if (found !== null && found !== undefined) bars.push({ name, value: found, low, high });
  };
  add("confidence", body.confidence?.[turn], 0, 1);
  add("weight", body.weight?.[turn], scale.lightest < 0 ? -scale.weight : 0, scale.weight);
  const reward = body.turns[turn].r ?? 0;
  if (scale.reward) add("reward", reward, scale.least < 0 ? -scale.reward : 0, scale.reward);
  return bars;
}

/** What the bars of these episodes are drawn against, so that those side by side compare. */
function scaleOf(...bodies) {
  const all = (key) => bodies.flatMap((body) => body[key] ?? []).filter((found) => found !== null);
  const rewards = bodies.flatMap((body) => body.turns.map((turn) => turn.r ?? 0));
  const most = (values) => values.reduce((high, found) => Math.max(high, Math.abs(found)), 0);
  return {
    weight: Math.max(most(all("weight")), 1e-9),
    lightest: Math.min(0, ...all("weight")),
    reward: most(rewards),
    least: Math.min(0, ...rewards),
  };
}

function bar({ name, value: found, low, high }) {
  const zero = (0 - low) / (high - low);
  const end = Math.min(1, Math.max(0, (found - low) / (high - low)));
  const fill = element("span", { class: "fill" });
  fill.style.left = `${100 * Math.min(zero, end)}%`;
  fill.style.width = `${100 * Math.abs(end - zero)}%`;
  const digits = name === "weight" ? 2 : 3;
  return element(
    "div",
    { class: `bar ${name}${found < 0 ? " below" : ""}` },
    element("dt", {}, name),
    element("dd", {}, element("span", { class: "track", "aria-hidden": "true" }, fill), element("b", {}, show(found, digits).replace("-", "−"))),
  );
}

/** One kind of speech; a long one opens on demand. */
function speech(kind, text) {
  const words = element("div", { class: "text" }, text);
  const box = element("div", { class: `say ${kind}` }, element("span", { class: "label" }, kind), words);
  if (kind === "observation" && (text.split("\n").length > LINES || text.length > 1600)) {
    words.classList.add("clipped");
    const more = element("button", { type: "button", class: "quiet", "aria-expanded": "false", click: () => {
      const isClosed = words.classList.toggle("clipped");
      more.textContent = isClosed ? "show all of it" : "show less";
      more.setAttribute("aria-expanded", String(!isClosed));
    } }, "show all of it");
    box.append(more);
  }
  return box;
}

/**
 * One turn.
 * options: number, turn, body, scale, link (hash of the turn), id, differs (text to mark, see `align.js`), run (of `sequencesOf`)
 */
function turnCard({ number, turn, body, scale, link, id, differs = null, run = null }) {
  const said = body.turns[turn];
  const action = speech("action", said.a ?? "");
  if (differs !== null) markDifference(action.querySelector(".text"), differs);
  for (const call of said.call ?? []) action.append(element("div", { class: "text call" }, call));
  const talk = element(
    "div",
    { class: "talk" },
    element(
      "div",
      { class: "who" },
      element("a", { class: "anchor", href: link, "aria-label": `Link to turn ${turn + 1}` }, `turn ${turn + 1}`),
      said.bad ? element("span", { class: "chip bad" }, "invalid") : null,
      said.cut ? element("span", { class: "chip bad" }, "cut at the token limit") : null,
      run && run.first === turn && turn ? element("span", { class: "chip" }, placeOf(run)) : null,
    ),
    run && run.first === turn && body.openings[turn] !== undefined ? promptBox(body, body.openings[turn]) : null,
    said.o ? speech("observation", said.o) : null,
    said.h ? speech("thought", said.h) : null,
    said.a || said.call ? action : element("div", { class: "say action" }, element("span", { class: "label" }, "action"), element("em", { class: "soft" }, "empty")),
  );
  if (catalogue.has_tokens[number]) talk.append(tokenButton(number, turn));
  const weights = (body.weight ?? []).filter((found) => found !== null);
  const isHigh = new Set(weights).size > 1 && body.weight[turn] === Math.max(...weights);
  const card = element(
    "article",
    { class: `turn${isHigh ? " high" : ""}${said.bad ? " invalid" : ""}`, id, tabindex: "-1", "aria-label": `Turn ${turn + 1}` },
    talk,
    element("dl", { class: "margin" }, ...barsOf(body, turn, scale).map(bar)),
  );
  if (run) card.style.marginLeft = `${Math.min(run.depth, DEEPEST) * 1.2}rem`;
  return card;
}

/** Runs of turns that extend each other, in the order of the episode: {first, last, follows, parent, depth}; of an episode that is one, none. */
function sequencesOf(body) {
  const runs = [];
  const home = [];
  (body.follows ?? []).forEach((before, turn) => {
    if (turn && before === turn - 1) runs.at(-1).last = turn;
    else {
      const parent = before < 0 ? null : home[before];
      runs.push({ first: turn, last: turn, follows: before, parent, depth: parent ? parent.depth + 1 : 0 });
    }
    home[turn] = runs.at(-1);
  });
  return runs;
}

function placeOf(run) {
  return run.follows < 0 ? "opens another conversation" : `follows turn ${run.follows + 1}`;
}

/** The tree of an episode's sequences, each with a link to its first turn. */
function sequenceTree(number, runs) {
  if (runs.length < 2) return null;
  const branch = (parent) => {
    const below = runs.filter((run) => run.parent === parent);
    if (!below.length) return null;
    return element("ul", {}, ...below.map((run) => {
      const span = run.first === run.last ? `turn ${run.first + 1}` : `turns ${run.first + 1} to ${run.last + 1}`;
      const link = element("a", { href: hashOfEpisode(number, { turn: run.first + 1 }) }, span);
      return element("li", {}, link, element("span", { class: "soft" }, run.first ? ` ${placeOf(run)}` : ""), branch(run));
    }));
  };
  return element("nav", { class: "sequences", "aria-label": "Sequences of the episode" }, branch(null));
}

function tokenButton(number, turn) {
  const place = element("div");
  const button = element("button", { type: "button", class: "quiet", "aria-expanded": "false", click: async () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    place.replaceChildren(...(isOpen ? [] : [await tokenStrip(number, turn)]));
  } }, "tokens");
  return element("div", { class: "more" }, button, place);
}

/** Facts of an episode in one line, with its signals. */
function factsOf(number, body) {
  const end = value("end", number);
  const chips = signalsOf(number).map((name) =>
    element("span", { class: "chip", title: catalogue.signals.find((one) => one.name === name).meaning }, name));
  const parts = [
    labelOfSet(setOf(number)),
    value("sample", number) ? `sample ${value("sample", number)}` : null,
    plural(value("turns", number), "turn"),
    value("tokens", number) ? plural(value("tokens", number), "sampled token") : null,
    ENDS[end],
    body.policy,
  ].filter(Boolean);
  return element(
    "div",
    { class: "facts-line" },
    ...(value("score", number) === null ? [element("span", { class: "chip", title: "it comes from a file of rows" }, "no score")] : [
      element("span", { class: `score ${value("success", number) ? "good" : ""}` }, `score ${show(value("score", number), 2)}`),
      element("span", { class: `chip ${value("success", number) ? "good" : ""}` }, value("success", number) ? "success" : "no success"),
    ]),
    body.bin ? element("span", { class: "chip", title: "where the credit's account of all episodes has it" }, body.bin.replace("_", " ")) : null,
    ...chips,
    element("span", { class: "soft" }, parts.join(" · ")),
  );
}

const MEANINGS = {
  confidence: (body) => `confidence: geometric mean of the token probabilities, ${body.by === "reference" ? "under the reference" : "under the policy that acted"}`,
  weight: (body) => (body.credit ? `weight: what the credit ${body.credit} gave the turn` : "weight: what the loss gives the turn"),
  reward: () => "reward: of the environment, for this action",
};

/** What the bars mean, for those that are there. */
function legend(body, scale) {
  const names = new Set(body.turns.flatMap((_, turn) => barsOf(body, turn, scale).map((one) => one.name)));
  if (!names.size) return null;
  return element(
    "ul",
    { class: "legend" },
    ...[...names].map((name) => element("li", { class: name }, MEANINGS[name](body))),
  );
}

/** A prompt of an episode. The index holds prompts of several episodes; the episode holds its own. */
function promptBox(body, number = body.prompt) {
  const messages = body.prompts?.[number] ?? catalogue.prompts[number] ?? [];
  if (!messages.length) return null;
  return element(
    "details",
    { class: "prompt" },
    element("summary", {}, `prompt (${plural(messages.length, "message")})`),
    ...messages.map(([role, text]) => element("div", { class: "say" }, element("span", { class: "label" }, role), element("div", { class: "text" }, text))),
  );
}

/** The whole conversation. */
async function conversation(number) {
  const body = await bodyOf(number);
  const scale = scaleOf(body);
  const runs = sequencesOf(body);
  const cards = body.turns.map((_, turn) => {
    const run = runs.find((one) => one.first <= turn && turn <= one.last) ?? null;
    return turnCard({ number, turn, body, scale, run, id: `turn-${turn + 1}`, link: hashOfEpisode(number, { turn: turn + 1 }) });
  });
  return element(
    "div",
    { class: "conversation" },
    factsOf(number, body),
    body.error ? element("p", { class: "error" }, body.error) : null,
    promptBox(body),
    legend(body, scale),
    sequenceTree(number, runs),
    ...cards,
    body.turns.length ? null : element("p", { class: "soft" }, "This episode has no turn."),
  );
}
