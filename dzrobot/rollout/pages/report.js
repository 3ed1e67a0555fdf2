"use strict";
// Texts reach the page as text nodes only: names of tasks and errors come from outside.
const data = JSON.parse(document.getElementById("data").textContent);
const two = data.letters.length > 1;
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const letter = (name) => element("b", { className: `letter ${name}` }, name);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- the list -----------------------------------------------------------------------------------

const flipOf = ({ runs }) => {
  if (!two) return "";
  const [a, b] = runs.map((run) => run.outcome);
  if (a === "success" && b === "failure") return "lost";
  return a === "failure" && b === "success" ? "won" : "";
};

const suites = new Set(data.episodes.map((episode) => episode.suite)).size;
// Most actions come from a plan that is there already: where plans are told of, theirs is the time.
const planned = data.episodes.some((episode) => episode.runs[0].plan_ms);
const ms = (value) => (typeof value === "number" ? value.toFixed(value < 100 ? 1 : 0) : String(value));
const columns = [
  ...(suites > 1 ? [{ name: "suite", of: (e) => e.suite }] : []),
  { name: "task", number: true, of: (e) => e.task_id },
  { name: "episode", number: true, of: (e) => e.episode },
  { name: "start", number: true, of: (e) => e.runs.map((r) => r.init_state_id).find((n) => n != null) ?? e.seed },
  ...(two ? [{ name: "flip", of: flipOf }] : []),
  ...data.letters.flatMap((name, i) => [
    { name: two ? `${name} outcome` : "outcome", of: (e) => e.runs[i].outcome, styled: true },
    { name: two ? `${name} failed by` : "failed by", of: (e) => e.runs[i].failure },
    { name: two ? `${name} steps` : "steps", number: true, of: (e) => e.runs[i].steps ?? "" },
  ]),
  ...(two ? [] : [{ name: `${planned ? "plan" : "policy"} ms`, number: true, of: (e) => (planned ? e.runs[0].plan_ms : e.runs[0].policy_ms)?.p50 ?? "", shown: ms }]),
];

const rows = data.episodes.map((episode, index) => {
  const values = columns.map((column) => column.of(episode));
  const errors = episode.runs.map((run) => run.error ?? "").join(" ");
  return { episode, index, values, text: `${episode.case} ${episode.task} ${values.join(" ")} ${errors}`.toLowerCase() };
});

function drawn({ episode, values }) {
  const row = element("tr", { tabIndex: 0, title: episode.task, className: episode === chosen ? "chosen" : "" });
  row.dataset.case = episode.case;
  columns.forEach((column, i) => {
    const name = column.styled ? String(values[i]).replace(" ", "-") : column.number ? "number" : "";
    row.append(element("td", { className: name }, column.shown ? column.shown(values[i]) : String(values[i])));
  });
  row.addEventListener("click", () => choose(episode));
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(episode); });
  return row;
}

// Thousands of rows would take seconds to lay out: a part of them is in the page.
const PART = 200;
let ordered = rows, kept = rows, limit = PART, chosen = null;

function draw() {
  byId("episodes").tBodies[0].replaceChildren(...kept.slice(0, limit).map(drawn));
  byId("more").hidden = kept.length <= limit;
  byId("more").textContent = `Show ${Math.min(PART, kept.length - limit)} more of ${kept.length - limit}`;
}

const filters = {
  "by-task": (entry, value) => taskOf(entry.episode) === value,
  "by-outcome": (entry, value) => entry.episode.runs.some((run) => run.outcome === value),
  "by-failure": (entry, value) => entry.episode.runs.some((run) => run.failure === value),
  "by-flip": (entry, value) => (value === "any" ? flipOf(entry.episode) !== "" : flipOf(entry.episode) === value),
  "by-text": (entry, value) => value.toLowerCase().split(/\s+/).every((word) => entry.text.includes(word)),
};
const taskOf = (episode) => `${episode.suite} ${episode.task_id} ${episode.task}`;

