"use strict";
// Everything that comes from the model reaches the page through textContent and setAttribute, never as markup.
const report = JSON.parse(document.getElementById("data").textContent);
const { tokens, steps } = report;
const by = (id) => document.getElementById(id);
const tokenNodes = [...document.querySelectorAll("#text [data-token]")];
const percent = (share) => (share >= 0.0995 ? (100 * share).toFixed(0) : share >= 0.0005 ? (100 * share).toFixed(2 - (share >= 0.01)) : "< 0.05") + " %";
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
let chosenToken = 0;
let chosenStep = -1;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bar(share) {
  const width = Math.max(0, Math.min(100, 100 * share));
  return drawn("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    drawn("rect", { class: "track", width: 100, height: 10 }), drawn("rect", { class: "fill", width, height: 10 }));
}

function table(heads, lines) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
}

function candidateLine(candidate, picked) {
  return element("tr", picked ? { class: "picked" } : {}, element("td", {}, element("code", {}, candidate.label)),
    element("td", { class: "number" }, percent(candidate.probability)), element("td", {}, bar(candidate.probability)));
}

function howItCame(token) {
  const step = steps[token.step];
  const accepted = step.nodes.filter((node) => node.accepted).length;
  if (token.kind === "accepted") return `Drafted at depth ${token.depth} of step ${token.step}, and accepted.`;
  if (token.kind === "bonus") return `Picked in step ${token.step} behind ${plural(accepted, "accepted draft")}: the token that every step gives.`;
  return step.nodes.length ? `Picked in step ${token.step}; none of its ${plural(step.nodes.length, "draft")} was right at depth 1.`
    : `Picked in step ${token.step}, for which nothing was drafted.`;
}

function showToken(index, focus) {
  if (!tokens.length) return;
  chosenToken = Math.max(0, Math.min(tokens.length - 1, index));
  const token = tokens[chosenToken];
  tokenNodes.forEach((node, place) => {
    node.classList.toggle("chosen", place === chosenToken);
    node.classList.toggle("same-step", tokens[place].step === token.step);
    node.setAttribute("tabindex", place === chosenToken ? "0" : "-1");
    node.setAttribute("aria-pressed", place === chosenToken ? "true" : "false");
  });
  if (focus) tokenNodes[chosenToken].focus({ preventScroll: false });
  const parts = [
    element("p", { class: "name" }, element("code", {}, token.label)),
    element("p", {}, `Token ${chosenToken} of the text, id ${token.token}. ${howItCame(token)}`),
    element("h3", {}, "What the model thought likely"),
    table(["token", "probability", ""], token.top.map((other) => candidateLine(other, other.token === token.token))),
  ];
  if (!token.top.some((other) => other.token === token.token)) {
    parts.push(element("p", {}, `The picked token had ${percent(token.probability)}.`));
  }
  if (token.rejected.length) {
    parts.push(element("h3", {}, "Drafts for this place that were rejected"),
      table(["token", "probability", ""], token.rejected.map((other) => candidateLine(other, false))));
  }
  const button = element("button", { type: "button" }, `Show step ${token.step}`);
  button.addEventListener("click", () => { showStep(token.step); by("step").scrollIntoView({ block: "start" }); });
  parts.push(element("p", {}, button));
  by("token").replaceChildren(...parts);
  showStep(token.step);
}

