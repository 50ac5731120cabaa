// Two episodes side by side: what they share at the start, where they part, and what follows.

const sameTurn = (one, other) =>
  ["o", "h", "a"].every((key) => (one[key] ?? "") === (other[key] ?? "")) &&
  JSON.stringify(one.call ?? []) === JSON.stringify(other.call ?? []);

/** Turns with which both begin. */
function sharedTurns(left, right) {
  const most = Math.min(left.turns.length, right.turns.length);
  let shared = 0;
  while (shared < most && sameTurn(left.turns[shared], right.turns[shared])) shared += 1;
  return shared;
}

/** In words, how two turns differ, or which of the two has ended. */
function divergence(left, right, shared) {
  const [one, other] = [left.turns[shared], right.turns[shared]];
  if (!one && !other) return "The two are the same, turn by turn.";
  const where = `First divergence, turn ${shared + 1}`;
  if (!one || !other) return `${where}: the ${one ? "right" : "left"} one has ended.`;
  if ((one.o ?? "") !== (other.o ?? "")) return `${where}: another observation.`;
  const sameAction = (one.a ?? "") === (other.a ?? "") && JSON.stringify(one.call ?? []) === JSON.stringify(other.call ?? []);
  return sameAction ? `${where}: another thought, the same action.` : `${where}: the same observation, another action.`;
}

/** Number of letters with which both texts begin, back at the start of a word. */
function commonStart(one, other) {
  let length = 0;
  while (length < Math.min(one.length, other.length) && one[length] === other[length]) length += 1;
  return length === one.length && length === other.length ? length : one.slice(0, length).search(/\S*$/);
}

/** Mark all of a text after the letters it shares with the other. */
function markDifference(place, other) {
  const text = place.textContent;
  const start = commonStart(text, other);
  if (start < text.length) place.replaceChildren(text.slice(0, start), element("mark", {}, text.slice(start)));
}

async function comparison(number, other) {
  const [left, right] = await Promise.all([bodyOf(number), bodyOf(other)]);
  const scale = scaleOf(left, right);
  const shared = sharedTurns(left, right);
  const side = (episode, body, name) => (turn, differs = null) => turnCard({
    number: episode, turn, body, scale, differs,
    id: name === "left" ? `turn-${turn + 1}` : null,
    link: hashOfEpisode(number, { other, turn: turn + 1 }),
  });
  const [drawLeft, drawRight] = [side(number, left, "left"), side(other, right, "right")];
  const isPair = catalogue.pairs.some(([, chosen, rejected]) => chosen === number && rejected === other);
  const heads = [[number, left], [other, right]].map(([episode, body], index) =>
    element("div", { class: `head ${index ? "right" : "left"}` },
      element("h3", {}, isPair ? ["chosen", "rejected"][index] : labelOfSet(setOf(episode))), factsOf(episode, body),
      body.error ? element("p", { class: "error" }, body.error) : null));
  const rows = [];
  for (let turn = shared; turn < Math.max(left.turns.length, right.turns.length); turn += 1) {
    rows.push(pairRow(turn, left, right, turn === shared, drawLeft, drawRight));
  }
  return element(
    "div",
    { class: "comparison" },
    element("div", { class: "two heads" }, ...heads),
    promptBox(left),
    legend(left, scale) ?? legend(right, scale),
    shared ? sharedBox(shared, drawLeft) : null,
    element("p", { class: "divergence", id: "divergence", tabindex: "-1" }, divergence(left, right, shared)),
    ...rows,
  );
}

function sharedBox(shared, drawLeft) {
  const box = element("details", { class: "shared" }, element("summary", {}, `${plural(shared, "turn")} in common, with the numbers of the left one`));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) {
      box.append(...Array.from({ length: shared }, (_, turn) => drawLeft(turn)));
    }
  });
  return box;
}

/** One turn of both; an observation that they share where they part is shown once. */
function pairRow(turn, left, right, isFirst, drawLeft, drawRight) {
  const ended = () => element("div", { class: "turn ended soft" }, "ended");
  const [one, other] = [left.turns[turn], right.turns[turn]];
  const mark = isFirst && one && other;
  const row = element(
    "div",
    { class: `two${isFirst ? " first" : ""}` },
    element("div", { class: "left" }, one ? drawLeft(turn, mark ? other.a ?? "" : null) : ended()),
    element("div", { class: "right" }, other ? drawRight(turn, mark ? one.a ?? "" : null) : ended()),
  );
  if (!mark || !one.o || one.o !== other.o) return row;
  row.querySelectorAll(".observation").forEach((box) => box.remove());
  return element("div", {}, element("div", { class: "same" }, speech("observation", one.o)), row);
}
