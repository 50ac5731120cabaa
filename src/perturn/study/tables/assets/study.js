// Begins when the page of a study is there.

watchTheme();
watchSections();
markSection();
watchTables();
watchFigures();
document.documentElement.dataset.ready = "true";
