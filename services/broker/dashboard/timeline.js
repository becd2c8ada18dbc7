// The work of all services during the last iterations: a page of its own, and a small one on the job's page.

import { get, isRefusal, pause, poll, stream } from "./api.js";
import { duration, number, percent } from "./format.js";
import { describe, KINDS, Lanes } from "./lanes.js";
import { addressOf, Component, createRef, Fold, html, JobHead, pathOf, render, Table, title } from "./parts.js";
import { totals, TRAINER } from "./spans.js";

const CHOICES = [1, 2, 3, 5, 10, 20];
const SMALL = 3; // iterations on the job's page
const LARGE = 5;
const MOST_ROWS = 500; // rows of the table
const REFRESH_MS = 2000;
const REST = 10; // times as long as an answer took: large ones are asked for less often

export async function show(main, { id, iterations }, signal) {
  const path = pathOf(id);
  const job = await get(path, {}, signal);
  if (signal.aborted) return;
  const wanted = CHOICES.includes(Number(iterations)) ? Number(iterations) : LARGE;
  const panel = createRef();
  const draw = (job) =>
    render(
      html`
        <${JobHead} job=${job} what="Timeline" current="timeline" />
        <${TimelinePanel} ref=${panel} id=${id} signal=${signal} wanted=${wanted} isLarge=${true} />
      `,
      main,
    );
  draw(job);
  const onMessage = (kind, data) => {
    if (kind === "job") draw(data);
    else if (kind === "iteration") panel.current.refresh();
  };
  const following = stream(`${path}/stream`, { after: `${Date.now()}`, signal, onMessage });
  following.catch((error) => isRefusal(error, signal)); // the panel says what is wrong
}

/** `refresh()`: something has changed; it is read again soon. */
export class TimelinePanel extends Component {
  state = { timeline: null, problem: "", wanted: this.props.wanted ?? SMALL, chosen: null, isLive: true };
  path = pathOf(this.props.id);
  lanes = createRef();
  isStale = false; // something has changed since it was read

  async componentDidMount() {
    await this.load();
    poll(REFRESH_MS, this.props.signal, async () => {
      if (this.isStale && this.state.isLive) await this.load();
    });
  }

  shouldComponentUpdate(_, state) {
    return state !== this.state; // the job's page is drawn often
  }

  // ---- reading -----------------------------------------------------------------------------------------------------

  refresh() {
    this.isStale = true;
  }

  /** Resolves REST times as long after the answer as that took: it is read again no sooner. */
  async load() {
    const { signal } = this.props;
    const { wanted } = this.state;
    this.isStale = false;
    const begun = performance.now();
    try {
      const timeline = await get(`${this.path}/timeline`, { iterations: wanted }, signal);
      if (wanted === this.state.wanted) this.setState({ timeline, problem: "" }); // else others were asked for meanwhile
    } catch (error) {
      if (!isRefusal(error, signal)) return;
      this.isStale = true;
      this.setState({ problem: `The timeline could not be read: ${error.message}` });
    }
    await pause(REST * (performance.now() - begun), signal);
  }

  choose(wanted) {
    history.replaceState(null, "", `${addressOf(this.props.id)}/timeline?iterations=${wanted}`);
    this.lanes.current?.fit();
    this.setState({ wanted }, () => this.load());
  }

  /** A part that somebody looks at would move away: it stands still until all is shown again. */
  setLive(isLive) {
    if (isLive !== this.state.isLive) this.setState({ isLive });
  }

  // ---- what is shown -----------------------------------------------------------------------------------------------

  groupLink({ iteration, group_id: group }) {
    return `${addressOf(this.props.id)}/samples?iteration=${iteration}&group=${encodeURIComponent(group)}`;
  }

  open({ span }) {
    if (span.group_id) location.hash = this.groupLink(span);
  }

  render({ id, isLarge }, { timeline, problem, chosen }) {
    if (!isLarge && !problem && !timeline?.lanes.length) return null; // nothing to show on the job's page yet
    const more = html`<a href="${addressOf(id)}/timeline">Larger, with zoom</a>`;
    const tables = () => html`<${Table} ...${lanesTable(timeline)} className="small" /><${Table} ...${spansTable(timeline)} className="small" />`;
    return html`
      <section class="timeline" data-testid="timeline" aria-labelledby="timeline-heading">
        <div class="head">
          <h2 id="timeline-heading">${isLarge ? "Who did what" : "Timeline"}</h2>
          ${isLarge ? this.tools() : more}
        </div>
        <p data-testid="timeline-summary">${problem || (timeline && summarise(timeline))}</p>
        ${timeline?.lanes.length > 0 &&
        html`
          <${Lanes}
            ref=${this.lanes}
            timeline=${timeline}
            isLarge=${isLarge}
            onChoose=${(item) => this.setState({ chosen: item })}
            onOpen=${(item) => this.open(item)}
            onZoom=${(isFit) => this.setLive(isFit)}
          />
          <p class="timeline-readout" data-testid="timeline-readout">${this.readout(chosen)}</p>
          <${Fold} className="timeline-tables" summary="As tables" of=${tables} />
        `}
      </section>
    `;
  }

