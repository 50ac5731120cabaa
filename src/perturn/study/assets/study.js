// Begins when the page of a study is there.

watchTheme();
watchTables();
watchFigures();
document.documentElement.dataset.ready = "true";
