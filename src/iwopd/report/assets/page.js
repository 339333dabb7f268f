// What the whole page shares: its data, colours, contents, and reloading while a run goes on.
"use strict";

const report = {
  data(name) {
    const block = document.getElementById(`data-${name}`);
    return block ? JSON.parse(block.textContent) : null;
  },
  // sessionStorage may be forbidden on file:// pages; then choices last until the next load.
  remember(key, value) {
    try { sessionStorage.setItem(`iwopd ${location.pathname} ${key}`, JSON.stringify(value)); } catch { /* lasts for this load only */ }
  },
  recall(key) {
    try { return JSON.parse(sessionStorage.getItem(`iwopd ${location.pathname} ${key}`)); } catch { return null; }
  },
  // Characters that steer a terminal, turn the writing direction or stand for nothing, made visible.
  visible(text) {
    return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/\u007f/g, "\u2421")
      .replace(/[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `‹U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`)
      .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
  },
  element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  },
  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },
  onTheme: [],
};
report.page = report.data("page");

// --- colours -----------------------------------------------------------------------------------------------------------

{
  const button = document.getElementById("theme");
  const names = { auto: "system setting", light: "light", dark: "dark" };
  const apply = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    document.getElementById("theme-words").textContent = choice[0].toUpperCase() + choice.slice(1);
    button.setAttribute("aria-label", `Colours: ${names[choice]}. Press to change.`);
    report.onTheme.forEach((redraw) => redraw());
  };
  let choice = report.recall("theme") in names ? report.recall("theme") : "auto";
  apply(choice);
  button.addEventListener("click", () => {
    const order = report.isDark() ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
    choice = order[(order.indexOf(choice) + 1) % 3];
    report.remember("theme", choice);
    apply(choice);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => report.onTheme.forEach((redraw) => redraw()));
}

// --- contents: which section is on the screen ------------------------------------------------------------------------------

{
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const seen = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) id === first ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const id of links.keys()) observer.observe(document.getElementById(id));
}

// --- following a run: the policy forbids asking for news, so the page simply loads itself again -----------------------------

if (report.page.refresh) {
  const box = document.getElementById("live");
  const button = document.getElementById("live-toggle");
  let paused = report.recall("paused") === true;
  const busy = () => !document.getElementById("tip")?.hidden; // somebody is reading a token's numbers
  const show = () => {
    box.classList.toggle("paused", paused);
    button.textContent = paused ? "Go on" : "Pause";
    document.getElementById("live-words").textContent = paused ? "paused" : `live, every ${Math.round(report.page.refresh)} s`;
  };
  show();
  button.addEventListener("click", () => { paused = !paused; report.remember("paused", paused); show(); });
  setInterval(() => {
    if (paused || busy() || document.hidden) return;
    report.remember("scroll", scrollY);
    location.reload();
  }, 1000 * report.page.refresh);
  const before = report.recall("scroll");
  if (before !== null) addEventListener("load", () => scrollTo({ top: before, behavior: "instant" }));
}