function showStep(index) {
  const wanted = Math.max(0, Math.min(steps.length - 1, index));
  if (!steps.length || wanted === chosenStep) return;
  chosenStep = wanted;
  const step = steps[chosenStep];
  by("number").value = chosenStep;
  by("which").textContent = `${chosenStep} of 0 to ${steps.length - 1}`;
  by("before").disabled = chosenStep === 0;
  by("after").disabled = chosenStep === steps.length - 1;
  [...by("strip").children].forEach((node, place) => {
    node.classList.toggle("chosen", place === chosenStep);
    node.setAttribute("tabindex", place === chosenStep ? "0" : "-1");
    node.setAttribute("aria-pressed", place === chosenStep ? "true" : "false");
  });
  const emitted = tokens.slice(step.first_token, step.first_token + step.num_tokens);
  const total = Object.values(step.timings_ms).reduce((sum, time) => sum + time, 0);
  const times = Object.entries(step.timings_ms).map(([phase, time]) => `${phase} ${time.toFixed(1)}`).join(", ");
  by("what").replaceChildren(element("dl", {},
    element("dt", {}, "emitted"), element("dd", {}, element("code", {}, emitted.map((token) => token.label).join(""))),
    element("dt", {}, "drafted"), element("dd", {}, `${plural(step.nodes.length, "node")}, ${step.num_tokens - 1} accepted`),
    element("dt", {}, "time"), element("dd", {}, `${total.toFixed(1)} ms: ${times}`),
    ...Object.entries(step.notes).flatMap(([name, note]) => [element("dt", {}, name), element("dd", {}, note)])));
  drawTree(step, emitted[emitted.length - 1]);
  listNodes(step);
  drawPages(step);
}

// The tree grows to the right; every leaf has a line of its own, and a parent stands at the middle of its children.
function drawTree(step, last) {
  const path = [0, ...step.nodes.flatMap((node, i) => (node.accepted ? [i + 1] : []))];
  const all = [{ label: step.root, parent: -1, depth: 0, kind: "root" },
    ...step.nodes.map((node) => ({ ...node, kind: node.accepted ? "accepted" : "rejected" }))];
  const met = all.findIndex((node) => node.parent === path[path.length - 1] && node.token === last.token);
  if (met > 0) all[met].kind = "picked";
  else all.push({ label: last.label, parent: path[path.length - 1], depth: path.length, kind: "picked", probability: last.probability });
  const children = all.map(() => []);
  all.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  const [wide, high, gapX, gapY] = [118, 30, 34, 10];
  let line = 0;
  const place = (i) => {
    if (!children[i].length) all[i].line = line++;
    else {
      children[i].forEach(place);
      all[i].line = (all[children[i][0]].line + all[children[i][children[i].length - 1]].line) / 2;
    }
  };
  place(0);
  const x = (node) => 4 + node.depth * (wide + gapX);
  const y = (node) => 4 + node.line * (high + gapY);
  const deepest = Math.max(...all.map((node) => node.depth));
  const svg = drawn("svg", { width: x({ depth: deepest }) + wide + 4, height: y({ line }) + 2, role: "img",
    "aria-label": `Draft tree of step ${step.index}: ${plural(step.nodes.length, "node")}, ${step.num_tokens - 1} accepted` });
  for (const node of all) {
    if (node.parent < 0) continue;
    const from = all[node.parent];
    const [x0, y0, x1, y1] = [x(from) + wide, y(from) + high / 2, x(node), y(node) + high / 2];
    const kept = node.kind === "accepted" || node.kind === "picked";
    svg.append(drawn("path", { d: `M${x0} ${y0} C${x0 + 18} ${y0} ${x1 - 18} ${y1} ${x1} ${y1}`, ...(kept ? { class: "kept" } : {}) }));
  }
  for (const node of all) {
    const share = node.probability === undefined || node.probability === null ? "" : percent(node.probability);
    const short = node.label.length > 9 ? node.label.slice(0, 8) + "…" : node.label;
    const title = `${node.label}: ${node.kind}${share ? ", " + share : ""}`;
    svg.append(drawn("g", { class: node.kind }, drawn("title", {}, title),
      drawn("rect", { x: x(node), y: y(node), width: wide, height: high, rx: 6 }),
      drawn("text", { x: x(node) + 7, y: y(node) + 20 }, short),
      drawn("text", { class: "share", x: x(node) + wide - 6, y: y(node) + 19, "text-anchor": "end" }, share)));
  }
  by("tree").replaceChildren(svg);
}

