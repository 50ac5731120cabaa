// Tokens with their log-probabilities, opened on demand.

/** The tokens of one turn, or a line that says why there are none. */
async function tokenStrip(number, turn) {
  const found = await tokensOf(number);
  const own = found?.turns[turn];
  if (!own) return element("p", { class: "soft" }, "The run folder holds no log-probabilities of this turn.");
  const texts = (await piece(`texts-${setOf(number).run}`)) ?? {};
  const source = found.by === "reference" ? "under the reference policy" : "under the policy that sampled them";
  const strip = element("div", { class: "tokens", role: "list", "aria-label": "Tokens" });
  own[0].forEach((id, place) => strip.append(tokenBox(texts[id] ?? `#${id}`, -own[1][place] / 1000)));
  const total = own[1].reduce((sum, part) => sum - part / 1000, 0);
  const mean = Math.exp(total / own[1].length);
  const line = `Log-probabilities ${source}, in nats: ${show(total, 2)} over ${plural(own[0].length, "token")}, confidence ${show(mean)}.`;
  return element("div", {}, strip, element("p", { class: "soft" }, line));
}

/** One token over its log-probability; the less likely, the stronger its ground. */
function tokenBox(text, logprob) {
  const shown = text.replace(/\n/g, "↵").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));
  const box = element(
    "span",
    { class: "token", role: "listitem" },
    element("span", { class: "piece" }, shown || "∅"),
    element("small", {}, logprob > -0.0005 ? "0" : show(logprob, logprob > -0.1 ? 3 : 2).replace("-", "−")),
  );
  box.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
  return box;
}