function filter() {
  const asked = Object.entries(filters)
    .map(([id, keeps]) => [byId(id)?.value.trim() ?? "", keeps])
    .filter(([value]) => value !== "");
  kept = ordered.filter((entry) => asked.every(([value, keeps]) => keeps(entry, value)));
  limit = PART;
  draw();
  byId("count").textContent = `${kept.length} of ${rows.length} episode${rows.length === 1 ? "" : "s"}`;
}

let sorted = { column: -1, descending: false };
function sort(column) {
  sorted = { column, descending: sorted.column === column && !sorted.descending };
  const compare = (one, two) => {
    const [a, b] = [one.values[column], two.values[column]];
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return (sorted.descending ? -order : order) || one.index - two.index;
  };
  ordered = [...rows].sort(compare);
  filter();
  byId("episodes").querySelectorAll("th").forEach((head, i) => {
    head.ariaSort = i === column ? (sorted.descending ? "descending" : "ascending") : "none";
  });
}

function fill(id, values) {
  byId(id).append(...[...new Set(values)].filter(Boolean).sort().map((value) => element("option", { value }, value)));
}

// --- one episode ------------------------------------------------------------------------------

function choose(episode, named = true) {
  chosen = episode;
  for (const row of byId("episodes").tBodies[0].rows) row.classList.toggle("chosen", row.dataset.case === episode.case);
  const panel = byId("episode");
  const videos = element("div", { className: "videos" });
  episode.runs.forEach((run, i) => videos.append(film(run, data.letters[i])));
  panel.replaceChildren(element("h3", {}, episode.case), element("p", {}, episode.task), videos);
  const films = [...videos.querySelectorAll("video")];
  if (films.length) panel.append(controls(films, "play"), element("p", { className: "faint" },
    "From the left: the environment's own image, if it has one, then each camera as the policy is given it. Those of LIBERO's robot are mirrored, as its published datasets are."));
  episode.runs.forEach((run, i) => { if (run.predicted) panel.append(prediction(episode, run, data.letters[i])); });
  episode.runs.forEach((run, i) => panel.append(facts(episode, run, data.letters[i])));
  if (named) history.replaceState(null, "", `#${encodeURIComponent(episode.case)}`);
}

function film(run, name) {
  const caption = element("figcaption", {}, letter(name), " ");
  const outcome = element("span", { className: run.outcome.replace(" ", "-") }, run.outcome);
  caption.append(outcome, run.failure ? ` ${run.failure}` : "");
  const seen = run.video
    ? video(run.video)
    : element("p", { className: "faint" }, "no video is kept of this episode");
  const figure = element("figure", {}, caption, seen);
  if (run.photo) figure.append(
    element("img", { src: run.photo, alt: "the initial state, all cameras side by side" }),
    element("p", { className: "faint" }, "the initial state, before the policy acted"),
  );
  return figure;
}

// The browser's own controls lie over the image, and hide a small one: ours stand below it.
function video(src) {
  const made = element("video", { src, preload: "auto", muted: true, playsInline: true, title: "double-click: full screen" });
  made.addEventListener("dblclick", () => made.requestFullscreen());
  return made;
}

function controls(films, id = "") {
  const label = films.length > 1 ? "Play both" : "Play";
  const play = element("button", { id, type: "button" }, label);
  play.addEventListener("click", () => {
    const still = films.every((film) => film.paused || film.ended);
    for (const film of films) {
      if (still && film.ended) film.currentTime = 0;
      still ? film.play() : film.pause();
    }
  });
  // The longest one says where all of them are.
  const longest = () => films.reduce((one, other) => (other.duration > one.duration ? other : one));
  const place = element("input", { type: "range", min: 0, max: 1, step: "any", value: 0, ariaLabel: "place in the video" });
  const told = element("span", { className: "faint" });
  place.addEventListener("input", () => {
    const seconds = place.valueAsNumber * longest().duration;
    for (const film of films) { film.pause(); film.currentTime = Math.min(seconds, film.duration); }
  });
  const follow = () => {
    const { currentTime, duration } = longest();
    if (!Number.isFinite(duration)) return;
    if (document.activeElement !== place || !longest().paused) place.value = currentTime / duration;
    told.textContent = `${currentTime.toFixed(1)} of ${duration.toFixed(1)} s`;
    play.textContent = films.every((film) => film.paused || film.ended) ? label : "Pause";
  };
  for (const film of films) for (const kind of ["timeupdate", "loadedmetadata", "play", "pause", "ended"]) film.addEventListener(kind, follow);
  return element("div", { className: "controls" }, play, place, told);
}

