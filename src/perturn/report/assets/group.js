// A group: the samples of one task in one set, side by side, turn by turn, each cell marked by its weight.

/**
 * The tasks of a set, or of all sets, with several shown samples: groups that are shown whole come first, and of these
 * the widest spread of scores.
 */
function groupRows(set) {
  const found = new Map();
  for (let number = 0; number < catalogue.size; number += 1) {
    if (set && setKey(setOf(number)) !== set) continue;
    const key = `${value("set", number)}\n${value("task", number)}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(number);
  }
  const rows = [...found.values()].filter((group) => group.length > 1).map(groupRow);
  return rows.sort((one, other) => isCut(one) - isCut(other) || other.difference - one.difference);
}

/** How many samples a group has, including samples that the page does not show. */
const samplesOf = ({ number, group }) => setOf(number).samples?.[value("task", number)] ?? group.length;
const isCut = (row) => samplesOf(row) > row.group.length;
const sizeOf = (row) => (isCut(row) ? `${count(row.group.length)} of ${plural(samplesOf(row), "sample")} shown` : plural(row.group.length, "sample"));

/** A group as a row of the list: its samples, the best first. */
function groupRow(group) {
  const ranked = [...group].sort((one, other) => value("score", other) - value("score", one) || value("turns", one) - value("turns", other));
  return { number: ranked[0], other: null, group: ranked, difference: value("score", ranked[0]) - value("score", ranked.at(-1)) };
}

const hashOfGroup = (number) => hashOf("group", { run: runName(number), set: setOf(number).name, task: taskOf(number) });

/** The group that the parameters name, or null. */
const groupNamed = ({ run, set, task }) => groupRows(`${run}/${set}`).find(({ number }) => taskOf(number) === task) ?? null;

/** The whole group as a table: a column a sample, a row a turn. */
async function groupView(row) {
  const { group } = row;
  const bodies = await Promise.all(group.map(bodyOf));
  const scale = scaleOf(...bodies);
  const by = bodies.find((body) => body.credit)?.credit;
  const longest = Math.max(...bodies.map((body) => body.turns.length));
  const heads = group.map((number, index) => groupHead(number, bodies[index]));
  const rows = Array.from({ length: longest }, (_, turn) =>
    element("tr", {}, element("th", { scope: "row" }, turn + 1),
      ...group.map((number, index) => groupCell(number, bodies[index], turn, scale))));
  return element(
    "div",
    { class: "group" },
    promptBox(bodies[0]),
    bodies[0].turns[0]?.o ? speech("observation", bodies[0].turns[0].o) : null,
    isCut(row) ? element("p", { class: "soft" }, `${sizeOf(row)}.`) : null,
    bodies.some((body) => body.weight) ? element("p", { class: "soft" }, `The number under an action is the turn's weight${by ? ` by ${by}` : ""}: above 0 blue, below 0 red.`) : null,
    element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Samples side by side" },
      element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "turn"), ...heads)),
        element("tbody", {}, ...rows))),
  );
}

function groupHead(number, body) {
  const isGood = value("success", number) === 1;
  return element("th", { scope: "col" },
    element("a", { href: hashOfEpisode(number) }, `#${value("sample", number)}`),
    element("span", { class: `chip ${isGood ? "good" : ""}` }, isGood ? "success" : "no success"),
    element("small", {}, [`score ${show(value("score", number), 2)}`, plural(value("turns", number), "turn"), (body.bin ?? "").replace("_", " ")].filter(Boolean).join(" · ")));
}

function groupCell(number, body, turn, scale) {
  const said = body.turns[turn];
  if (!said) return element("td");
  const weight = body.weight?.[turn] ?? null;
  const cell = element("td", { class: `cell${weight < 0 ? " below" : ""}${said.bad ? " bad" : ""}` },
    element("a", { href: hashOfEpisode(number, { turn: turn + 1 }) }, [...(said.call ?? []), said.a].join("\n").trim() || said.h || "(empty)"),
    element("small", {}, [weight === null ? "" : show(weight, 2).replace("-", "−"), said.bad ? "invalid" : ""].filter(Boolean).join(" · ")));
  cell.style.setProperty("--share", weight === null ? 0 : Math.abs(weight) / scale.weight);
  return cell;
}
