// The report's page: values under the pointer in charts, and the rollout viewer. All text goes in by textContent.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const BINS = [-0.05, -0.35, -0.9, -2.3, -4.6]; // logprobs of probabilities 95%, 70%, 40%, 10%, 1%

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function shown(value, percent) {
  if (value === null) return "–";
  return percent ? (100 * value).toFixed(1) + "%" : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function watchChart(figure, chart) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor"), output = figure.querySelector("output");
  let place = chart.x.length - 1;
  function show(next) {
    place = Math.max(0, Math.min(chart.x.length - 1, next));
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, chart.at[place]);
    cursor.setAttribute("visibility", "visible");
    const values = chart.names.map((name, line) => `${name} ${shown(chart.values[line][place], chart.percent)}`);
    output.textContent = `update ${chart.x[place]}: ${values.join(" · ")}`;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const far = chart.at.map((at) => Math.abs(at - x));
    show(far.indexOf(Math.min(...far)));
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(place + step);
  });
  svg.addEventListener("focus", () => show(place));
  figure.querySelector("details").addEventListener("toggle", (event) => fillTable(event.target, chart), { once: true });
}

function fillTable(details, chart) {
  const box = make("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values" });
  const table = make("table"), head = make("tr"), body = make("tbody");
  for (const name of ["update", ...chart.names]) head.append(make("th", name, { scope: "col" }));
  table.append(make("thead"), body);
  table.tHead.append(head);
  chart.x.forEach((update, place) => {
    const row = make("tr");
    row.append(make("th", update, { scope: "row" }));
    for (const values of chart.values) row.append(make("td", shown(values[place], chart.percent)));
    body.append(row);
  });
  box.append(table);
  details.append(box);
}

function bin(logprob) {
  const place = BINS.findIndex((edge) => logprob >= edge);
  return place < 0 ? BINS.length : place;
}

function tokens(call, version) {
  const box = make("div", undefined, { class: "tokens", tabindex: "0", role: "group", "aria-label": "Sampled tokens; arrow keys go through them" });
  const output = make("output", "Point at a token, or use the arrow keys.");
  let now = -1;
  call.texts.forEach((text, place) => {
    const span = make("span", text, { class: "p" + bin(call.logprobs[place]) });
    span.dataset.place = place;
    box.append(span);
  });
  if (!call.trained) box.classList.add("untrained");
  function show(place) {
    if (box.children[now]) box.children[now].classList.remove("now");
    now = Math.max(0, Math.min(call.ids.length - 1, place));
    if (!box.children[now]) return;
    box.children[now].classList.add("now");
    const logprob = call.logprobs[now];
    const probability = (100 * Math.exp(logprob)).toPrecision(3);
    output.textContent = `token ${now + 1} of ${call.size}: ${JSON.stringify(call.texts[now])}, id ${call.ids[now]}, logprob ${logprob} (${probability}%), policy version ${version}`;
  }
  box.addEventListener("pointerover", (event) => {
    if (event.target.dataset.place !== undefined) show(Number(event.target.dataset.place));
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(now + step);
  });
  const parts = [box, output];
  if (call.size > call.ids.length) parts.push(make("p", `${call.size - call.ids.length} more tokens are left out here.`, { class: "soft" }));
  return parts;
}

const KINDS = {
  start: () => "the main agent's first call",
  "new history": () => "a new history: a sub-agent, or a history that the harness rewrote",
  fork: (call) => `a fork after call ${call.parent + 1}`,
  "goes on": (call) => `goes on after call ${call.parent + 1}`,
};

function callBox(call, place, rollout) {
  const box = make("article", undefined, { class: "call", id: `call-${place + 1}` });
  box.append(make("h4", `Call ${place + 1}: ${KINDS[call.kind](call)}`));
  const trained = rollout.stage === "training" ? (call.trained ? ", trained" : ", not trained") : "";
  box.append(make("p", `${call.size} tokens sampled${trained}, in row ${call.row + 1}; mean logprob ${call.mean_logprob}.`, { class: "soft" }));
  const details = make("details");
  details.append(make("summary", `What it read: ${call.prompt_tokens} new tokens after ${call.history} known ones`), make("pre", call.prompt, { tabindex: "0", role: "region", "aria-label": "What it read" }));
  box.append(details, ...tokens(call, rollout.version));
  return box;
}