  tools() {
    const { wanted, isLive } = this.state;
    const lanes = () => this.lanes.current;
    const button = (name, text, act) =>
      html`<button class="button icon" type="button" aria-label=${name} title=${name} onClick=${() => lanes() && act()}>${text}</button>`;
    const setLive = (event) => (event.target.checked ? lanes()?.fit() : this.setLive(false));
    return html`
      <div class="actions">
        <label for="timeline-iterations">Iterations</label>
        <select id="timeline-iterations" value=${String(wanted)} onChange=${(event) => this.choose(Number(event.target.value))}>
          ${CHOICES.map((count) => html`<option value=${String(count)}>${number(count)}</option>`)}
        </select>
        <span><input type="checkbox" id="timeline-live" checked=${isLive} onChange=${setLive} /> <label for="timeline-live">Live</label></span>
        <span class="actions">
          ${button("Zoom in", "+", () => lanes().zoom(0.5))}${button("Zoom out", "−", () => lanes().zoom(2))}
          ${button("Earlier", "◂", () => lanes().pan(-0.25))}${button("Later", "▸", () => lanes().pan(0.25))}
          <button class="button" type="button" onClick=${() => lanes()?.fit()}>Show all</button>
        </span>
      </div>
    `;
  }

  readout(item) {
    if (!item) {
      const more = this.props.isLarge ? " Drag over a part to zoom into it; + and − zoom as well, and the wheel with Control." : "";
      return html`<span class="muted">Point at a span, or move with the arrow keys.${more}</span>`;
    }
    const link = item.span.group_id && html` <a href=${this.groupLink(item.span)}>Its responses</a>`;
    return html`${describe(item.span, this.state.timeline.start)}${link}`;
  }
}

// ---- words and tables ----------------------------------------------------------------------------------------------

/** Idle shares of both sides, how much of the generation overlapped, and what the adviser says. */
function summarise(timeline) {
  const whole = timeline.end - timeline.start;
  if (!timeline.lanes.length || whole <= 0) return "No iteration has been opened yet.";
  const [first, last] = [timeline.iterations[0], timeline.iterations.at(-1)];
  const idle = timeline.lanes.filter(({ id, idle_frac: share }) => id !== TRAINER && share !== null).map((lane) => lane.idle_frac);
  const trainer = timeline.lanes.find(({ id }) => id === TRAINER)?.idle_frac ?? null;
  const parts = [
    trainer === null ? "what the trainer did is reported at the commit" : `the trainer was idle ${percent(trainer)} of the time`,
    idle.length === 1 && `the rollout ${percent(idle[0])}`,
    idle.length > 1 && `${idle.length} rollouts were idle ${percent(idle.reduce((sum, each) => sum + each, 0) / idle.length)} on average`,
  ].filter(Boolean);
  const which = first === last ? `Iteration ${first}` : `Iterations ${first} to ${last}`;
  const overlap = timeline.overlap ? ` ${title(timeline.overlap)}.` : "";
  const advice = timeline.advice ? ` ${title(timeline.advice)} (predicted from the last iterations).` : "";
  return `${which}, ${duration(whole)}: ${parts.join("; ")}.${overlap}${advice}`;
}

function lanesTable({ lanes, spans }) {
  const kinds = Object.keys(KINDS).filter((kind) => spans.some((span) => span.kind === kind));
  const rows = lanes.map(({ id, idle_frac: idle }) => {
    const sums = totals(spans.filter(({ lane }) => lane === id));
    return [id, percent(idle), ...kinds.map((kind) => (sums.has(kind) ? duration(sums.get(kind)) : "–"))];
  });
  const columns = ["Lane", "Idle", ...kinds.map((kind) => KINDS[kind].name)];
  return { caption: "Time by lane; spans of a rollout overlap", columns, rows, numbersFrom: 1 };
}

function spansTable({ spans, start }) {
  const shown = spans.slice(0, MOST_ROWS);
  const rows = shown.map((span) => [
    span.lane,
    KINDS[span.kind]?.name ?? span.kind,
    span.group_id ?? "–",
    number(span.iteration),
    `${(span.start - start).toFixed(3)} s`,
    duration(span.end - span.start),
  ]);
  const caption = shown.length < spans.length ? `The first ${number(shown.length)} of ${number(spans.length)} spans` : "Spans";
  return { caption, columns: ["Lane", "Kind", "Group", "Iteration or version", "Begin", "Length"], rows, numbersFrom: 3 };
}
