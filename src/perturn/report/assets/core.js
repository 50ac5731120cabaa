// Elements and pieces. Text enters the page as text nodes alone: nothing here, and nothing anywhere in these
// files, parses markup.

const byId = (id) => document.getElementById(id);

/** An element. `attributes` take listeners as functions and leave out null; links lead inside this page only. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "href" && !String(value).startsWith("#")) throw new Error(`link outside the page: ${value}`);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** The JSON of a script element. */
const embedded = (id) => JSON.parse(byId(id).textContent);

/** The text of a compressed piece of the page. */
async function unpacked(id) {
  const letters = atob(byId(id).textContent.trim());
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const opened = new Map();
const MOST_OPEN = 24; // pieces kept in memory

/** A piece, decoded once and kept while it is among the last that were used; null where the page has none. */
function piece(name) {
  const id = `piece-${name}`;
  if (!byId(id)) return Promise.resolve(null);
  const found = opened.get(id) ?? unpacked(id).then(JSON.parse);
  opened.delete(id);
  opened.set(id, found);
  if (opened.size > MOST_OPEN) opened.delete(opened.keys().next().value);
  return found;
}

/** Tells those who cannot see it what has changed. */
function announce(text) {
  byId("announce").textContent = text;
}

const show = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
const signed = (value, digits = 3) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(value).toFixed(digits)}`;
const count = (value) => Number(value).toLocaleString("en");
const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
