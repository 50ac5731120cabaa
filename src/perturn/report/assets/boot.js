// Begins when the page is there.

async function follow() {
  const { view, params, section } = route();
  const isReport = view === "report";
  document.body.dataset.view = isReport ? "report" : "episodes";
  byId("report").hidden = !isReport;
  byId("browser").hidden = isReport;
  if (isReport) {
    fitFigures();
    if (section) byId(section)?.scrollIntoView();
    markSection();
    return;
  }
  mark("#episodes");
  await openBrowser(view, params);
}

/** A browser without DecompressionStream (before 2023), or a file that was cut short. */
function giveUp(error) {
  byId("browser").replaceChildren(element("p", { class: "error" }, `The episodes cannot be unpacked: ${error.message}`));
  throw error;
}

watchTheme();
watchSections();
watchTables();
watchFigures();
window.addEventListener("hashchange", () => follow().catch(giveUp));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash says where the reader is, so the link must not change it
  byId("main").focus();
});
follow().catch(giveUp).finally(() => {
  document.documentElement.dataset.ready = "true";
});