function facts(episode, run, name) {
  const told = {
    ended: run.ended, steps: run.steps, "failed by": run.failure, start: run.init_state_id, seed: episode.seed,
    "wall time (s)": run.wall_s, "plan (ms)": pair(run.plan_ms), "action (ms)": pair(run.policy_ms), "environment (ms)": pair(run.env_ms),
    error: run.error, ...(run.measures ?? {}), ...(run.robot ?? {}),
  };
  const table = element("table", { className: "facts" });
  for (const [key, value] of Object.entries(told)) {
    if (value === null || value === undefined || value === "") continue;
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    table.append(element("tr", {}, element("th", {}, key), element("td", {}, text)));
  }
  return two ? element("div", {}, element("p", {}, letter(name)), table) : table;
}

const pair = (times) => (times ? `median ${ms(times.p50)}, 95th percentile ${ms(times.p95)}` : null);

// --- plots --------------------------------------------------------------------------------------

function layout(more) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--text"), size: 12 }, margin: { l: 10, r: 10, t: 10, b: 50 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

// None of them is the color of a run.
const COLORS = ["#8e6bbf", "#3f9d8c", "#b5658f", "#9a8f2e", "#6b7f99", "#c0705a", "#5b8f3f", "#4f87b0"];

const canPlot = typeof Plotly !== "undefined";

function drawClasses() {
  if (!canPlot) return;
  const lines = data.tasks.filter((task) => !task.total).flatMap((task) => task.rates.map((rate) => ({ task, rate })));
  const names = [...new Set(lines.flatMap(({ rate }) => Object.keys(rate.failure_classes)))].sort();
  if (!names.length) return;
  // As much of a task as leaves room for the bars.
  const letters = Math.max(12, Math.min(60, Math.floor(byId("classes").clientWidth / 20)));
  const cut = (text) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);
  const labels = lines.map(({ task, rate }) => (two ? `${cut(task.task)} · ${rate.letter}` : cut(task.task)));
  const places = lines.map((_, i) => i);
  const traces = names.map((name, i) => ({
    type: "bar", orientation: "h", name, marker: { color: COLORS[i % COLORS.length] }, y: places, text: lines.map(({ task }) => task.task), textposition: "none", x: lines.map(({ rate }) => rate.failure_classes[name] ?? 0),
    hovertemplate: "%{x} %{fullData.name}<br>%{text}<extra></extra>",
  }));
  const height = 120 + (lines.length > 40 ? 18 : 26) * lines.length;
  const shape = layout({ barmode: "stack", height, xaxis: { title: { text: "episodes that failed" }, dtick: Math.max(1, Math.round(most(lines) / 10)) }, yaxis: { range: [lines.length - 0.5, -0.5], tickvals: places, ticktext: labels, showgrid: false } });
  Plotly.react("classes", traces, shape, { displayModeBar: false, responsive: true });
}

const most = (lines) => Math.max(...lines.map(({ rate }) => Object.values(rate.failure_classes).reduce((a, b) => a + b, 0)));

