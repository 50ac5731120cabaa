// Begins when the page is there.

async function follow() {
  const { view, params, section } = route();
  const isReport = view === "report";
  document.body.dataset.view = isReport ? "report" : "episodes";
  byId("report").hidden = !isReport;
  byId("browser").hidden = isReport;
  if (isReport) {
    if (section) byId(section)?.scrollIntoView();
    return;
  }
  await openBrowser(view, params);
}

watchTheme();
watchTables();
watchFigures();
window.addEventListener("hashchange", follow);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash says where the reader is, so the link must not change it
  byId("main").focus();
});
follow().then(() => {
  document.documentElement.dataset.ready = "true";
});
