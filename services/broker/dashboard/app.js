// The frame: which page the address names, the focus and title after a move, the API key, the theme.

import { ApiError, forgetKey, get, hasKey, setKey } from "./api.js";
import { announce, clear, el } from "./dom.js";

// A module's show(main, params, signal) fills a cleared <main>; `signal` fires when the page is left.
const ROUTES = [
  { path: /^\/$/, nav: "jobs", load: () => import("./jobs.js") },
  { path: /^\/new$/, nav: "new", load: () => import("./form.js") },
  { path: /^\/compare$/, nav: "jobs", load: () => import("./compare.js") },
  { path: /^\/workers$/, nav: "workers", load: () => import("./workers.js") },
  { path: /^\/jobs\/(?<id>[^/]+)$/, nav: "jobs", load: () => import("./job.js") },
  { path: /^\/jobs\/(?<id>[^/]+)\/samples$/, nav: "jobs", load: () => import("./samples.js") },
  { path: /^\/jobs\/(?<id>[^/]+)\/timeline$/, nav: "jobs", load: () => import("./timeline.js") },
];

const main = document.getElementById("main");
const forgetButton = document.getElementById("forget-key");
const themeButton = document.getElementById("theme");

let page = new AbortController(); // of the page that is shown
let isAsking = false; // the key form is shown

async function navigate() {
  page.abort();
  page = new AbortController();
  isAsking = false;
  const { signal } = page;
  const isFirst = document.title === "Onbeat";
  const { route, params } = find(location.hash);
  markCurrent(route?.nav);
  forgetButton.hidden = !hasKey();
  clear(main);
  if (!isFirst) window.scrollTo(0, 0);
  whenHeaded(signal, !isFirst);
  try {
    if (!route) return showNothingHere();
    const { show } = await route.load().catch(cannotLoad);
    if (!signal.aborted) await show(main, params, signal);
  } catch (error) {
    if (!signal.aborted) showFailure(error);
  }
}

function cannotLoad(error) {
  console.error(error);
  throw new ApiError(0, { detail: `The files of this page could not be read: ${error.message}` });
}

/** "#/jobs/job-1/samples?iteration=3" -> its route and {id: "job-1", iteration: "3"}. */
function find(hash) {
  const [path, query = ""] = (hash.slice(1) || "/").split("?", 2);
  for (const route of ROUTES) {
    const match = route.path.exec(path);
    if (match) return { route, params: { ...Object.fromEntries(new URLSearchParams(query)), ...decoded(match.groups) } };
  }
  return { params: {} };
}

function decoded(groups = {}) {
  try {
    return Object.fromEntries(Object.entries(groups).map(([name, value]) => [name, decodeURIComponent(value)]));
  } catch {
    return { ...groups }; // no valid escape: no such job either
  }
}

function markCurrent(nav) {
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === nav) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** The first <h1> names the document and, after a move, takes the focus, so that screen readers say where they are. */
function whenHeaded(signal, isMove) {
  const look = () => {
    const heading = main.querySelector("h1");
    if (!heading) return;
    observer.disconnect();
    document.title = `${heading.textContent} · Onbeat`;
    heading.tabIndex = -1;
    if (isMove && !main.contains(document.activeElement)) heading.focus({ preventScroll: true });
  };
  const observer = new MutationObserver(look);
  observer.observe(main, { childList: true, subtree: true });
  signal.addEventListener("abort", () => observer.disconnect());
}

function showNothingHere() {
  main.append(
    el("h1", { text: "Nothing here" }),
    el("p", {}, "This address names no page. ", el("a", { href: "#/" }, "Go to the jobs")),
  );
}

function showFailure(error) {
  if (error instanceof ApiError && error.status === 401) return; // the key form is there
  const isOurs = !(error instanceof ApiError);
  if (isOurs) console.error(error);
  clear(main).append(
    el("h1", { text: isOurs ? "This page has a defect" : error.title }),
    el("p", { class: "notice bad", role: "alert", text: error.detail || error.message }),
    el(
      "p",
      { class: "actions" },
      el("button", { type: "button", class: "button", on: { click: () => (error.status === 0 ? location.reload() : navigate()) } }, "Try again"),
      el("a", { class: "button quiet", href: "#/" }, "All jobs"),
    ),
  );
}

// ---- API key -----------------------------------------------------------------------------------------------------

function askForKey() {
  if (isAsking) return;
  page.abort();
  page = new AbortController();
  isAsking = true;
  forgetButton.hidden = true;
  const wasWrong = hasKey();
  forgetKey();
  const field = el("input", {
    type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-help key-error",
  });
  const error = el("p", { id: "key-error", class: "error", role: "alert" });
  if (wasWrong) error.textContent = "The key in this tab is not accepted any more.";
  const button = el("button", { class: "button primary", type: "submit" }, "Use this key");
  const form = el(
    "form",
    { class: "card narrow", on: { submit: (event) => tryKey(event, field, error, button) } },
    el("label", { for: "key" }, "API key"),
    field,
    error,
    el("p", { id: "key-help", class: "muted" }, "Kept in this tab only: it is gone when the tab is closed. ",
      "Whoever runs this broker makes keys with ", el("code", {}, "onbeat keys new"), "."),
    button,
  );
  clear(main).append(el("h1", { text: "This broker asks for a key", tabindex: "-1" }), form);
  document.title = "API key · Onbeat";
  field.focus();
}

async function tryKey(event, field, error, button) {
  event.preventDefault();
  const key = field.value.trim();
  error.textContent = "";
  button.disabled = true;
  try {
    if (!/^[\x21-\x7e]+$/.test(key)) throw new ApiError(401); // no header could carry it
    setKey(key);
    await get("/jobs", { limit: 1 });
    announce("The key is accepted");
    await navigate();
  } catch (problem) {
    forgetKey();
    error.textContent =
      problem.status === 401 ? "This key is not known, or it is revoked or expired." : problem.detail || problem.message;
    field.setAttribute("aria-invalid", "true");
    field.focus();
    field.select();
  } finally {
    button.disabled = false;
  }
}

// ---- theme -------------------------------------------------------------------------------------------------------

const systemIsDark = window.matchMedia("(prefers-color-scheme: dark)");
const currentTheme = () => document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light");
const otherTheme = () => (currentTheme() === "dark" ? "light" : "dark");

function labelTheme() {
  themeButton.setAttribute("aria-label", `Switch to the ${otherTheme()} theme`);
  themeButton.title = `Switch to the ${otherTheme()} theme`;
}

function switchTheme() {
  document.documentElement.dataset.theme = otherTheme();
  localStorage.setItem("onbeat.theme", currentTheme());
  labelTheme();
}

// ---- start -------------------------------------------------------------------------------------------------------

themeButton.addEventListener("click", switchTheme);
systemIsDark.addEventListener("change", labelTheme);
labelTheme();
forgetButton.addEventListener("click", () => {
  forgetKey();
  announce("The key is forgotten");
  navigate();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the address of a page
  main.focus();
});
document.addEventListener("onbeat:key", askForKey);
window.addEventListener("hashchange", navigate);
navigate();
