// Where the reader is stands after the # alone, so that a link still leads there on another machine.
// #episodes?mode=…&set=…   the list, with its filters
// #episode?run=…&set=…&task=…&sample=…&turn=…   an episode; run2, set2, task2, sample2: the one beside it
// #group?run=…&set=…&task=…   the samples of a task
// anything else is a section of the report.

const FILTERS = ["mode", "run", "set", "a", "b", "kind", "outcome", "signal", "low", "high", "q", "deep", "sort"];

/** The hash as {view, params}. */
function route(hash = location.hash) {
  const [name, query = ""] = hash.replace(/^#/, "").split("?", 2);
  const params = Object.fromEntries(new URLSearchParams(query));
  if (["episodes", "episode", "group"].includes(name)) return { view: name, params };
  return { view: "report", params: {}, section: name };
}

/** The hash of a view; what is empty is left out. */
function hashOf(view, params) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

/** The hash of an episode, of a turn of it, and of the one beside it. */
function hashOfEpisode(number, { turn = null, other = null } = {}) {
  const name = (index, tail) => ({
    [`run${tail}`]: runName(index),
    [`set${tail}`]: setOf(index).name,
    [`task${tail}`]: taskOf(index),
    [`sample${tail}`]: value("sample", index),
  });
  const beside = other === null ? {} : name(other, "2");
  return hashOf("episode", { ...name(number, ""), ...beside, turn });
}

/** The number of the episode that the parameters name, or null. */
function episodeNamed(params, tail = "") {
  const wanted = [params[`run${tail}`], params[`set${tail}`], params[`task${tail}`], params[`sample${tail}`] ?? "0"];
  return wanted[2] === undefined ? null : catalogue.byName.get(wanted.join("\n")) ?? null;
}