// A chain of calls is one list, not a staircase: only forks and new histories nest.
function branches(calls) {
  const list = make("ul", undefined, { class: "tree" });
  const lists = new Map();
  calls.forEach((call, place) => {
    const item = make("li");
    item.append(make("a", `Call ${place + 1}`, { href: `#call-${place + 1}` }), ` ${KINDS[call.kind](call)}, ${call.size} tokens`);
    let home = list;
    if (call.kind === "goes on") home = lists.get(call.parent);
    if (call.kind === "fork") {
      home = make("ul");
      lists.get(call.parent).appendChild(make("li")).append(home);
    }
    home.append(item);
    lists.set(place, home);
  });
  return list;
}

function words(outcome) {
  return outcome.replaceAll("_", " ");
}

function anchor(rollout) {
  return "rollout-" + rollout.id;
}

function showRollout(rollout) {
  const place = document.getElementById("rollout");
  const facts = make("dl");
  for (const [name, value] of rollout.facts) facts.append(make("dt", name), make("dd", value));
  const heading = make("h3");
  heading.append(make("a", `${rollout.task} in ${rollout.harness}`, { href: `#${anchor(rollout)}` }), `, ${rollout.stage}`);
  const parts = [heading, facts];
  const twin = data.rollouts.find((other) => other.id === rollout.twin);
  if (twin) {
    const link = make("p");
    link.append(make("a", `The same in ${twin.stage}: ${words(twin.outcome)}`, { href: `#${anchor(twin)}` }));
    parts.push(link);
  }
  if (rollout.calls.length) parts.push(make("h3", "Calls"), branches(rollout.calls));
  else parts.push(make("p", "No token of this rollout was kept: nothing of it can be trained."));
  rollout.calls.forEach((call, number) => parts.push(callBox(call, number, rollout)));
  const shown = make("article", undefined, { id: anchor(rollout), tabindex: "-1" });
  shown.append(...parts);
  place.replaceChildren(shown);
}

function reward(rollout) {
  return rollout.stage === "training" ? `, reward ${rollout.reward}` : "";
}

function startViewer() {
  const select = document.getElementById("which");
  if (!select) return;
  const groups = new Map();
  data.rollouts.forEach((rollout, place) => {
    const label = `${rollout.run}${rollout.stage}, ${rollout.harness}`;
    if (!groups.has(label)) groups.set(label, select.appendChild(make("optgroup", undefined, { label })));
    groups.get(label).append(make("option", `${rollout.task} #${rollout.index}: ${words(rollout.outcome)}${reward(rollout)}`, { value: place }));
  });
  const order = [...select.options].map((option) => option.value);
  const show = () => showRollout(data.rollouts[select.value]);
  const turn = (step) => () => {
    select.value = order[(order.indexOf(select.value) + step + order.length) % order.length];
    show();
  };
  // #rollout-ID leads to a rollout, from anywhere; not every rollout of a run is on its page.
  const follow = () => {
    if (!location.hash.startsWith("#rollout-")) return;
    const id = decodeURIComponent(location.hash.slice("#rollout-".length));
    const place = data.rollouts.findIndex((rollout) => rollout.id === id);
    if (place < 0) return document.getElementById("rollout").replaceChildren(make("p", `Rollout ${id} is not among those on this page.`));
    select.value = place;
    show();
    const shown = document.getElementById(anchor(data.rollouts[place]));
    shown.scrollIntoView();
    shown.focus({ preventScroll: true });
  };
  window.addEventListener("hashchange", follow);
  select.addEventListener("change", show);
  document.getElementById("previous").addEventListener("click", turn(-1));
  document.getElementById("next").addEventListener("click", turn(1));
  show();
  follow();
}

document.querySelectorAll("figure.chart").forEach((figure, place) => watchChart(figure, data.charts[place]));
startViewer();
