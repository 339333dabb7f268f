// The token view: one rollout at a time is unpacked and drawn. `token_columns.py` says how rollouts are packed.
"use strict";

if (document.getElementById("token-view")) {
  const packed = report.data("tokens");
  const byId = (id) => document.getElementById(id);
  const zero = 2 ** 23, whole = 2 ** 24;
  const names = ["step", "task", "prompt_id", "correct", "stop", "length", "drift", "drifts", "absGap", "kl", "columns", "blob"];
  const runs = packed.runs.map((run) => ({
    ...run, rollouts: run.rollouts.map((row, place) => ({ ...Object.fromEntries(names.map((name, i) => [name, row[i]])), place })),
  }));
  const state = { run: 0, task: "all", step: "all", outcome: "all", sort: "file", colour: "gap", place: null, ...report.recall("tokens") };
  if (!runs[state.run]) state.run = 0;
  let shown = []; // rollouts that pass the filters, in order
  let chosen = null; // the rollout on the screen, unpacked
  let turn = 0; // unpacking is asynchronous: the last choice wins

  // --- unpacking ---------------------------------------------------------------------------------------------------------

  async function unpack(blob) {
    const bytes = Uint8Array.from(atob(blob), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  let table = null;
  const tokenTable = () => (table ??= unpack(packed.table).then((bytes) => JSON.parse(new TextDecoder().decode(bytes))));

  async function open(rollout) {
    const [bytes, entries] = await Promise.all([unpack(rollout.blob), tokenTable()]);
    const size = new DataView(bytes.buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    const raw = {};
    let offset = 4 + size;
    for (const name of rollout.columns) {
      const column = new Int32Array(rollout.length);
      for (let i = 0; i < rollout.length; i++) column[i] = bytes[offset + i] | (bytes[offset + rollout.length + i] << 8) | (bytes[offset + 2 * rollout.length + i] << 16);
      raw[name] = column;
      offset += 3 * rollout.length;
    }
    if (raw.gap && raw.teacher && raw.student) {
      raw.gap = raw.gap.map((left, i) => (raw.teacher[i] && raw.student[i] ? undo(left, raw.teacher[i] - raw.student[i] + zero) : left));
    }
    if (raw.weight) { let sum = 0; raw.weight = raw.weight.map((step) => (sum = (sum + step) % whole)); }
    const columns = {};
    for (const [name, column] of Object.entries(raw)) {
      if (name !== "token") columns[name] = Float64Array.from(column, (value) => (value === 0 ? NaN : (value - zero) / packed.steps));
    }
    return { ...rollout, ...header, tokens: Array.from(raw.token, (place) => entries[place]), columns };
  }
  const undo = (left, guess) => (((left + guess) % whole) + whole) % whole;

  // --- the list -----------------------------------------------------------------------------------------------------------

  const outcome = (r) => (r.correct === true ? "right" : r.correct === false ? "wrong" : "unknown");
  const passes = {
    all: () => true, right: (r) => r.correct === true, wrong: (r) => r.correct === false, cut: (r) => r.stop === "length",
  };
  const last = Number.MAX_SAFE_INTEGER;
  const orders = {
    file: (a, b) => a.place - b.place,
    early: (a, b) => (a.drift ?? last) - (b.drift ?? last),
    late: (a, b) => (b.drift ?? -1) - (a.drift ?? -1),
    most: (a, b) => b.drifts - a.drifts,
    gap: (a, b) => (b.absGap ?? -1) - (a.absGap ?? -1),
    kl: (a, b) => (b.kl ?? -1) - (a.kl ?? -1),
    long: (a, b) => b.length - a.length,
  };

  function fillControls() {
    byId("t-run").replaceChildren(...runs.map((run, i) => new Option(report.visible(run.label === run.name ? run.name : `${run.label} · ${run.name}`), i, false, i === state.run)));
    const steps = [...new Set(runs[state.run].rollouts.map((r) => r.step))].sort((a, b) => a - b);
    if (state.step !== "all" && !steps.includes(Number(state.step))) state.step = "all";
    byId("t-step").replaceChildren(new Option("all", "all"), ...steps.map((step) => new Option(step === 0 ? "0 (before)" : step, step)));
    const tasks = [...new Set(runs[state.run].rollouts.map((r) => r.task))].sort();
    if (!tasks.includes(state.task)) state.task = "all";
    byId("t-task").replaceChildren(new Option("all", "all"), ...tasks.map((task) => new Option(report.visible(task), task)));
    byId("t-task").closest("label").hidden = tasks.length < 2;
    for (const name of ["run", "task", "step", "outcome", "sort"]) byId(`t-${name}`).value = String(state[name]);
    for (const radio of document.getElementsByName("t-colour")) {
      radio.disabled = !runs[state.run].rollouts.some((r) => r.columns.includes(radio.value));
      radio.checked = radio.value === state.colour;
    }
  }

  function list() {
    const all = runs[state.run].rollouts;
    shown = all.filter((r) => passes[state.outcome](r) && (state.task === "all" || r.task === state.task) && (state.step === "all" || r.step === Number(state.step)));
    shown.sort((a, b) => orders[state.sort](a, b) || a.place - b.place);
    const right = shown.filter((r) => r.correct === true).length;
    byId("t-count").textContent = shown.length === all.length
      ? `${all.length} rollouts, ${right} right` : `${shown.length} of ${all.length} rollouts, ${right} right`;
    byId("t-list").replaceChildren(...shown.map((r) => {
      const item = report.element("div", "item");
      item.id = `rollout-${r.place}`;
      item.setAttribute("role", "option");
      const title = report.element("b");
      const sign = { right: "✓", wrong: "✗", unknown: "?" }[outcome(r)];
      title.append(report.element("span", `mark-${outcome(r)}`, `${sign} `), report.visible(r.prompt_id));
      title.firstChild.setAttribute("aria-label", outcome(r));
      item.append(title, report.element("small", "", `step ${r.step} · ${r.length} tokens · ${r.drift === null ? "no drift" : `drift at ${r.drift + 1}`}`));
      item.addEventListener("click", () => choose(r));
      return item;
    }));
    choose(shown.find((r) => r.place === state.place) ?? shown[0] ?? null);
  }

  async function choose(rollout) {
    const mine = ++turn;
    hideTip();
    state.place = rollout ? rollout.place : null;
    report.remember("tokens", state);
    for (const item of byId("t-list").children) {
      const is = rollout !== null && item.id === `rollout-${rollout.place}`;
      item.setAttribute("aria-selected", String(is));
      if (is) {
        byId("t-list").setAttribute("aria-activedescendant", item.id);
        const box = byId("t-list"); // scroll the list alone, never the page
        if (item.offsetTop < box.scrollTop + box.offsetTop) box.scrollTop = item.offsetTop - box.offsetTop;
        else if (item.offsetTop + item.offsetHeight > box.scrollTop + box.offsetTop + box.clientHeight) box.scrollTop = item.offsetTop - box.offsetTop + item.offsetHeight - box.clientHeight;
      }
    }
    byId("t-rollout").hidden = rollout === null;
    if (rollout === null) return;
    const opened = await open(rollout);
    if (mine === turn) { chosen = opened; show(); }
  }

  function move(by) {
    if (!shown.length) return;
    const now = shown.findIndex((r) => r.place === state.place);
    choose(shown[Math.min(shown.length - 1, Math.max(0, now + by))]);
  }

  // --- one rollout ----------------------------------------------------------------------------------------------------------

  // Classes of colour: eleven around zero for the gap, nine from low to high for weight and KL.
  const gapEdges = [-6, -4, -2, -1, -0.3, 0.3, 1, 2, 4, 6];
  function scale() {
    const values = chosen.columns[state.colour];
    if (state.colour === "gap") return { prefix: "d", count: 11, edges: gapEdges };
    const finite = values ? Array.from(values).filter(Number.isFinite) : [];
    let low = state.colour === "kl" ? 0 : finite.reduce((a, b) => Math.min(a, b), Infinity);
    let high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!(high > low)) { low = Math.min(low, 0); high = Math.max(high, low + 1); }
    return { prefix: "q", count: 9, edges: Array.from({ length: 8 }, (_, i) => low + ((i + 1) * (high - low)) / 9), low, high };
  }
  function colourClass(value, { prefix, edges }) {
    if (!Number.isFinite(value)) return "none";
    let place = 0;
    while (place < edges.length && value >= edges[place]) place++;
    return prefix + place;
  }

  function show() {
    const { columns } = chosen;
    const badge = (text, kind = "") => report.element("span", `badge ${kind}`, text);
    const words = { right: "right answer", wrong: "wrong answer", unknown: "not checked" }[outcome(chosen)];
    byId("t-badges").replaceChildren(
      badge(words, outcome(chosen)), ...(chosen.task ? [badge(report.visible(chosen.task))] : []), badge(report.visible(chosen.prompt_id)), badge(`step ${chosen.step}`),
      badge(`${chosen.length} tokens`), badge({ eos: "ended by itself", length: "cut off", horizon: "stopped at the horizon" }[chosen.stop] ?? report.visible(chosen.stop)),
      badge(chosen.drift === null ? "no drift" : `drift at token ${chosen.drift + 1}`),
    );
    const now = shown.findIndex((r) => r.place === state.place);
    byId("t-before").disabled = now <= 0;
    byId("t-after").disabled = now >= shown.length - 1;
    byId("t-prompt").textContent = report.visible(chosen.prompt ?? "–");
    byId("t-answer").textContent = report.visible(chosen.answer ?? "–");
    paint();
  }

  function paint() {
    const steps = scale();
    const values = chosen.columns[state.colour];
    const box = byId("t-tokens");
    const piece = document.createDocumentFragment();
    chosen.tokens.forEach(([, text], i) => {
      const span = report.element("span", `t ${values ? colourClass(values[i], steps) : "none"}`);
      if (i === chosen.drift) span.classList.add("drift");
      span.dataset.i = i;
      span.tabIndex = i === 0 ? 0 : -1; // one stop for the Tab key, arrow keys from there
      span.setAttribute("role", "listitem");
      writeToken(span, text);
      piece.append(span);
    });
    box.replaceChildren(piece);
    box.scrollTop = 0;
    paintScale(steps, values);
    paintStrip(values);
    const total = chosen.drifts;
    byId("t-words").textContent = chosen.drift === null
      ? "No token of this answer drifts."
      : `${total} of ${chosen.length} tokens drift; the first is token ${chosen.drift + 1}, ${Math.round((100 * chosen.drift) / chosen.length)} % into the answer.`;
  }

  // Line breaks break the line and are shown as well; other invisible characters get a sign.
  function writeToken(span, text) {
    if (text === "") { span.append(report.element("span", "ctl", "∅")); return; }
    text.split(/(\n)/).forEach((part) => {
      if (part === "\n") span.append(report.element("span", "ctl", "↵"), "\n");
      else if (part) span.append(report.visible(part).replace(/\t/g, "⇥"));
    });
  }

  function paintScale(steps, values) {
    const swatches = report.element("span", "swatches");
    swatches.setAttribute("aria-hidden", "true");
    for (let i = 0; i < steps.count; i++) swatches.append(report.element("i", steps.prefix + i));
    const ends = {
      gap: ["gap −6 or less: the teacher would not have written it", "6 or more"],
      weight: [`weight ${short(steps.low)}`, short(steps.high)], kl: [`KL ${short(steps.low)}`, short(steps.high)],
    }[state.colour];
    byId("t-scale").replaceChildren(...(values ? [report.element("span", "", ends[0]), swatches, report.element("span", "", ends[1])] : [report.element("span", "", "This rollout has no such numbers.")]));
  }

  // The whole answer at a glance. More tokens than columns: each column shows its largest value.
  function paintStrip(values) {
    const strip = byId("t-strip"), width = 1000, height = 100;
    const NS = "http://www.w3.org/2000/svg";
    const make = (tag, attributes) => { const made = document.createElementNS(NS, tag); for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v); return made; };
    strip.setAttribute("viewBox", `0 0 ${width} ${height}`);
    strip.setAttribute("aria-label", `${state.colour} along the answer`);
    byId("t-strip-scale").replaceChildren();
    byId("t-strip-places").replaceChildren();
    if (!values) { strip.replaceChildren(); return; }
    const count = Math.min(chosen.length, 300);
    const columns = Array.from({ length: count }, (_, c) => {
      let best = 0;
      for (let i = Math.floor((c * chosen.length) / count); i < Math.floor(((c + 1) * chosen.length) / count); i++) {
        if (Number.isFinite(values[i]) && Math.abs(values[i]) > Math.abs(best)) best = values[i];
      }
      return best;
    });
    const signed = state.colour === "gap";
    const top = columns.reduce((a, v) => Math.max(a, v), 0), bottom = signed ? columns.reduce((a, v) => Math.min(a, v), 0) : 0;
    const span = top - bottom || 1, y = (v) => ((top - v) / span) * height;
    const bars = columns.map((v, c) => make("rect", {
      x: (c * width) / count, width: Math.max(0.5, (0.86 * width) / count), y: Math.min(y(v), y(0)), height: Math.max(0.8, Math.abs(y(v) - y(0))),
      class: signed ? (v < 0 ? "down" : "up") : "level",
    }));
    const extra = [make("line", { x1: 0, x2: width, y1: y(0), y2: y(0) })];
    if (chosen.drift !== null) { const x = (chosen.drift * width) / chosen.length; extra.push(make("line", { x1: x, x2: x, y1: 0, y2: height, class: "drift" })); }
    strip.replaceChildren(...bars, ...extra);
    // The scale: the ends, and zero where it is not too near to one of them.
    const marks = [[top, 0], [bottom, 100]].filter(([value]) => Math.abs(value) > span / 12);
    if (marks.every(([, at]) => Math.abs(at - y(0)) > 25)) marks.push([0, y(0)]);
    byId("t-strip-scale").replaceChildren(...marks.map(([value, at]) => {
      const mark = report.element("span", "", value === 0 ? "0" : round(value));
      mark.style.top = `${at}%`;
      return mark;
    }));
    const title = { gap: "gap in nats", weight: "weight", kl: "KL in nats" }[state.colour];
    const folded = count < chosen.length ? ", the largest of each column" : "";
    byId("t-strip-places").replaceChildren(...["token 1", `${title}, by token${folded}`, String(chosen.length)].map((text) => report.element("span", "", text)));
  }

  byId("t-strip").addEventListener("click", (event) => {
    const box = byId("t-strip").getBoundingClientRect();
    focusToken(Math.floor(((event.clientX - box.left) / box.width) * chosen.length));
  });

  // --- the numbers of a token ------------------------------------------------------------------------------------------------

  const round = (value) => String(Number(value.toPrecision(2))).replace("-", "−");
  const short = (value) => (Number.isFinite(value) ? value.toFixed(2).replace("-", "−") : "–");
  const long = (value) => (Number.isFinite(value) ? value.toFixed(4).replace("-", "−") : "–");
  const chance = (logprob) => {
    if (!Number.isFinite(logprob)) return "–";
    const percent = 100 * Math.exp(logprob);
    return percent >= 0.01 || percent === 0 ? `${percent.toFixed(2)} %` : `${percent.toExponential(1)} %`;
  };

  function showTip(span) {
    const i = Number(span.dataset.i);
    const [id, text] = chosen.tokens[i];
    const { student, teacher, gap, weight, kl } = chosen.columns;
    const tip = byId("tip");
    const head = report.element("div");
    head.append(report.element("span", "token", `“${report.visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`), report.element("span", "where", `token ${i + 1} of ${chosen.length}${id === null ? "" : `, id ${id}`}`));
    const numbers = report.element("dl");
    const row = (name, ...values) => {
      const pair = report.element("div");
      pair.append(report.element("dt", "", name), ...values.filter(Boolean).map((value) => report.element("dd", "", value)));
      numbers.append(pair);
    };
    if (student) row("student", chance(student[i]), long(student[i]));
    const silent = chosen.spans ? "with its span" : "impossible";
    if (teacher) row(chosen.spans ? "teacher, span" : "teacher", Number.isFinite(teacher[i]) ? chance(teacher[i]) : silent, long(teacher[i]));
    if (gap) row(chosen.spans ? "gap of the span" : "gap", "", long(gap[i]));
    if (weight) row("weight", "", long(weight[i]));
    if (kl) row("KL", "", long(kl[i]));
    tip.replaceChildren(head, numbers);
    tip.hidden = false;
    unmark();
    span.classList.add("shown");
    span.setAttribute("aria-describedby", "tip");
  }
  function unmark() {
    const old = document.querySelector(".t[aria-describedby]");
    old?.removeAttribute("aria-describedby");
    old?.classList.remove("shown");
  }
  function hideTip() {
    byId("tip").hidden = true;
    unmark();
  }

  function focusToken(i) {
    const spans = byId("t-tokens").children;
    const target = spans[Math.max(0, Math.min(spans.length - 1, i))];
    if (!target) return;
    byId("t-tokens").querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    target.tabIndex = 0;
    target.focus();
  }

  const tokens = byId("t-tokens");
  tokens.addEventListener("pointerover", (event) => { const span = event.target.closest(".t"); if (span) showTip(span); });
  tokens.addEventListener("pointerleave", () => { if (!tokens.contains(document.activeElement)) hideTip(); });
  tokens.addEventListener("click", (event) => { const span = event.target.closest(".t"); if (span) focusToken(Number(span.dataset.i)); });
  tokens.addEventListener("focusin", (event) => { const span = event.target.closest(".t"); if (span) showTip(span); });
  tokens.addEventListener("focusout", hideTip);
  tokens.addEventListener("keydown", (event) => {
    const span = event.target.closest(".t");
    if (!span) return;
    const i = Number(span.dataset.i);
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, ArrowDown: i + 10, ArrowUp: i - 10, Home: 0, End: chosen.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); focusToken(to); }
  });

  // --- controls and keys ------------------------------------------------------------------------------------------------------

  for (const name of ["run", "task", "step", "outcome", "sort"]) {
    byId(`t-${name}`).addEventListener("change", (event) => {
      state[name] = name === "run" ? Number(event.target.value) : event.target.value;
      fillControls();
      list();
    });
  }
  for (const radio of document.getElementsByName("t-colour")) {
    radio.addEventListener("change", () => { state.colour = radio.value; report.remember("tokens", state); if (chosen) paint(); });
  }
  byId("t-before").addEventListener("click", () => move(-1));
  byId("t-after").addEventListener("click", () => move(1));
  byId("t-list").addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -last, End: last }[event.key];
    if (by !== undefined) { event.preventDefault(); move(by); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
    if (event.key === "j") move(1);
    if (event.key === "k") move(-1);
  });

  fillControls();
  list();
}