// One point an episode: what its predicted video scored, by run and outcome.
function drawQuality() {
  if (!canPlot || !byId("along")) return;
  const scored = data.letters.flatMap((name, i) => data.episodes
    .filter(({ runs }) => "psnr" in (runs[i].predicted?.scores ?? {}))
    .map((episode) => ({ name, episode, run: episode.runs[i] })));
  const traces = ["success", "failure"].map((outcome) => {
    const own = scored.filter(({ run }) => run.outcome === outcome);
    return {
      type: "box", orientation: "h", boxpoints: "all", jitter: 0.6, pointpos: 0, name: outcome, fillcolor: "rgba(0,0,0,0)",
      x: own.map(({ run }) => run.predicted.scores.psnr), y: own.map(({ name }) => name), text: own.map(({ episode }) => episode.case),
      marker: { color: css(outcome === "success" ? "--good" : "--bad"), size: 5 }, line: { width: 1 }, hoveron: "points",
      hovertemplate: "%{text}<br>%{x:.2f} dB<extra></extra>",
    };
  });
  const shape = layout({ boxmode: "group", height: 110 + 110 * data.letters.length, xaxis: { title: { text: "PSNR of an episode's predicted video (dB)" } }, yaxis: { autorange: "reversed" } });
  Plotly.react("along", traces, shape, small);
}

// --- predictions --------------------------------------------------------------------------------

// A page from disk may fetch nothing; the numbers of an episode come as a script that calls this.
const awaited = new Map();
function takePredictions(name, episode, content) {
  awaited.get(`${name} ${episode}`)?.(content);
}

function prediction(episode, run, name) {
  const scores = run.predicted.scores;
  const told = "psnr" in scores
    ? `PSNR ${scores.psnr.toFixed(1)} dB, SSIM ${scores.ssim.toFixed(3)}; copying the last frame ${scores.copy_psnr.toFixed(1)} dB, ${scores.copy_ssim.toFixed(3)}`
    : "no predicted frame was also seen";
  const latent = "latent_error" in scores
    ? `; latent error ${scores.latent_error.toFixed(3)}, copied ${scores.copy_latent_error.toFixed(3)}`
    : "";
  const moving = "moving_psnr" in scores
    ? `; moving pixels ${scores.moving_psnr.toFixed(1)} dB, copied ${scores.copy_moving_psnr.toFixed(1)} dB`
    : "";
  const film = video(run.predicted.video);
  film.classList.add("predicted");
  const [quality, actions, times] = ["quality", "actions", "times"].map((kind) => element("div", { className: `plot ${kind}` }));
  const box = element("section", { className: "prediction" },
    element("h3", {}, letter(name), " Seen, predicted, difference"), element("p", { className: "faint" }, told + moving + latent), film, controls([film]),
    element("h4", {}, "Each plan's predicted frames"), quality,
    element("h4", {}, "Planned (thin) and executed actions"), actions,
    element("h4", {}, "Time of each plan"), times);
  awaited.set(`${name} ${episode.case}`, (content) => drawPrediction(content, quality, actions, times));
  box.append(element("script", { src: run.predicted.script }));
  return box;
}

const small = { displayModeBar: false, responsive: true };

