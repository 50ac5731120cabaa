// The figures: plotly is unpacked when the first one comes near, and each is drawn when it does.

let library = null;
const drawn = new Map(); // each figure that came near, and whether it is drawn; a hidden one is not
const trusted = window.trustedTypes?.createPolicy("perturn", { createScript: (text) => text });

/** Run plotly; the page's policy lets only the script with its hash run. */
function plotly() {
  library ??= unpacked("library").then((text) => {
    // It adds the style of its maps, which none of our figures has, unless an element of that name is there.
    for (const [, id] of text.matchAll(/getElementById\("([0-9a-f]{40,})"\)/g)) document.head.append(element("meta", { id }));
    const script = document.createElement("script");
    script.textContent = trusted ? trusted.createScript(text) : text;
    document.head.append(script);
    return window.Plotly;
  });
  return library;
}

/** On a narrow screen, names beside an axis leave too little of it. */
function shorten(figure) {
  const axis = figure.layout.yaxis;
  if (axis?.type !== "category") return;
  const names = figure.data.flatMap((trace) => trace.y);
  axis.labelalias = Object.fromEntries(names.filter((name) => name.length > 15).map((name) => [name, `${name.slice(0, 14)}…`]));
}

async function draw(place) {
  const plot = await plotly();
  const width = place.clientWidth;
  drawn.set(place, width > 0); // `fitFigures` draws a hidden one
  if (!width) return;
  const figure = embedded(place.dataset.figure);
  figure.layout.template = embedded("themes")[isDark() ? "dark" : "light"];
  if (width < 560) shorten(figure);
  await plot.react(place, figure.data, figure.layout, { responsive: true, displayModeBar: false, displaylogo: false });
  place.dataset.drawn = "true";
}

/** Once the report is shown again: draw the figures that waited, and fit all to a window of another width. */
async function fitFigures() {
  await Promise.all([...drawn].map(async ([place, isDrawn]) => {
    if (!isDrawn) await draw(place);
    const width = place.clientWidth; // rounded, unlike plotly's; 0 if the reader has left
    // A figure that is drawn again keeps its width.
    if (width && Math.abs(place._fullLayout?.width - width) >= 1) await window.Plotly.Plots.resize(place);
  }));
}

function watchFigures() {
  const places = [...document.querySelectorAll("[data-figure]")];
  for (const place of places) place.style.height = `${place.dataset.height}px`;
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) {
          observer.unobserve(target);
          draw(target);
        }
      }
    },
    { rootMargin: "300px" },
  );
  // After the first paint, when nothing else is to do: plotly takes a second or more on a slow machine.
  const watch = () => places.forEach((place) => observer.observe(place));
  requestAnimationFrame(() => (window.requestIdleCallback ?? setTimeout)(watch));
  window.addEventListener("beforeprint", () => places.forEach(draw));
}

const THEMES = ["auto", "light", "dark"];
const system = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  return chosen === "auto" ? system.matches : chosen === "dark";
}

/** Files opened from disk may be refused a store; then the choice lasts as long as the page. */
function remembered(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch {
    // see above
  }
  return null;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name;
  byId("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system has them" : name}`);
  [...drawn.keys()].forEach(draw);
}

function watchTheme() {
  const kept = remembered("perturn-theme");
  setTheme(THEMES.includes(kept) ? kept : "auto");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    remembered("perturn-theme", next);
    setTheme(next);
  });
  system.addEventListener("change", () => [...drawn.keys()].forEach(draw));
}