function listNodes(step) {
  const lines = step.nodes.map((node, i) => element("tr", {}, ...[i + 1, node.parent, node.depth].map((n) => element("td", { class: "number" }, String(n))),
    element("td", {}, element("code", {}, node.label)), element("td", {}, node.accepted ? "accepted" : "rejected"),
    element("td", { class: "number" }, node.probability === null ? "not looked at" : percent(node.probability))));
  by("nodes").replaceChildren(...table(["node", "parent", "depth", "token", "", "probability"], lines).children);
}

function drawPages(step) {
  const before = step.context_length;
  const after = before + step.rows_committed;
  const promptLength = report.prompt.length;
  const atOnce = ["direct", "moved"].includes(step.commit_path);
  const touched = atOnce ? before + step.rows_staged : after;
  const state = (slot) => (slot < Math.min(before, promptLength) ? "prompt" : slot < before ? "earlier" : slot < after ? "now" : slot < touched ? "dirty" : "free");
  const words = { prompt: "prompt", earlier: "committed earlier", now: "committed by this step", dirty: "written by this step and rejected", free: "reserved", gone: "staged, rejected, never written" };
  const counts = {};
  const slotOf = (kind) => { counts[kind] = (counts[kind] || 0) + 1; return element("span", { class: `slot ${kind}`, title: words[kind] }); };
  // Pages that are full of committed text for long, and those reserved far ahead, all look alike: they are counted only.
  const first = Math.max(0, Math.floor(before / report.page_size) - 3);
  const last = Math.min(step.pages.length, Math.ceil(touched / report.page_size) + 1);
  const leaves = step.pages.slice(first, last).map((page, i) => {
    const start = (first + i) * report.page_size;
    const slots = Array.from({ length: report.page_size }, (_, offset) => slotOf(state(start + offset)));
    return element("div", { class: "leaf" }, `page ${page}`, element("div", { class: "slots" }, ...slots));
  });
  const rejected = step.rows_staged - step.rows_committed;
  if (!atOnce && rejected > 0) {
    leaves.push(element("div", { class: "leaf" }, "staging", element("div", { class: "slots" }, ...Array.from({ length: rejected }, () => slotOf("gone")))));
  }
  const hidden = [];
  if (first > 0) hidden.push(`${plural(first, "page")} before these, full`);
  if (last < step.pages.length) hidden.push(`${plural(step.pages.length - last, "page")} after these, reserved`);
  by("pages").replaceChildren(
    element("p", {}, `${plural(step.rows_staged, "row")} staged, ${step.rows_committed} committed, ${step.bytes_written.toLocaleString("en")} bytes written to pages of ${plural(report.page_size, "token")}.`),
    element("div", { class: "book" }, ...leaves),
    element("ul", { class: "legend" }, ...Object.keys(counts).map((kind) => element("li", {}, element("span", { class: `slot ${kind}` }), ` ${words[kind]}: ${counts[kind]}`))),
    element("p", { class: "hint" }, hidden.join("; ")));
  for (const mark of by("pages").querySelectorAll("li .slot")) mark.style.display = "inline-block";
}

function onKeys(node, move) {
  node.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(moves[event.key]);
  });
}

tokenNodes.forEach((node, place) => {
  node.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") showToken(place, false); });
  node.addEventListener("click", () => showToken(place, true));
});
onKeys(by("text"), (change) => showToken(chosenToken + change, true));

const most = Math.max(1, ...steps.map((step) => step.num_tokens));
steps.forEach((step, place) => {
  const mark = element("span", { role: "button", tabindex: "-1", title: `step ${place}: ${plural(step.num_tokens, "token")}`, "aria-label": `Step ${place}, ${plural(step.num_tokens, "token")}` });
  mark.style.height = `${0.3 + (3 * step.num_tokens) / most}rem`;
  mark.addEventListener("click", () => showStep(place));
  by("strip").append(mark);
});
onKeys(by("strip"), (change) => {
  showStep(chosenStep + change);
  by("strip").children[chosenStep].focus();
});
by("number").addEventListener("input", (event) => showStep(Number(event.target.value)));
by("before").addEventListener("click", () => showStep(chosenStep - 1));
by("after").addEventListener("click", () => showStep(chosenStep + 1));
showToken(0, false);
