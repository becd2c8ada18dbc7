// The frame: which page the address names, the focus and title after a move, the API key, the theme.

import { ApiError, forgetKey, get, hasKey, setKey } from "./api.js";
import { announce, Component, createRef, html, marked, render } from "./parts.js";

// A module's show(main, params, signal) renders into an empty <main>, and resolves then; `signal` fires when the page is left.
const ROUTES = [
  { path: /^\/$/, nav: "jobs", load: () => import("./jobs.js") },
  { path: /^\/new$/, nav: "new", load: () => import("./new.js") },
  { path: /^\/compare$/, nav: "jobs", load: () => import("./compare.js") },
  { path: /^\/workers$/, nav: "workers", load: () => import("./workers.js") },
  { path: /^\/jobs\/(?<id>[^/]+)$/, nav: "jobs", load: () => import("./job.js") },
  { path: /^\/jobs\/(?<id>[^/]+)\/samples$/, nav: "jobs", load: () => import("./samples.js") },
  { path: /^\/jobs\/(?<id>[^/]+)\/timeline$/, nav: "jobs", load: () => import("./timeline.js") },
];

const main = document.getElementById("main");
const forgetButton = document.getElementById("forget-key");
const themeButton = document.getElementById("theme");

let page = new AbortController(); // aborts the requests of the shown page
let isAsking = false; // the key form is shown

/** Clears the page that is shown. Returns the signal of the next one. */
function leave() {
  page.abort();
  page = new AbortController();
  render(null, main);
  return page.signal;
}

async function navigate() {
  const signal = leave();
  isAsking = false;
  const isFirst = document.title === "Onbeat";
  const { route, params } = find(location.hash);
  markCurrent(route?.nav);
  forgetButton.hidden = !hasKey();
  if (!isFirst) window.scrollTo(0, 0);
  try {
    const { show } = route ? await route.load().catch(cannotLoad) : { show: () => render(NOTHING_HERE, main) };
    if (!signal.aborted) await show(main, params, signal);
  } catch (error) {
    if (!signal.aborted) showFailure(error);
  }
  if (!signal.aborted) announceHeading(!isFirst);
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
    if (match) return { route, params: { ...Object.fromEntries(new URLSearchParams(query)), ...match.groups } };
  }
  return { params: {} };
}

function markCurrent(nav) {
  for (const link of document.querySelectorAll("[data-page]")) link.ariaCurrent = link.dataset.page === nav ? "page" : null;
}

/** The <h1> names the document and, after a move, takes the focus, so that screen readers say where they are. */
function announceHeading(isMove) {
  const heading = main.querySelector("h1");
  document.title = `${heading.textContent} · Onbeat`;
  heading.tabIndex = -1;
  if (isMove && !main.contains(document.activeElement)) heading.focus({ preventScroll: true });
}

const NOTHING_HERE = html`
  <h1>Page not found</h1>
  <p>Nothing is at this address. <a href="#/">Go to the jobs</a></p>
`;

function showFailure(error) {
  if (error instanceof ApiError && error.status === 401) return; // the key form is there
  const isOurs = !(error instanceof ApiError);
  if (isOurs) console.error(error);
  const again = () => (error.status === 0 ? location.reload() : navigate());
  render(null, main);
  const failure = html`
    <h1>${isOurs ? "This page has a defect" : error.title}</h1>
    <p class="notice bad" role="alert">${marked(error.detail || error.message)}</p>
    <p class="actions">
      <button type="button" class="button" onClick=${again}>Try again</button>
      <a class="button quiet" href="#/">All jobs</a>
    </p>
  `;
  render(failure, main);
}

// ---- API key -----------------------------------------------------------------------------------------------------

function askForKey() {
  if (isAsking) return;
  leave();
  isAsking = true;
  forgetButton.hidden = true;
  const wasWrong = hasKey();
  forgetKey();
  render(html`<${KeyForm} error=${wasWrong ? "The key in this tab is not accepted any more." : ""} />`, main);
  document.title = "API key · Onbeat";
}

class KeyForm extends Component {
  state = { error: this.props.error, isTrying: false };
  field = createRef();

  componentDidMount() {
    this.field.current.focus();
  }

  async tryKey(event) {
    event.preventDefault();
    const key = this.field.current.value.trim();
    this.setState({ error: "", isTrying: true });
    try {
      if (!/^[\x21-\x7e]+$/.test(key)) throw new ApiError(401); // no header could carry it
      setKey(key);
      await get("/jobs", { limit: 1 });
      announce("The key is accepted");
      await navigate();
    } catch (problem) {
      forgetKey();
      const unknown = "This key is not known, or it is revoked or expired.";
      this.setState({ error: problem.status === 401 ? unknown : problem.message, isTrying: false });
      this.field.current.focus();
      this.field.current.select();
    }
  }

  render(_, { error, isTrying }) {
    return html`
      <h1 tabindex="-1">This broker asks for a key</h1>
      <form class="narrow" onSubmit=${(event) => this.tryKey(event)}>
        <label for="key">API key</label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          spellcheck=${false}
          required
          ref=${this.field}
          aria-invalid=${error ? "true" : null}
          aria-describedby="key-help key-error"
        />
        <p id="key-error" class="error" role="alert">${error}</p>
        <p id="key-help" class="muted">
          Kept in this tab only: it is gone when the tab is closed. The operator of this broker makes keys with${" "}
          <code>onbeat keys new</code>.
        </p>
        <button class="button primary" type="submit" disabled=${isTrying}>Use this key</button>
      </form>
    `;
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
