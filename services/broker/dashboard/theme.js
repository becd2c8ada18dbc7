// Before the first paint: the theme that was chosen on this machine. No module, so that it runs at once.
(() => {
  const chosen = localStorage.getItem("onbeat.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
