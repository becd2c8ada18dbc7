// The broker's REST API for pages. Paths are relative to /v1: get("/jobs", {limit: 10}).
// The API key lives in this tab's sessionStorage and travels in the Authorization header only.

const KEY = "onbeat.key";
const TOML = { "Content-Type": "application/toml" };
const FILE = { "Content-Type": "application/octet-stream" };
const TIMEOUT_MS = 30_000;
const CREATE_MS = 120_000; // the broker reads the data and tries the reward before it answers
const UPLOAD_MS = 3_600_000; // as the broker's own limit
const SILENCE_MS = 45_000; // a stream has a comment every 15 s
const HIDDEN_MS = 10_000; // then a stream is let go: a browser has 6 connections to a host over HTTP/1.1
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];
const ROOT = new URL("v1", document.baseURI).href; // the dashboard may lie under a path of a proxy

let skewS = 0; // the broker's clock minus ours
let isLocked = false; // the broker has asked for a key

/** A refusal of the broker: a problem document (RFC 9457). `status` 0: it did not answer. */
export class ApiError extends Error {
  constructor(status, problem = {}) {
    const title = problem.title || (status ? `Error ${status}` : "The broker does not answer");
    super(status ? problem.detail || title : `${title}. ${problem.detail ?? ""}`); // a sentence of its own
    this.status = status;
    this.title = title;
    this.detail = problem.detail || "";
    this.errors = problem.errors || []; // [{field, message, line}], the line of a body in TOML
  }
}

/** True if the broker refused, and the page is still there; a defect of the page is thrown again. */
export function isRefusal(error, signal) {
  if (signal?.aborted) return false;
  if (!(error instanceof ApiError)) throw error;
  return true;
}

/** True on the pages of a broker that only shows: it refuses all changes. */
export const isReadOnly = document.documentElement.hasAttribute("data-read-only");

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** Unix seconds as the broker's machine has them. */
export const serverNow = () => Date.now() / 1000 + skewS;

export const get = (path, params = {}, signal = undefined) => send("GET", path, { params, signal });
export const post = (path) => send("POST", path, {});
export const postToml = (path, body, headers, signal) =>
  send("POST", path, { body, headers: { ...headers, ...TOML }, signal, ms: CREATE_MS });
export const put = (path, body, signal) => send("PUT", path, { body, headers: FILE, signal, ms: UPLOAD_MS });
export const del = (path) => send("DELETE", path, {});

async function send(method, path, { params = {}, body, headers = {}, signal, ms = TIMEOUT_MS }) {
  const deadline = AbortSignal.timeout(ms);
  try {
    const response = await fetch(urlOf(path, params), {
      method,
      headers: { ...authorization(), ...headers },
      body,
      signal: signal ? AbortSignal.any([signal, deadline]) : deadline,
    });
    await check(response);
    return response.status === 204 ? null : await response.json();
  } catch (error) {
    throw explained(error, signal, `${method} ${path} was not answered within ${ms / 1000} s; try again`);
  }
}

function urlOf(path, params) {
  const url = new URL(ROOT + path);
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

/** Throws ApiError for a refusal. After a 401 the page asks for the key. */
async function check(response) {
  const date = Date.parse(response.headers.get("Date") || "");
  const skew = (date - Date.now()) / 1000;
  if (Number.isFinite(skew)) skewS = Math.abs(skew) > 2 ? skew : 0; // the header has whole seconds
  if (response.ok) return;
  const problem = await response.json().catch(() => ({}));
  isLocked ||= response.status === 401;
  const isRefused = response.status === 401 || (response.status === 429 && isLocked && !hasKey()); // too many without one
  if (isRefused) document.dispatchEvent(new CustomEvent("onbeat:key"));
  throw new ApiError(response.status, problem);
}

/** An abort of the caller stays one; what the network did becomes an ApiError with status 0. */
function explained(error, signal, late) {
  if (error instanceof ApiError || signal?.aborted) return error;
  if (error.name === "TimeoutError") return new ApiError(0, { detail: late });
  return new ApiError(0, { detail: `Is it running, and can this machine reach it (${error.message})?` });
}

/**
 * Server-sent events of a job, over fetch because EventSource sends no Authorization header.
 * onMessage(kind, data, id): each message but the last. onState("connecting" | "open" | "lost" | "over").
 * Takes up a lost connection after the last event that was seen; one that was let go because the page is hidden, when
 * it is shown. Resolves when the job is over or `signal` fires; rejects with ApiError when the broker refuses for good
 * (401, 403, 404, 422). What the callbacks throw goes to the console, and the stream goes on.
 */
export async function stream(path, { after = "0", signal, onMessage, onState = () => {} }) {
  const [report, reportState] = [onMessage, onState].map(reported);
  let tries = 0;
  const onOpen = () => {
    tries = 0;
    reportState("open");
  };
  while (!signal.aborted) {
    if (document.hidden) {
      reportState("lost");
      await pause(HIDDEN_MS, signal);
      continue;
    }
    reportState("connecting");
    try {
      for await (const { event, data, id } of messages(path, after, signal, onOpen)) {
        if (event !== "end") report(event, data, id);
        else if (data.reason === "over") return reportState("over");
        after = id ?? after; // once the page has seen it
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429) throw error;
    }
    reportState("lost");
    await pause(RETRY_MS[Math.min(tries, RETRY_MS.length - 1)], signal);
    tries += 1;
  }
}

/** A defect of the page is none of the connection. */
function reported(callback) {
  return (...args) => {
    try {
      callback(...args);
    } catch (error) {
      reportError(error);
    }
  };
}

/** One connection: yields {event, data, id} of each message, its data parsed. */
async function* messages(path, after, signal, onOpen) {
  const line = new AbortController();
  let deadline;
  const goOn = () => {
    clearTimeout(deadline);
    deadline = setTimeout(() => line.abort(), document.hidden ? HIDDEN_MS : SILENCE_MS);
  };
  document.addEventListener("visibilitychange", goOn, { signal: line.signal });
  goOn();
  try {
    const response = await fetch(urlOf(path, { after }), {
      headers: { ...authorization(), Accept: "text/event-stream" },
      signal: AbortSignal.any([signal, line.signal]),
    });
    await check(response);
    onOpen();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let [rest, message] = ["", {}];
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      if (!document.hidden) goOn();
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const text of lines) {
        const [name, value] = text.split(/: (.*)/s, 2);
        if (name) message[name] = value;
        if (text) continue; // a comment has no name, the end of a message no text
        if (message.data) yield { ...message, data: JSON.parse(message.data) };
        message = {};
      }
    }
  } finally {
    clearTimeout(deadline);
    line.abort();
  }
}

/** Resolves after so long, or at once when the page is shown again or `signal` fires. */
export async function pause(ms, signal) {
  const over = new AbortController(); // removes the listeners
  await new Promise((resolve) => {
    if (signal.aborted) resolve();
    setTimeout(resolve, ms);
    signal.addEventListener("abort", resolve, { signal: over.signal });
    document.addEventListener("visibilitychange", () => document.hidden || resolve(), { signal: over.signal });
  });
  over.abort();
}

/** Calls `look` every so often until `signal` fires, but not while the page is hidden. */
export async function poll(ms, signal, look) {
  while (!signal.aborted) {
    await pause(ms, signal);
    if (!signal.aborted && !document.hidden) await look();
  }
}