function drawPrediction({ chunks, executed }, quality, actions, times) {
  if (!canPlot) return;
  const steps = chunks.map((chunk) => chunk.step);
  const score = (name, label, axis, dash) => ({
    name: label, x: steps, y: chunks.map((chunk) => chunk.scores[name] ?? null), yaxis: axis, mode: "lines+markers",
    line: { dash, color: axis === "y2" ? css("--b") : css("--a") }, marker: { size: 5 },
  });
  const latent = chunks.some((chunk) => "latent_error" in chunk.scores);
  const own = latent ? { domain: [0.42, 1] } : {};
  Plotly.react(quality, [
    score("psnr", "PSNR (dB)", "y", "solid"), score("copy_psnr", "PSNR, last frame copied", "y", "dot"),
    score("ssim", "SSIM", "y2", "solid"), score("copy_ssim", "SSIM, last frame copied", "y2", "dot"),
    ...(latent ? [
      score("latent_error", "latent error", "y3", "solid"),
      score("copy_latent_error", "latent error, last frame copied", "y3", "dot"),
    ] : []),
  ], layout({ height: latent ? 400 : 260, xaxis: { title: { text: "step" }, anchor: latent ? "y3" : "y" },
    yaxis: { title: { text: "dB" }, ...own },
    ...(latent ? { yaxis3: { title: { text: "latent error" }, domain: [0, 0.32], automargin: true } } : {}),
    yaxis2: { title: { text: "SSIM" }, overlaying: "y", side: "right", showgrid: false, automargin: true, tickformat: ".2f" } }), small);

  const sizes = executed.length ? executed[0].length : 0;
  const traces = [];
  for (let d = 0; d < sizes; d++) {
    const axis = `y${d ? d + 1 : ""}`;
    const planned = { x: [], y: [] };
    for (const chunk of chunks) {
      chunk.planned.forEach((row, i) => { planned.x.push(chunk.step + i); planned.y.push(row[d]); });
      planned.x.push(null);
      planned.y.push(null);
    }
    traces.push({ ...planned, yaxis: axis, mode: "lines", line: { width: 1, color: css("--faint") }, name: "planned", showlegend: d === 0 });
    traces.push({ x: executed.map((_, i) => i), y: executed.map((row) => row[d]), yaxis: axis, mode: "lines", line: { width: 2, color: css("--a") }, name: "executed", showlegend: d === 0 });
  }
  const rowsOf = Object.fromEntries([...Array(sizes).keys()].map((d) => [`yaxis${d ? d + 1 : ""}`, {
    domain: [1 - (d + 0.88) / sizes, 1 - d / sizes], title: { text: String(d) }, gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
  }]));
  Plotly.react(actions, traces, { ...layout({ height: 90 + 80 * sizes, xaxis: { title: { text: "step" }, anchor: "free", position: 0 } }), ...rowsOf }, small);

  const parts = [["encode_ms", "encode"], ["generate_ms", "generate"], ["decode_ms", "decode"]];
  Plotly.react(times, parts.map(([key, label], i) => ({
    type: "bar", name: label, x: steps, y: chunks.map((chunk) => chunk.timing[key] ?? 0), marker: { color: COLORS[i] },
  })), layout({ height: 220, barmode: "stack", xaxis: { title: { text: "step" } }, yaxis: { title: { text: "ms" } } }), small);
}

// --- begin ---------------------------------------------------------------------------------------

columns.forEach((column, i) => {
  const button = element("button", { type: "button" }, column.name);
  button.addEventListener("click", () => sort(i));
  byId("episodes").tHead.rows[0].append(element("th", { className: column.number ? "number" : "" }, button));
});
fill("by-task", data.episodes.map(taskOf));
fill("by-outcome", data.episodes.flatMap((episode) => episode.runs.map((run) => run.outcome)));
fill("by-failure", data.episodes.flatMap((episode) => episode.runs.map((run) => run.failure)));
byId("more").addEventListener("click", () => { limit += PART; draw(); });
addEventListener("beforeprint", () => { limit = Infinity; draw(); });
for (const kind of ["input", "change"]) byId("filters").addEventListener(kind, filter);
filter();
drawClasses();
drawQuality();
byId("along")?.on("plotly_click", ({ points }) => choose(data.episodes.find((episode) => episode.case === points[0].text)));
for (const draw of [drawClasses, drawQuality]) matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
const named = decodeURIComponent(location.hash.slice(1));
const first = data.episodes.find((episode) => episode.case === named);
// What a reader wants to see first: what differs between two runs, else how an episode fails.
const telling = [
  (episode) => flipOf(episode) !== "", (episode) => episode.runs.some((run) => run.outcome === "failure" && run.video),
  (episode) => episode.runs.some((run) => run.video), () => true,
].reduce((found, wanted) => found ?? data.episodes.find(wanted), undefined);
if (first) choose(first);
else if (telling) choose(telling, false);
