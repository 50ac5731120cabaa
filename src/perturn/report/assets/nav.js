// The navigation marks where the reader is. Without a script, the first section stays marked.

/** Marks the link of the navigation that leads to where the reader is. */
function mark(current) {
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.getAttribute("href") === current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

/** Marks the section whose title is the last one above the middle of the window; at the end of the page, the last. */
function markSection() {
  const links = [...document.querySelectorAll(".top nav a")].map((link) => link.getAttribute("href"));
  const titles = links.map((href) => byId(href.slice(1))).filter((title) => title && !title.closest("#browser"));
  const root = document.documentElement;
  const line = root.scrollTop + root.clientHeight >= root.scrollHeight - 2 ? Infinity : root.clientHeight / 2;
  const above = titles.filter((title) => title.offsetParent !== null && title.getBoundingClientRect().top <= line);
  mark(`#${(above.at(-1) ?? titles[0]).id}`);
}

/** Keeps the mark as the reader scrolls. */
function watchSections() {
  let waits = false;
  window.addEventListener("scroll", () => {
    if (waits || document.body.dataset.view !== "report") return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      if (document.body.dataset.view === "report") markSection();
    });
  }, { passive: true });
}
