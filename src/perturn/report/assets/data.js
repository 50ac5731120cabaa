// The index of all episodes: columns of numbers, filtered and sorted without opening an episode.

let catalogue = null;
const ENDS = ["stopped", "ended by the environment", "ended by a limit", "FAILED", "goes on in the next iteration"];

/** Decode the index, once. */
async function loadCatalogue() {
  if (catalogue) return catalogue;
  const index = await piece("index");
  const size = index.columns.task.length;
  catalogue = { ...index, size, byName: new Map(), byTask: new Map() };
  for (let number = 0; number < size; number += 1) {
    catalogue.byName.set([runName(number), setOf(number).name, taskOf(number), value("sample", number)].join("\n"), number);
    const task = value("task", number);
    if (!catalogue.byTask.has(task)) catalogue.byTask.set(task, []);
    catalogue.byTask.get(task).push(number);
  }
  return catalogue;
}

const value = (column, number) => catalogue.columns[column][number];
const setOf = (number) => catalogue.sets[value("set", number)];
const runName = (number) => catalogue.runs[setOf(number).run];
const taskOf = (number) => catalogue.tasks[value("task", number)];
const kindOf = (number) => catalogue.kinds[value("kind", number)];
const signalsOf = (number) =>
  catalogue.signals.filter((_, bit) => value("signals", number) & (1 << bit)).map((signal) => signal.name);
const setKey = (set) => `${catalogue.runs[set.run]}/${set.name}`;
const labelOfSet = (set) => (catalogue.runs.length > 1 ? `${catalogue.runs[set.run]}: ${set.label}` : set.label);

/** An episode's turns. */
async function bodyOf(number) {
  const part = await piece(`episodes-${Math.floor(number / catalogue.piece)}`);
  return part[number % catalogue.piece];
}

/** An episode's tokens, or null. */
async function tokensOf(number) {
  if (!catalogue.has_tokens[number]) return null;
  const part = await piece(`tokens-${Math.floor(number / catalogue.piece)}`);
  return part[number % catalogue.piece];
}

/** The rows of the list under the filters: {number, other, difference}, and of a group all its numbers. */
function rowsOf(filters) {
  const rows = rowsOfMode(filters).filter((row) => matches(row, filters));
  return sortRows(rows, filters.sort ?? "");
}

function rowsOfMode({ mode, a, b, set }) {
  if (mode === "pairs") {
    return catalogue.pairs.map(([, chosen, rejected]) => beside(chosen, rejected));
  }
  if (mode === "compare") return joined(a, b);
  if (mode === "groups") return groupRows(set);
  const numbers = Array.from({ length: catalogue.size }, (_, number) => number);
  return numbers
    .filter((number) => !set || setKey(setOf(number)) === set)
    .map((number) => ({ number, other: null, difference: 0 }));
}

const beside = (number, other) => ({ number, other, difference: value("score", other) - value("score", number) });

/** The episodes of two sets on the same task and sample; an episode whose sample the other lacks is left out. */
function joined(a, b) {
  const sides = [a, b].map((key) => {
    const found = new Map();
    for (let number = 0; number < catalogue.size; number += 1) {
      if (setKey(setOf(number)) === key) found.set(`${value("sample", number)}\n${taskOf(number)}`, number);
    }
    return found;
  });
  return [...sides[0]].filter(([key]) => sides[1].has(key)).map(([key, number]) => beside(number, sides[1].get(key)));
}

const isWithin = (score, low, high) => score !== null && (!low || score >= Number(low)) && (!high || score <= Number(high));

/** Whether a row passes; side by side and in a group, one episode must have the signal, one the outcome, one the score. */
function matches(row, { run, kind, outcome, signal, low, high, q, deep }) {
  const both = numbersOf(row);
  if (run && !both.some((number) => runName(number) === run)) return false;
  if (kind && kindOf(row.number) !== kind) return false;
  if (outcome && !both.some((number) => hasOutcome(number, outcome))) return false;
  if (signal && !both.some((number) => signalsOf(number).includes(signal))) return false;
  if ((low || high) && !both.some((number) => isWithin(value("score", number), low, high))) return false;
  const words = deep ? [] : wordsOf(q);
  const text = words.length ? `${taskOf(row.number)} ${kindOf(row.number)} ${setOf(row.number).label}`.toLowerCase() : "";
  return words.every((word) => text.includes(word));
}

const numbersOf = (row) => row.group ?? (row.other === null ? [row.number] : [row.number, row.other]);
const wordsOf = (q) => (q ?? "").toLowerCase().split(/\s+/).filter(Boolean);

/** The rows in whose conversations all words occur, found piece by piece; `tell` hears of each, and may stop it. */
async function searchedRows(rows, words, tell) {
  const found = new Set();
  const wanted = [...new Set(rows.flatMap(numbersOf))].sort((one, other) => one - other);
  for (const [place, number] of wanted.entries()) {
    const { turns } = await bodyOf(number);
    const text = turns.flatMap(({ o, h, a, call = [] }) => [o, h, a, ...call]).filter(Boolean).join("\n").toLowerCase();
    if (words.every((word) => text.includes(word))) found.add(number);
    const isLast = place === wanted.length - 1;
    if ((place % (8 * catalogue.piece) === 0 || isLast) && !tell(place + 1, wanted.length)) return null;
  }
  return rows.filter((row) => numbersOf(row).some((number) => found.has(number)));
}

function hasOutcome(number, outcome) {
  if (outcome === "success") return value("success", number) === 1;
  if (outcome === "no-success") return value("success", number) === 0 && value("end", number) !== 4;
  if (outcome === "goes-on") return value("end", number) === 4;
  if (outcome === "limit") return value("end", number) === 2;
  return value("end", number) === 3;
}

const ORDERS = {
  task: (row) => taskOf(row.number),
  score: (row) => value("score", row.number),
  difference: (row) => row.difference,
  turns: (row) => value("turns", row.number),
  invalid: (row) => value("invalid", row.number),
  tokens: (row) => value("tokens", row.number),
};

/** Rows by one of the orders; a minus before its name turns it round. Without a name they stay as they are. */
function sortRows(rows, sort) {
  const name = sort.replace(/^-/, "");
  if (!Object.hasOwn(ORDERS, name)) return rows; // links come from anyone
  const key = ORDERS[name];
  const turn = sort.startsWith("-") ? -1 : 1;
  const keyed = rows.map((row) => [key(row), row]);
  const compare = name === "task"
    ? new Intl.Collator("en", { numeric: true }).compare
    : (one, other) => one - other;
  return keyed.sort((one, other) => turn * compare(one[0], other[0])).map(([, row]) => row);
}
